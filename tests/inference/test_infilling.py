import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.nemo

GOLDEN = Path(__file__).parents[1] / "golden" / "models"


@pytest.fixture
def infill(single_process, command, capsys):
    """Runs the command on a golden checkpoint and returns what it printed; gaps are of 3 tokens."""

    def run(name="a2d_qwen3", **options):
        command("infill")(GOLDEN / name, **{"length": 3, "watch": False, "settings": {}, **options})
        return capsys.readouterr()

    return run


@pytest.mark.parametrize(
    "text, parts",
    [
        ("a<mask>b", ["a", 3, "b"]),
        ("<mask:2>b <mask>", [2, "b ", 3]),
        ("<mask><mask:1>", [3, 1]),
    ],
)
def test_marks(text, parts):
    from nemo_dllm.collections.diffusion.inference.infilling import parse_gaps

    assert parse_gaps(text, 3) == parts


@pytest.mark.parametrize("name", ["a2d_qwen3", "llada", "sdar"])
def test_what_is_given_stays(infill, name):
    words = infill(name, text="w5 <mask:2> w7 w8 <mask> w9").out.split()
    assert (words[0], words[-1]) == ("w5", "w9") and words.index("w7") + 1 == words.index("w8")
    # Special tokens may be found too, and are no words.
    assert 5 <= len(words) <= 9


def test_a_gap_between_two_texts(infill):
    assert infill(prefix="w5 w6", suffix="w8").out == infill(text="w5 w6 <mask> w8").out
    assert infill(prefix="w5", suffix="", length=2).out.startswith("w5 ")


def test_a_gap_at_the_start_under_the_shift(infill):
    assert infill("dream", text="<mask> w5").out.split()[-1] == "w5"


def test_a_block_causal_model_says_what_it_does_not_see(infill):
    assert (
        "sees of the text behind a gap what lies in the same block of 4 tokens"
        in infill("sdar", prefix="w1", suffix="w2").err
    )
    assert infill("sdar", prefix="w1").err == infill(prefix="w1", suffix="w2").err == ""


def test_a_replay_of_infilling(infill, tmp_path):
    infill(prefix="w5", suffix="w8", replay=tmp_path / "replay.html")
    assert "step 3, 0 masked" in (tmp_path / "replay.html").read_text()


@pytest.mark.parametrize(
    "settings, steps",
    [({"steps": 150}, 150), ({"steps": 30}, 30), ({"steps": 400}, 160), ({"steps_per_block": 140}, 140), ({}, 160)],
)
def test_steps_are_those_that_the_gaps_allow(infill, tmp_path, settings, steps):
    """More than the tokens that a continuation has by default, and than the gaps have."""
    infill(text="w5 <mask:80> w7 <mask:80>", settings=settings, replay=tmp_path / "replay.html")
    found = re.findall(r"step (\d+), (\d+) masked", (tmp_path / "replay.html").read_text())
    assert len(found) == steps and found[-1] == (str(steps), "0")


def test_settings_that_no_gap_makes_right(infill):
    with pytest.raises(ValueError, match="steps=0 must be from 1 to max_new_tokens=3"):
        infill(text="w5 <mask>", settings={"steps": 0})
    with pytest.raises(ValueError, match="steps='9' must be a whole number"):
        infill(text="w5 <mask>", settings={"steps": "9"})


def test_bad_texts(infill, tmp_path):
    with pytest.raises(ValueError, match="there is nothing to fill in; give text"):
        infill()
    with pytest.raises(ValueError, match="the text has no <mask>; mark what is missing"):
        infill(text="w5")
    with pytest.raises(ValueError, match="suffix=w7 goes with a prefix; write it behind the text with <mask>"):
        infill(text="w5 <mask>", suffix="w7")
    with pytest.raises(ValueError, match="a gap of 0 tokens"):
        infill(text="w5 <mask:0>")
    with pytest.raises(ValueError, match="length=0 must be at least 1"):
        infill(prefix="w5", length=0)
    with pytest.raises(ValueError, match="the text has 601 tokens, and the model's context is 512"):
        infill(text="w5 <mask:600>")
    with pytest.raises(ValueError, match="the text has 1000000000000001 tokens"):
        infill(text="w5 <mask:1000000000000000>")
