"""The tutorial about block sizes: the command of the page as it stands, but for smaller sizes."""

import json
import math
import re
import runpy
import shlex
from pathlib import Path

import pytest

pytestmark = pytest.mark.nemo

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
SMALL = shlex.split(
    "--texts texts --steps 8 --source-steps 40 --sequences 4 --length 64 --val-rows 16 --lr 3e-4 --prompts 2 "
    "--prompt-tokens 8 --new-tokens 12"
)


def command_of_page() -> list[str]:
    """The first command of the page that measures."""
    lines = (TUTORIALS / "blocks.md").read_text().splitlines()
    return next(
        shlex.split(line, comments=True) for line in lines if line.startswith("python docs/tutorials/blocks.py")
    )


@pytest.fixture(scope="module")
def run(forks):
    """Runs the command in a folder with further options; its exit code, and what it printed."""

    def run(folder: Path, *options: str) -> tuple[int, str]:
        command = [*command_of_page(), *SMALL, *options]
        job = {"command": command, "folder": folder, "output": folder / "output.txt"}
        script = str(Path(__file__).with_name("command_jobs.py"))
        process = forks.Process(target=runpy.run_path, args=(script, {"job": job}, "__main__"))
        process.start()
        process.join(timeout=900)
        return process.exitcode, (folder / "output.txt").read_text()

    return run


@pytest.fixture(scope="module")
def measured(run, tmp_path_factory):
    """Folder of a measurement that lost a size and went on; the result before and after; what was printed."""
    folder = tmp_path_factory.mktemp("blocks")
    (folder / "texts").mkdir()
    for page in range(20):
        text = "".join(f"It is the east, and line {line} of page {page} is the sun.\n" for line in range(60))
        (folder / "texts" / f"{page}.txt").write_text(text)
    code, output = run(folder, "--block-sizes", "1", "4")
    assert code == 0, output[-3000:]
    (out,) = [folder / part for part in command_of_page() if part.startswith("runs/")]
    first = json.loads((out / "result.json").read_text())
    # As if killed after the training of the second size.
    assert (out / "block_4" / "checkpoints").is_dir()
    (out / "result.json").write_text(json.dumps({**first, "sizes": {"1": first["sizes"]["1"]}}))
    code, output = run(folder, "--block-sizes", "whole", "1", "4")
    assert code == 0, output[-3000:]
    return out, first, json.loads((out / "result.json").read_text()), output


def test_a_lost_size_is_measured_again_and_the_others_are_kept(measured):
    _, first, result, _ = measured
    assert list(result["sizes"]) == ["1", "4", "whole"]
    assert result["sizes"]["1"] == first["sizes"]["1"]
    again, lost = result["sizes"]["4"], first["sizes"]["4"]
    assert (again["before"], again["after"]) == (lost["before"], lost["after"])
    assert [pace["text"] for pace in again["sampling"].values()] == [pace["text"] for pace in lost["sampling"].values()]


def test_blocks_of_one_token_begin_where_the_source_ends(measured):
    _, _, result, _ = measured
    before = {size: row["before"]["nll_bound"] for size, row in result["sizes"].items()}
    # Equal in expectation. A wrong shift would cost several nats: the source is sure of nearly all that comes.
    assert result["source"]["nll"] < 2
    assert before["1"] < 2 * result["source"]["nll"]
    assert before["1"] < before["4"] < before["whole"]


def test_training_lowers_the_bound_where_there_is_something_to_learn(measured):
    _, _, result, _ = measured
    for size in ("4", "whole"):
        row = result["sizes"][size]
        assert row["after"]["nll_bound"] < row["before"]["nll_bound"]
        assert row["after"]["perplexity_bound"] == pytest.approx(math.exp(row["after"]["nll_bound"]))
        assert row["train_tokens_per_second"] > 0


def test_passes_are_counted(measured):
    """The prompt of 8 tokens once, each of 12 new ones, and each finished block of them but the last.

    No pass is made for the first token of a block where it is the last hole: the block before has scored it.
    """
    _, _, result, _ = measured
    calls = {size: row["sampling"]["one_token"]["calls_per_token"] for size, row in result["sizes"].items()}
    assert (calls["1"], calls["whole"]) == ((1 + 11) / 12, 1)
    assert (1 + 12 + 2 - 3) / 12 <= calls["4"] <= (1 + 12 + 2) / 12
    assert all(row["sampling"]["threshold"]["calls_per_token"] <= calls[s] for s, row in result["sizes"].items())


def test_the_table_and_the_plot_show_every_size(measured):
    out, _, result, output = measured
    for size, row in result["sizes"].items():
        assert re.search(rf"^ *{size} .*{row['after']['nll_bound']:.3f} ", output, flags=re.MULTILINE)
    svg = (out / "blocks.svg").read_text()
    lines = re.findall(r'<polyline points="([^"]*)"', svg)
    assert [len(line.split()) for line in lines] == [3, 3, 3, 3]


def test_other_settings_do_not_mix(measured, monkeypatch):
    out, _, result, _ = measured
    monkeypatch.syspath_prepend(str(TUTORIALS))
    from block_results import read_result

    with pytest.raises(
        ValueError, match=r"result\.json was measured with steps=8; give these again, or another folder"
    ):
        read_result(out / "result.json", {**result["settings"], "steps": 9})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--block-sizes", "4", "128"), "--block-sizes 128 is longer than the sequences of --length 64"),
        (("--block-sizes", "0"), "0 is neither a number of tokens, 1 or more, nor whole"),
        (("--new-tokens", "60"), "--new-tokens 60 are together longer than the sequences of --length 64"),
        (("--hf", "nowhere"), "--hf nowhere is no folder of a Hugging Face checkpoint: it has no config.json"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(run, tmp_path, options, error):
    code, output = run(tmp_path, *options)
    assert code == 2 and error in " ".join(output.split())
    assert list(tmp_path.iterdir()) == [tmp_path / "output.txt"]
