import io
import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.nemo

GOLDEN = Path(__file__).parents[1] / "golden" / "models"


@pytest.fixture(scope="module")
def generate_text():
    from nemo_dllm.collections.diffusion.inference import generate_text

    return generate_text


@pytest.fixture
def generate(single_process, command, hf_folder, capsys):
    """Runs the command on ``hf_folder`` and returns what it printed; settings by keyword after the options.

    Nothing is shown while it forms, on a terminal neither.
    """

    def run(path=hf_folder, settings=None, **options):
        command("generate")(path, **{"watch": False, **options}, settings=settings or {})
        return capsys.readouterr()

    return run


def test_text_goes_on_from_the_prompt(model, generate_text):
    text = generate_text(model, "w5 w7", model.sampler_config(max_new_tokens=6, stop_at_eos=False))
    words = text.split()
    assert words[:2] == ["w5", "w7"]
    # Special tokens, 191 and up, are no words.
    assert 2 < len(words) <= 8 and all(re.fullmatch(r"w\d+", word) for word in words)


def test_an_empty_prompt_is_a_prompt(model, generate_text):
    assert 1 <= len(generate_text(model, "", model.sampler_config(max_new_tokens=4)).split()) <= 4


def test_a_stop_string_ends_the_text(model, generate_text):
    config = model.sampler_config(max_new_tokens=8, stop_strings=(" ",), stop_at_eos=False, stop_token_ids=(192,))
    assert 1 <= len(generate_text(model, "w5", config).split()) <= 3


def test_watching_shows_the_text_and_does_not_change_it(model, generate_text):
    from rich.console import Console

    config = model.sampler_config(max_new_tokens=8, steps=4, temperature=1.0, seed=3)
    shown = Console(file=io.StringIO(), width=200)
    text = generate_text(model, "w5", config, show_on=shown)
    assert text == generate_text(model, "w5", config)
    assert "[step 4, 0 masked]" in shown.file.getvalue() and text in shown.file.getvalue()


def test_a_seed_repeats_the_text_and_none_does_not(generate):
    def printed(seed):
        settings = {"seed": seed, "max_new_tokens": 24, "temperature": 2.0, "stop_at_eos": False}
        return generate(prompt="w5", settings=settings).out

    assert printed(7) == printed(7)
    assert printed(None) != printed(None)


def notes(printed):
    """What was said besides: loading NeMo for the first time says more."""
    return [line for line in printed.err.splitlines() if line.startswith("note: ")]


def test_a_text_longer_than_the_context_gets_a_note(generate):
    printed = generate(prompt="w5", settings={"seed": 0, "max_new_tokens": 512, "steps": 1})
    assert notes(printed) == ["note: 513 tokens are more than the model's context of 512"]
    assert notes(generate(prompt="w5", settings={"max_new_tokens": 512, "max_length": 9, "steps": 1})) == []


@pytest.mark.parametrize("folder", ["hf_folder", "nemo_folder"])
def test_a_text_far_longer_than_the_context_is_refused_before_the_model_is_loaded(
    generate, request, monkeypatch, folder
):
    path, module = request.getfixturevalue(folder), "nemo_dllm.collections.diffusion.inference.text.open_session"
    error = "max_new_tokens=8193 is more than 16 times the model's context of 512; choose 512 or less, prompt included"
    monkeypatch.setattr(module, lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=f"^{error}$"):
        generate(path, prompt="w5", settings={"max_new_tokens": 8193})
    for settings in ({"max_new_tokens": 8192}, {"max_new_tokens": 8193, "max_length": 512}):
        with pytest.raises(pytest.fail.Exception, match="loaded"):
            generate(path, prompt="w5", settings=settings)


@pytest.mark.parametrize(
    "settings, equal",
    [
        ({}, True),
        ({"temperature": 1.0}, False),
        ({"remasking": "random"}, False),
        ({"remasking_temperature": 1}, False),
    ],
)
def test_samples_that_are_bound_to_be_equal_get_a_note(generate, settings, equal):
    settings = {"max_new_tokens": 16, "stop_at_eos": False, "seed": 1, **settings}
    printed = generate(prompt="w5", num_samples=2, settings=settings)
    texts = {json.loads(line)["completion"] for line in printed.out.splitlines()}
    assert (len(texts) == 1) == equal
    note = "note: the 2 texts of a prompt are equal at a temperature of 0; choose a higher one"
    assert notes(printed) == [note] * equal
    assert notes(generate(prompt="w5", settings=settings)) == []


@pytest.mark.parametrize("name", ["a2d_qwen3", "sdar"])
def test_a_stream_is_the_text_in_pieces(generate, monkeypatch, name):
    settings = {"max_new_tokens": 16, "block_size": 4, "threshold": None, "seed": 0}
    whole = generate(GOLDEN / name, prompt="w5 w7", settings=settings).out
    pieces = []
    import builtins

    plain = builtins.print

    def recorded(*values, **named):
        pieces.append(values)
        plain(*values, **named)

    monkeypatch.setattr(builtins, "print", recorded)
    assert generate(GOLDEN / name, prompt="w5 w7", stream=True, settings=settings).out == whole
    # A piece at least for each block.
    assert len([piece for piece in pieces if piece and piece[0]]) >= 4


