"""The benchmark of packing, in a process that has imported NeMo already."""

import json
import runpy
from pathlib import Path

import pytest

from nemo_dllm.collections.diffusion.data.tokenizer import byte_tokenizer

pytestmark = pytest.mark.nemo

JOBS = Path(__file__).parents[1] / "docs" / "command_jobs.py"
TINY = {
    "model.config.num_layers": 1,
    "model.config.hidden_size": 32,
    "model.config.ffn_hidden_size": 64,
    "model.config.num_attention_heads": 2,
    "model.config.num_query_groups": 1,
    "model.config.kv_channels": 16,
    "model.config.vocab_size": 400,
    "model.objective.mask_token_id": 399,
}


# Blocks of 32 fill samples of 23 and 24 bytes, end token included, up to 32.
@pytest.mark.parametrize("kind, fill", [("mdlm", 1), ("bd3lm", 23.5 / 32)])
def test_a_table(forks, tmp_path, kind, fill):
    rows = [{"question": f"{i:05}, squared? ", "answer": "b" * (6 + i % 2)} for i in range(400)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = "--sequences 2 --length 256 --steps 3 --warmup 1 --precision fp32 --json rows.json"
    byte_tokenizer(tmp_path / "byte")
    command = [
        "python",
        "benchmarks/packing.py",
        f"qwen3_0p6b_{kind}_finetune",
        "questions.jsonl",
        "--tokenizer",
        "byte",
    ]
    fields = [f"{name}={value}" for name, value in TINY.items()]
    output = tmp_path / "output.txt"
    job = {"command": [*command, *options.split(), "--set", *fields], "folder": tmp_path, "output": output}
    process = forks.Process(target=runpy.run_path, args=(str(JOBS), {"job": job}, "__main__"))
    process.start()
    process.join(timeout=400)
    assert process.exitcode == 0, output.read_text()[-3000:]
    maximum, batch, packed = map(json.loads, (tmp_path / "rows.json").read_text().splitlines())
    assert [row["rows"] for row in (maximum, batch, packed)] == [
        "padded to the maximum",
        "padded to the batch",
        "packed",
    ]
    assert maximum["tokens per step"] == pytest.approx(2 * 23.5, abs=1.1)
    assert maximum["real %"] == pytest.approx(100 * 23.5 / 256, abs=0.3)
    assert batch["real %"] == pytest.approx(100 * 23.5 / 64, abs=1)
    # Ten or eleven samples in a row of 256, or eight of 32; the last row has what is left.
    assert 70 < packed["real %"] <= 100 * fill + 0.5
    assert maximum["ratio"] == 1 and packed["tokens/s"] > 0
    assert f"ratio: {packed['ratio']}" in output.read_text()
