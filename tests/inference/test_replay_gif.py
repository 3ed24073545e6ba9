from importlib import util

import pytest
import torch

pytestmark = pytest.mark.nemo

Image = pytest.importorskip("PIL.Image")
ImageSequence = pytest.importorskip("PIL.ImageSequence")
GREEN = (153, 238, 153)


def frame(*pieces, title="", caption="step 1"):
    return {"title": title, "caption": caption, "pieces": list(pieces)}


@pytest.fixture
def gif_of(tmp_path):
    """Writes frames, and reads them back: RGB pictures, and milliseconds that each is shown."""
    from nemo_dllm.collections.diffusion.inference.replay_gif import write_gif

    def write(*frames):
        write_gif(tmp_path / "replay.gif", frames)
        with Image.open(tmp_path / "replay.gif") as file:
            shown = [(picture.convert("RGB"), picture.info["duration"]) for picture in ImageSequence.Iterator(file)]
            assert file.info["loop"] == 0 and file.format == "GIF"
        return [picture for picture, _ in shown], [duration for _, duration in shown]

    return write


def green_cells(picture):
    """Cells (column, line) with a green ground, from the pixel in their upper left corner."""
    width, height = picture.size
    return {
        (x // 9, y // 19)
        for x in range(0, width - 24, 9)
        for y in range(0, height - 24, 19)
        if picture.getpixel((12 + x, 12 + y)) == GREEN
    }


def ink(picture, column, line):
    """How many pixels of a cell are not white."""
    left, top = 12 + 9 * column, 12 + 19 * line
    cell = picture.crop((left, top, left + 9, top + 19))
    return sum(pixel != (255, 255, 255) for pixel in cell.getdata())


def test_a_replay_named_gif_has_a_picture_per_step(tmp_path):
    from nemo_dllm.collections.diffusion.inference.replay import Replay
    from nemo_dllm.collections.diffusion.sampling import DenoiseStep

    replay = Replay(tmp_path / "Replay.GIF", title="a question")
    for number in range(3):
        holes = torch.arange(3)[None] > number
        replay.add(DenoiseStep(torch.zeros(1, 3).long(), holes, torch.zeros_like(holes), number + 1), lambda ids: "x")
    replay.write()
    with Image.open(replay.path) as file:
        assert (file.n_frames, file.size) == (3, (24 + 80 * 9, 24 + 5 * 19))


def test_frames_have_one_size_and_times_of_their_own(gif_of):
    pictures, durations = gif_of(
        frame(("░" * 3, "mask"), caption="step 1"),
        frame(("a", "new"), ("░░", "mask"), caption="step 2"),
        frame(("a\nb\nc", "old"), caption="step 3"),
    )
    # Three lines of text, an empty one and the caption.
    assert {picture.size for picture in pictures} == {(744, 24 + 5 * 19)}
    assert durations == [150, 150, 2000]


def test_what_is_new_has_a_ground_and_masks_are_dots(gif_of):
    (picture,), _ = gif_of(frame(("ab", "new"), ("░░", "mask"), ("M", "old")))
    assert green_cells(picture) == {(0, 0), (1, 0)}
    dots = [ink(picture, column, 0) for column in (2, 3)]
    assert 0 < dots[0] < 20 and 0 < dots[1] < 20 and ink(picture, 4, 0) > 20 and ink(picture, 5, 0) == 0


def test_lines_are_wrapped_by_columns_that_wide_characters_take_two_of(gif_of):
    (picture,), _ = gif_of(frame(("x" * 79 + "\N{CJK UNIFIED IDEOGRAPH-4E2D}", "old"), ("y", "new")))
    assert green_cells(picture) == {(2, 1)}
    # The accent takes no column; a tabulator goes to a multiple of 4.
    (picture,), _ = gif_of(frame(("e\N{COMBINING ACUTE ACCENT}", "old"), ("\tb", "old"), ("y", "new")))
    assert green_cells(picture) == {(5, 0)}


def test_a_long_text_is_shown_around_what_changes(gif_of):
    from nemo_dllm.collections.diffusion.inference.replay_gif import MOST_LINES

    text = "\n".join("abc" for _ in range(100)) + "\n"
    pictures, _ = gif_of(
        frame(("x", "new"), (text, "old")),
        frame((text, "old"), ("x", "new"), (text, "old"), caption="step 2"),
        frame((text, "old"), (text, "old"), ("x", "new"), caption="step 3"),
        frame((text, "old"), ("░", "mask"), (text, "old"), caption="step 4"),
    )
    assert {picture.size[1] for picture in pictures} == {24 + (MOST_LINES + 2) * 19}
    assert [green_cells(picture) for picture in pictures] == [
        {(0, 0)},
        {(0, MOST_LINES // 2)},
        {(0, MOST_LINES - 1)},
        set(),
    ]
    # A line of the text stands around the dot.
    assert 0 < ink(pictures[3], 0, MOST_LINES // 2) < ink(pictures[3], 0, MOST_LINES // 2 - 1)


def test_of_many_steps_the_first_and_the_last_stay(gif_of, monkeypatch):
    from nemo_dllm.collections.diffusion.inference import replay_gif

    monkeypatch.setattr(replay_gif, "MOST_FRAMES", 4)
    frames = [frame(("\n" * number, "old"), ("x", "new"), caption=str(number)) for number in range(11)]
    pictures, durations = gif_of(*frames)
    assert [green_cells(picture) for picture in pictures] == [{(0, line)} for line in (0, 3, 6, 10)]
    assert durations == [150, 150, 150, 2000]


def test_without_pillow_it_is_refused_before_anything_is_done(tmp_path, monkeypatch):
    from nemo_dllm.collections.diffusion.inference.replay import Replay

    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"out.gif needs Pillow; install the extra `gif` .*nemo-dllm\[gif\]"):
        Replay(tmp_path / "out.gif")
    Replay(tmp_path / "out.html")
