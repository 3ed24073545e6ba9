"""The tutorials about data: the commands of the pages as they stand, but for smaller sizes."""

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

pytestmark = pytest.mark.nemo

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
SMALL = [
    f"{field}={value}"
    for field, value in {
        "trainer.max_steps": 40,
        "trainer.val_check_interval": 20,
        "optim.lr_scheduler.warmup_steps": 2,
        "data.seq_length": 64,
        "data.micro_batch_size": 4,
        "data.global_batch_size": 4,
        "data.num_val_rows": 4,
        "model.config.num_layers": 2,
        "model.config.hidden_size": 48,
        "model.config.ffn_hidden_size": 96,
        "model.config.kv_channels": 12,
    }.items()
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def commands_of(page: str) -> list[list[str]]:
    """The lines of the page's blocks of commands, without their comments."""
    blocks = re.findall(r"```bash\n(.*?)```", (TUTORIALS / page).read_text(), flags=re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


@pytest.fixture(scope="module")
def run(forks):
    """Runs a command in a folder, and returns its output."""
    script = Path(__file__).with_name("command_jobs.py")

    def run(folder: Path, *command: str) -> str:
        job = {"command": list(map(str, command)), "folder": folder, "output": folder / "output.txt"}
        process = forks.Process(target=runpy.run_path, args=(str(script), {"job": job}, "__main__"))
        process.start()
        process.join(timeout=400)
        output = (folder / "output.txt").read_text()
        assert process.exitcode == 0, output[-3000:]
        return output

    return run


def test_pretraining_on_a_folder_of_text(run, tmp_path):
    (tmp_path / "my_texts").mkdir()
    for page in range(20):
        text = "".join(f"It is the east, and line {line} of page {page} is the sun.\n" for line in range(60))
        (tmp_path / "my_texts" / f"{page}.txt").write_text(text)
    outputs = {}
    for program, *arguments in commands_of("pretrain.md"):
        small = {"pretrain": SMALL, "preprocess": ["--workers=1"]}
        name = arguments[1] if arguments[0] == "data" else arguments[0]
        outputs[Path(name).stem] = run(tmp_path, program, *arguments, *small.get(name, []))
    assert list(outputs) == ["train_tokenizer", "preprocess", "check", "show", "pretrain", "generate"]
    assert outputs["preprocess"].startswith("20 documents, ")
    assert "t = 0.5" in outputs["show"]
    bounds = [float(bound) for bound in re.findall(r"validation NLL bound ([\d.]+)", outputs["pretrain"])]
    assert len(bounds) == 2 and bounds[1] < bounds[0]
    assert outputs["generate"].startswith("It is")


def test_answers_after_fine_tuning_in_a_chat_template(run, tmp_path):
    """A tiny model learns the one answer that there is."""
    runpy.run_path(str(Path(__file__).with_name("tiny_llama.py")))["main"](str(tmp_path / "smollm2"))
    config = tmp_path / "smollm2" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    rows = [json.dumps({"question": f"{10 + i} + {30 - i}?", "answer": "40"}) + "\n" for i in range(20)]
    (tmp_path / "gsm8k_train.jsonl").write_text("".join(rows[:17]))
    (tmp_path / "gsm8k_test.jsonl").write_text("".join(rows[17:]))
    small = "--steps 150 --sequences 8 --length 64 --val-rows 4 --lr 1e-2 --max-new-tokens 8 --block-size 8"
    small += " --questions 3 --batch 2"
    (command,) = [command for command in commands_of("chat.md") if "docs/tutorials/chat.py" in command]
    output = run(tmp_path, *command, *small.split())
    result = json.loads((tmp_path / "runs" / "chat" / "result.json").read_text())
    assert (result["questions"], result["before"], result["after"]) == (
        3,
        *({"right": n, "share": n / 3} for n in (0, 3)),
    )
    answers = [json.loads(line) for line in (tmp_path / "runs" / "chat" / "answers.jsonl").read_text().splitlines()]
    assert [answer["after"] for answer in answers] == [{"said": "40", "right": True}] * 3
    assert not any(answer["before"]["right"] for answer in answers)
    assert "right after: 3 of 3 (100.0%)" in output
