import io
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from nemo_dllm.collections.diffusion.sampling import DenoiseStep, SamplerConfig, canvas_text, generate_stream, watch

HOLE = None


def byte_decode(ids):
    return bytes(ids).decode("utf-8", errors="replace")


def letters(ids):
    return "".join("abcdefghij"[i] for i in ids)


def step_of(tokens, new=(), step=1):
    """A one-row step; HOLE marks holes, ``new`` lists newly committed positions."""
    holes_BT = torch.tensor([[token is HOLE for token in tokens]])
    tokens_BT = torch.tensor([[255 if token is HOLE else token for token in tokens]])
    committed_BT = torch.zeros_like(holes_BT)
    committed_BT[0, list(new)] = True
    return DenoiseStep(tokens_BT, holes_BT, committed_BT, step)


def pieces(text):
    return [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]


def frames(step_list, decode=letters, **console):
    file = io.StringIO()
    last = watch(step_list, decode, Console(file=file, width=60, **console))
    return last, file.getvalue()


def test_holes_new_and_old_tokens_are_told_apart():
    text = canvas_text(step_of([0, HOLE, HOLE, 1, 2], new=[3]), letters)
    assert text.plain == "a░░bc"
    (block, block_style), (new, new_style) = pieces(text)
    assert (block, new) == ("░░", "b")
    assert "dim" in block_style and "green" in new_style


def test_edited_tokens_are_highlighted():
    step = replace(step_of([0, 1, HOLE]), edited_BT=torch.tensor([[False, True, False]]))
    (letter, style), _ = pieces(canvas_text(step, letters))
    assert letter == "b" and "green" in style


def test_a_character_of_several_tokens_is_not_torn():
    euro = list("€".encode())
    text = canvas_text(step_of([97, *euro, 98], new=[2, 3]), byte_decode)
    assert text.plain == "a€b"
    # Its first byte is old, the others new: it shows with the later ones.
    assert pieces(text)[0][0] == "€"


def test_unfinished_characters_are_replaced_and_keep_the_layout():
    first, _, last = "€".encode()
    text = canvas_text(step_of([97, first, HOLE, last, 98]), byte_decode)
    assert text.plain == "a\N{REPLACEMENT CHARACTER}░\N{REPLACEMENT CHARACTER}b"


def test_random_bytes_never_lose_text():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        ids = torch.randint(32, 256, (12,), generator=generator).tolist()
        new = torch.rand(12, generator=generator).gt(0.5).nonzero().flatten().tolist()
        shown = canvas_text(step_of(ids, new), byte_decode).plain
        expected = byte_decode(ids)
        assert len(shown) == len(expected)
        assert all(a == b or ord(b) < 0xA0 for a, b in zip(shown, expected, strict=True))


def test_control_characters_do_not_reach_the_terminal():
    text = canvas_text(step_of([*b"a\x1b[2J\n\r\t\x7f"]), byte_decode)
    assert text.plain == "a␛[2J\n␍\t\N{REPLACEMENT CHARACTER}"


def test_markup_in_the_text_is_text():
    assert frames([step_of([*b"[bold]x[/]"], new=[0])], byte_decode)[1].endswith("[bold]x[/]\n")


def test_plain_console_gets_six_even_frames_without_escapes(table_model):
    model = table_model({i: {1: 0.9 - 0.01 * i} for i in range(40)})
    steps = generate_stream(model, [[0, 0]], SamplerConfig(36), mask_token_id=9)
    last, printed = frames(steps)
    assert last.step == 36
    assert [int(n) for n in re.findall(r"\[step (\d+),", printed)] == [6, 12, 18, 24, 30, 36]
    assert "\x1b" not in printed
    assert printed.splitlines()[0] == "[step 6, 30 masked]"
    assert printed.splitlines()[1] == "aa" + "b" * 6 + "░" * 30
    assert printed.splitlines()[-1] == "aa" + "b" * 36


def test_plain_console_prints_every_step_of_a_short_run():
    steps = [step_of([0, HOLE, HOLE, 1], [0, 3]), step_of([0, 1, 1, 1], [1, 2], step=2)]
    assert re.findall(r"step \d", frames(steps)[1]) == ["step 1", "step 2"]


def test_terminal_redraws_in_place():
    steps = [step_of([0, HOLE], [0]), step_of([0, 1], [1], step=2)]
    last, printed = frames(steps, force_terminal=True, color_system="standard")
    assert last is steps[-1]
    assert "\x1b[" in printed and "░" in printed
    assert "step 1, 1 masked" in printed and "step 2, 0 masked" in printed
    assert "\x1b[1;30;42mb" in printed


def test_nothing_to_show():
    assert frames([]) == (None, "")


def test_batches_are_refused():
    batch = DenoiseStep(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3), 1)
    with pytest.raises(ValueError, match="steps has 2 rows; watch shows one, so sample one prompt"):
        watch([batch], letters, Console(file=io.StringIO()))


def test_import_needs_torch_only():
    code = "import sys, nemo_dllm.collections.diffusion.sampling; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in loaded
    assert not {"rich", "nemo", "megatron", "lightning", "transformers"} & set(loaded)
