"""``nemo-dllm data`` and ``nemo dllm data``: from texts to a corpus, and looks at both."""

import importlib
import inspect
import json
import subprocess
import sys

import pytest

from nemo_dllm.cli import data
from nemo_dllm.cli import main as cli
from nemo_dllm.collections.diffusion.data.tokenizer import train_byte_bpe

FUNCTIONS = {"preprocess": "preprocess.preprocess", "check": "indexed.check_corpus", "show": "show.show_files"}
DATA = "nemo_dllm.collections.diffusion.data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a tokenizer, texts and questions."""
    folder = tmp_path_factory.mktemp("data")
    lines = [f"{i} squared is {i * i}.\n" for i in range(300)]
    (folder / "texts.txt").write_text("".join(lines))
    rows = [{"question": f"{i} squared?", "answer": str(i * i)} for i in range(40)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_byte_bpe(lines, 300, folder / "tokenizer")
    return folder


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """Runs ``nemo-dllm data`` in the folder: standard output and error."""
    monkeypatch.chdir(folder)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["nemo-dllm", "data", *arguments])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        captured = capsys.readouterr()
        return exit.value.code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def corpus(folder):
    """Prefix of a corpus, written by the command in a process of its own; the process's output."""
    script = "import sys; from nemo_dllm.cli.main import main; main()"
    arguments = ["texts.txt", "corpora/squares", "--tokenizer=tokenizer", "--format=lines", "--workers=1", "--progress"]
    result = subprocess.run(
        [sys.executable, "-c", script, "data", "preprocess", *arguments], cwd=folder, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return folder / "corpora" / "squares", result


def test_a_corpus_is_written_with_a_progress_bar_and_no_other_noise(corpus):
    prefix, result = corpus
    assert prefix.with_suffix(".idx").exists()
    assert result.stdout.startswith("300 documents, ")
    (line,) = result.stderr.split("\r")[-1].strip().splitlines()[-1:]
    assert "tokens/s" in line and line.endswith("0:00:00")
    assert "arning" not in result.stderr


def test_a_corpus_is_checked_and_shown(corpus, run):
    code, out, _ = run("check", "corpora/squares", "--tokenizer", "tokenizer")
    assert code == 0
    assert out.startswith("300 documents, ") and out.rstrip().endswith("all ids below 300")
    code, out, _ = run("show", "corpora/squares", "--tokenizer=tokenizer", "--seq-length=32", "--num-samples=1")
    assert code == 0
    assert "sample 0: 32 tokens, 32 trained" in out and "in all: 300 documents" in out


def test_chats_are_shown_on_the_terminal_and_as_a_page(folder, run):
    columns = ("--column", "prompt=question", "--column", "completion=answer")
    code, out, _ = run(
        "show", "questions.jsonl", "--tokenizer=tokenizer", *columns, "--chat-template=", "--html=page.html"
    )
    assert code == 0
    assert "in all: 40 samples" in out
    assert "squared" in (folder / "page.html").read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["preprocess", "texts.txt", "corpora/squares", "--tokenizer=tokenizer"],
            "error: 'corpora/squares.idx' exists",
        ),
        (["preprocess", "absent.txt", "corpora/other", "--tokenizer=tokenizer"], "error: 'absent.txt' does not exist;"),
        (
            ["preprocess", "texts.txt", "texts.txt/x", "--tokenizer=tokenizer"],
            "error: [Errno 20] Not a directory: ",
        ),
        (["check", "corpora/other", "--tokenizer=tokenizer"], "error: 'corpora/other.bin' does not exist;"),
        (["check", "corpora/squares", "--tokenizer=./absent"], "error: --tokenizer='./absent' does not exist;"),
        (
            ["check", "corpora/squares", "--tokenizer=corpora"],
            "error: --tokenizer='corpora' is neither a folder with tok",
        ),
        (["show", "absent.jsonl", "--tokenizer=./absent"], "error: 'absent.jsonl' does not exist; name a file"),
        (["show", "questions.jsonl", "--tokenizer=tokenizer"], "error: the tokenizer has no chat template; pass"),
        (["show", "corpora/squares", "--tokenizer=tokenizer", "--time=2"], "error: --time=2.0 must be in [0, 1];"),
    ],
)
def test_errors_are_one_line(corpus, run, arguments, message):
    code, _, err = run(*arguments)
    assert code == 2
    assert err.startswith(message)
    assert len(err.splitlines()) == 1


def test_a_column_has_two_names(run):
    code, _, err = run("show", "questions.jsonl", "--tokenizer=tokenizer", "--column=prompt")
    assert code == 2
    assert "prompt is not FIELD=NAME" in err


@pytest.mark.parametrize("command", FUNCTIONS)
def test_options_are_the_parameters_of_the_functions(command):
    module, name = FUNCTIONS[command].split(".")
    function = inspect.signature(getattr(importlib.import_module(f"{DATA}.{module}"), name)).parameters
    options = dict(inspect.signature(getattr(data, command)).parameters)
    if "column" in options:
        options["columns"] = options.pop("column")
    assert options.keys() == function.keys() - {"stream"}
    assert all(options[name].default == function[name].default for name in options)


@pytest.mark.nemo
def test_under_nemo(corpus, folder, monkeypatch, capsys):
    from nemo_run.cli.api import create_cli

    import nemo_dllm.recipes  # noqa: F401

    monkeypatch.chdir(folder)

    def nemo(*arguments):
        monkeypatch.setattr(sys, "argv", ["nemo", *arguments])
        create_cli()(list(arguments), standalone_mode=False)
        return capsys.readouterr().out

    inputs = ["dllm", "data", "preprocess", "inputs=['texts.txt','texts.txt']", "output_prefix=corpora/twice"]
    out = nemo(*inputs, "tokenizer=tokenizer", "format=lines", "workers=1")
    assert "600 documents, " in out
    assert "600 documents, " in nemo("dllm", "data", "check", "prefix=corpora/twice", "tokenizer=tokenizer")
    columns = "columns={'prompt': 'question', 'completion': 'answer'}"
    out = nemo("dllm", "data", "show", "path=questions.jsonl", "tokenizer=tokenizer", "chat_template=''", columns)
    assert "in all: 40 samples" in out
