"""One text about half of a surrogate pair, wherever it comes in."""

import pytest

from nemo_dllm.collections.diffusion.characters import check_characters


@pytest.mark.parametrize("text", ["", "plain", "\N{GRINNING FACE}\N{COMBINING ACUTE ACCENT}", "\ufffd\x00\x1b"])
def test_whole_characters_pass(text):
    assert check_characters(text) is None


@pytest.mark.parametrize(
    "text, place", [("\ud800", 1), ("a\udfff", 2), ("\N{GRINNING FACE}\ud83d b", 2), ("é\udcff", 2)]
)
def test_the_first_half_is_named_with_its_place(text, place):
    wanted = f"^the prompt has half of a surrogate pair at character {place}, which is no text; take it out$"
    with pytest.raises(ValueError, match=wanted):
        check_characters(text, "the prompt")