def test_json_lines_in_and_out(generate, tmp_path):
    rows = ["w5 w7", "", "w9 w10 w11"]
    (tmp_path / "in.jsonl").write_text("\n\n".join(json.dumps({"prompt": row, "id": 3}) for row in rows) + "\n")
    options = {"prompt_file": tmp_path / "in.jsonl", "num_samples": 2}
    settings = {"max_new_tokens": 6, "temperature": 2.0, "seed": 3, "stop_at_eos": False}
    printed = generate(**options, settings=settings).out
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [(line["prompt"], line["sample"]) for line in lines] == [(row, sample) for row in rows for sample in (0, 1)]
    assert {line["finish_reason"] for line in lines} == {"length"} and {line["tokens"] for line in lines} == {6}
    assert all(first["completion"] != second["completion"] for first, second in zip(lines, lines[1:], strict=False))
    # Batches and files change nothing.
    assert generate(**options, batch_size=1, output=tmp_path / "out.jsonl", settings=settings).out == ""
    assert (tmp_path / "out.jsonl").read_text() == printed


def test_a_file_of_results_stays_until_there_are_new_ones(generate, tmp_path):
    (tmp_path / "IN.JSONL").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("w5", "w5 " * 512)))
    (tmp_path / "out.jsonl").write_text("old")
    with pytest.raises(ValueError, match="prompt 2 has 512 tokens"):
        generate(prompt_file=tmp_path / "IN.JSONL", output=tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "old" and len(list(tmp_path.iterdir())) == 2


def test_a_text_file_is_one_prompt(generate, tmp_path):
    (tmp_path / "in.txt").write_text("w5\nw7")
    assert generate(prompt_file=tmp_path / "in.txt", settings={"max_new_tokens": 2}).out.startswith("w5 w7 ")


def test_an_end_is_told_from_a_full_length(generate, tmp_path):
    from nemo_dllm.collections.diffusion.inference.session import open_session
    from nemo_dllm.collections.diffusion.inference.text import complete

    settings = {"max_new_tokens": 12, "temperature": 3.0, "seed": 1, "stop_token_ids": tuple(range(50))}
    session = open_session(GOLDEN / "a2d_qwen3", best=False, preset=None, settings=settings)
    completions = list(complete(session, ["w5"], num_samples=6, batch_size=3))
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    assert stopped and all(completion.tokens <= 12 for completion in stopped)


@pytest.mark.parametrize(
    "content, error",
    [
        ('{"prompt": "w5"}\n{"prompt": 3}\n', r'in.jsonl, line 2: no text "prompt" in it'),
        ('{"prompt": "w5"}\n\n["w5"]\n', r'in.jsonl, line 3: no text "prompt" in it'),
        ('{"prompt": "w5}\n', r"in.jsonl, line 1: no JSON \(Unterminated string"),
        ("\n", r"in.jsonl holds no line"),
        ("[" * 100_000, r"in.jsonl, line 1: JSON that cannot be read \(maximum recursion depth"),
        ('{"prompt": ' + "1" * 5_000, r"in.jsonl, line 1: JSON that cannot be read \(Exceeds the limit"),
        ('{"prompt": "w5 \\ud800"}\n', "half of a surrogate pair at character 4, which is no text"),
        (b"\xff\xfe", r"in.jsonl is not UTF-8 text \(invalid start byte at byte 0\)"),
    ],
)
def test_bad_files_of_prompts(generate, tmp_path, content, error):
    (tmp_path / "in.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=error):
        generate(prompt_file=tmp_path / "in.jsonl")


def test_a_file_that_begins_with_a_mark_of_its_encoding(generate, tmp_path):
    line = json.dumps({"prompt": "w5"}) + "\n"
    printed = []
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "in.jsonl").write_text(line, encoding=encoding)
        printed.append(generate(prompt_file=tmp_path / "in.jsonl", settings={"max_new_tokens": 4, "seed": 0}).out)
    assert printed[0] == printed[1] and json.loads(printed[0])["prompt"] == "w5"


def test_bad_arguments(generate, tmp_path, monkeypatch):
    long = " ".join(["w5"] * 512)
    with pytest.raises(ValueError, match="the prompt has 512 tokens, and the model's context is 512"):
        generate(prompt=long)
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "w1"}) + "\n" + json.dumps({"prompt": long}))
    with pytest.raises(ValueError, match="prompt 2 has 512 tokens"):
        generate(prompt_file=tmp_path / "in.jsonl")
    from nemo_dllm.collections.diffusion.inference import session

    # From here on before anything is loaded.
    monkeypatch.setattr(session, "load_checkpoint", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="num_samples=0 must be at least 1"):
        generate(num_samples=0)
    with pytest.raises(ValueError, match="stream=True, watch=True and replay=FILE follow a single text"):
        generate(num_samples=2, watch=True)
    with pytest.raises(ValueError, match="replay=talk.txt has the name of neither a page nor a picture"):
        generate(replay="talk.txt")
    with pytest.raises(FileNotFoundError, match="replay=.*absent/talk.html is in a folder that does not exist"):
        generate(replay=tmp_path / "absent" / "talk.html")
    with pytest.raises(FileNotFoundError, match="output=.*absent/out.jsonl is in a folder that does not exist"):
        generate(output=tmp_path / "absent" / "out.jsonl")
