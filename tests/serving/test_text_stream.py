import pytest

from nemo_dllm.collections.diffusion.serving.text_stream import TextStream


def pieces(stream, tokens, ends=None):
    """What comes of a row that grows by one token at a time, or to the given lengths."""
    ends = range(1, len(tokens) + 1) if ends is None else ends
    return [stream.push(tokens[:end], last=end == len(tokens)) for end in ends]


def from_bytes(ids):
    return bytes(ids).decode(errors="replace")


def from_words(ids):
    return " ".join(f"w{id}" for id in ids)


def test_pieces_join_to_the_text_and_characters_come_whole():
    text = "a€🙂b"
    parts = pieces(TextStream(from_bytes), list(text.encode()))
    assert parts == ["a", "", "", "€", "", "", "", "🙂", "b"]


def test_bytes_that_never_make_a_character_come_at_the_end():
    assert pieces(TextStream(from_bytes), [ord("a"), 0xE2, 0x82]) == ["a", "", "\N{REPLACEMENT CHARACTER}"]
    assert pieces(TextStream(from_bytes), [0xE2, ord("b"), ord("c")]) == ["", "\N{REPLACEMENT CHARACTER}b", "c"]


@pytest.mark.parametrize("ends", [None, [2, 5], [3, 5], [5]])
def test_what_may_become_a_stop_is_held_back(ends):
    tokens = list(b"x</y>")
    assert "".join(pieces(TextStream(from_bytes, stops=["</s>"]), tokens, ends)) == "x</y>"
    stream = TextStream(from_bytes, stops=["</s>"])
    assert [stream.push(tokens[:end], last=False) for end in (1, 2, 3, 4)] == ["x", "", "", "</y"]


@pytest.mark.parametrize("ends", [None, [3, 6], [6]])
def test_the_text_ends_before_the_first_stop(ends):
    assert "".join(pieces(TextStream(from_bytes, stops=["cd", "bc"]), list(b"abcdef"), ends)) == "a"


def test_white_space_between_prompt_and_completion():
    assert pieces(TextStream(from_words, context=[1, 2]), [3, 4]) == [" w3", " w4"]
    assert pieces(TextStream(from_words), [3, 4]) == ["w3", " w4"]


def test_a_prompt_that_ends_within_a_character():
    first, *rest = "é".encode()
    assert pieces(TextStream(from_bytes, context=[first]), [*rest, ord("x")])[-1].endswith("x")


def test_long_stops_cost_little():
    compared = []

    class Stop(str):
        def startswith(self, part):
            compared.append(len(part))
            return super().startswith(part)

    stream = TextStream(from_bytes, stops=[Stop("a" * 10_000 + str(i)) for i in range(16)])
    text = b"ab" * 100 + b"a" * 800
    parts = [stream.push(text[:end], last=end == len(text)) for end in range(1, len(text) + 1)]
    assert "".join(parts) == text.decode() and parts[300:-1] == [""] * 699
    # Every place is refused once, and the place where a stop may begin is looked at once per piece.
    assert len(compared) <= 16 * 2 * len(text)
