"""What both command lines say to bad input: one line that names the option as it is typed, and exit code 2."""

import errno
import os
import re
import sys
from pathlib import Path

import pytest

from nemo_dllm.cli import main as cli
from nemo_dllm.cli.errors import GRACE, in_options, is_for_users, one_line, refused_once

MODELS = Path(__file__).parents[1] / "golden" / "models"


@pytest.mark.parametrize(
    "message, shown",
    [
        ("top_k=0 must be at least 1", "--top-k=0 must be at least 1"),
        ("steps=9 must be from 1 to max_new_tokens=8", "--steps=9 must be from 1 to --max-new-tokens=8"),
        ("best=True chooses among runs", "--best chooses among runs"),
        ("stop_at_eos=False needs more", "--no-stop-at-eos needs more"),
        ("the steps of a run", "the steps of a run"),
        ("set max_new_tokens too", "set --max-new-tokens too"),
        ("folder/top_k=0 and data.steps=1", "folder/--top-k=0 and data.steps=1"),
        ("path=x is gone", "PATH=x is gone"),
        ("steps_per_block=3", "steps_per_block=3"),
    ],
)
def test_messages_in_the_words_of_a_command_line(message, shown):
    names = ("top_k", "steps", "max_new_tokens", "best", "stop_at_eos")
    options = {name: f"--{name.replace('_', '-')}" for name in names} | {"path": "PATH"}
    assert in_options(message, options) == shown


def test_a_place_without_a_name_keeps_its_traceback():
    with pytest.raises(PermissionError) as raised:
        raise OSError(errno.EPERM, "Operation not permitted")
    assert not is_for_users(raised.value)


@pytest.mark.parametrize(
    "number, filename, shown",
    [
        (errno.EACCES, "runs/a b", "runs/a b: Permission denied"),
        (errno.EEXIST, "runs/mine", "runs/mine: File exists"),
        (errno.ENOSPC, None, "No space left on device"),
        (errno.EFBIG, "x", "x: File too large"),
    ],
)
def test_a_place_that_cannot_be_written_is_for_users(number, filename, shown):
    error = OSError(number, os.strerror(number), filename)
    assert is_for_users(error) and one_line(error) == shown


class Case:
    """A bad call: command, arguments by their Python names, and what the error is about."""

    def __init__(self, command, about, **arguments):
        self.command, self.about, self.arguments = command, about, arguments

    def __repr__(self):
        return "-".join([self.command, *map(str, self.arguments)])


BLOCKS, WHOLE = str(MODELS / "sdar"), str(MODELS / "a2d_qwen3")
HERE, EMPTY = str(Path(__file__).parent), os.devnull
CASES = [
    Case("generate", "max_new_tokens=0 must be at least 1", path=BLOCKS, max_new_tokens=0),
    Case("generate", "steps=0 must be from 1 to max_new_tokens", path=BLOCKS, steps=0),
    Case("generate", "steps=9 must be from 1 to max_new_tokens=8", path=BLOCKS, steps=9, max_new_tokens=8),
    Case("generate", "block_size=0 must be at least 1", path=BLOCKS, block_size=0),
    Case("generate", "block_size=8 is not the 4 that this block-causal model has learnt", path=BLOCKS, block_size=8),
    Case("generate", "threshold=-1.0 must be at least 0", path=BLOCKS, threshold=-1.0),
    Case("generate", "remasking='best' is unknown; known: confidence", path=BLOCKS, remasking="best"),
    Case("generate", "preset='best' is unknown; known: ", path=BLOCKS, preset="best"),
    Case("generate", "num_samples=0 must be at least 1", path=BLOCKS, num_samples=0),
    Case(
        "generate",
        "stream=True, watch=True and replay=FILE follow a single text",
        path=BLOCKS,
        num_samples=2,
        stream=True,
    ),
    Case("generate", "output=absent/x.jsonl is in a folder that does not exist", path=BLOCKS, output="absent/x.jsonl"),
    Case("generate", "cache='exact' is for block-causal models", path=WHOLE, cache="exact", block_size=4),
    Case("generate", "cache='exact' is for block-causal models", path=WHOLE, cache="exact"),
    Case("generate", f"{HERE} holds no checkpoint", path=HERE),
    Case("generate", "best=True chooses among the checkpoints of a run", path=BLOCKS, best=True),
    Case("generate", f"output={HERE} is a folder; name a file", path=WHOLE, output=HERE),
    Case("evaluate", f"='{EMPTY}' does not exist; name a text file", path=WHOLE, data=EMPTY),
    Case("generate", f"prompt_file={EMPTY} is empty; write a prompt into it", path=WHOLE, prompt_file=EMPTY),
    Case("verify", "tolerance=-1 must be at least 0", hf_path=WHOLE, checkpoint=WHOLE, tolerance=-1.0),
    Case("infill", "give text=TEXT or text_file=FILE with <mask>", path=BLOCKS),
    Case("infill", "length=0 must be at least 1", path=BLOCKS, prefix="a", length=0),
    Case("infill", "the text has no <mask>", path=BLOCKS, text="w5"),
    Case("chat", "top_p=1.5 must be above 0 and at most 1", path=BLOCKS, top_p=1.5),
    Case("chat", "the tokenizer has no chat template", path=BLOCKS),
    Case("evaluate", "batch_size=0 must be at least 1", path=WHOLE, data=__file__, batch_size=0),
    Case(
        "evaluate",
        "seq_length=100000 is longer than the model's context",
        path=WHOLE,
        data=__file__,
        seq_length=100_000,
    ),
    Case("serve", "max_batch_rows=0 must be at least 1", path=WHOLE, max_batch_rows=0),
    Case("serve", "port=99999 of host=127.0.0.1 cannot be used", path=WHOLE, port=99_999),
    Case("serve", "block_size=8 is not the 4", path=BLOCKS, block_size=8, port=0),
    Case("plan", "='absent' is unknown", recipe="absent"),
    Case("import", "kind='best' is unknown", source=WHOLE, output_path="out", kind="best"),
    Case(
        "import",
        "mask_token_id=999999 is outside the vocabulary of 200; choose an id from 0 to 199, or leave it out",
        source=WHOLE,
        output_path="out",
        mask_token_id=999_999,
    ),
    Case("export", "holds no checkpoint", path=HERE, output_path="out"),
    Case("verify", "no ", hf_path=HERE, checkpoint=HERE),
]


def typed(case):
    """Arguments of ``nemo-dllm``; what it takes by place comes first."""
    command = next(c for c in cli.typer.main.get_command(cli.app).commands.values() if c.name == case.command)
    placed, named = [], []
    for parameter in command.params:
        option = next((name for name in parameter.opts if name.startswith("--")), None)
        value = case.arguments.get(parameter.name)
        if value is not None and option is None:
            placed.append(str(value))
        elif value is not None:
            named += [option] if value is True else [option, str(value)]
    return [*placed, *named]


@pytest.fixture(scope="module")
def imported(single_process):
    """NeMo, whose import writes to what pytest captures."""
    import nemo_dllm.recipes  # noqa: F401


@pytest.fixture
def light(imported, monkeypatch, capsys):
    """Runs ``nemo-dllm``: exit code and standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["nemo-dllm", *arguments])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code, capsys.readouterr().err

    return run


@pytest.fixture
def nemo(imported, monkeypatch, capsys):
    """Runs ``nemo dllm``: exit code and standard error."""
    from nemo_run.cli.api import create_cli

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["nemo", "dllm", *arguments])
        with pytest.raises(SystemExit) as exit:
            create_cli()(["dllm", *arguments], standalone_mode=False)
        return exit.value.code, capsys.readouterr().err

    return run


@pytest.mark.nemo
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_both_front_ends_say_the_same(case, light, nemo, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, error = light(case.command, *typed(case))
    assert (code, error.startswith("error: "), error.count("\n")) == (2, True, 1), error
    code, said = nemo(case.command, *(f"{name}={value}" for name, value in case.arguments.items()))
    assert (code, said.startswith("error: "), said.count("\n")) == (2, True, 1), said
    assert case.about in said
    # As options are typed: what the other one calls block_size=8 is --block-size=8 here.
    names = {*case.arguments, "max_new_tokens", "watch", "replay", "text", "text_file", "host"} - {"path"}
    assert in_options(case.about, {name: f"--{name.replace('_', '-')}" for name in names}) in error
    assert not re.search(r"(?<!-)\b[a-z]+_[a-z_]+=", error)


@pytest.mark.nemo
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["generate", "path=x", "top_kk=3"], "top_kk is unknown; did you mean top_k"),
        (["generate", f"path={BLOCKS}", "top_k=many"], "top_k=many cannot be read as int | None"),
        (["plan", "--gpus"], "--gpus is not NAME=VALUE, as gpus=..."),
        (["generate", "--promt", "hello", BLOCKS], "promt is unknown; did you mean prompt"),
        (["evaluate", BLOCKS, "absent.txt"], "data=absent.txt does not exist; name a file or folder that is there"),
        (["evaluate", BLOCKS, __file__, "more"], "more is one argument too many; each further one has a name"),
        (["generate"], "path is missing; add path=..."),
        (["generate", "hello"], "hello does not exist"),
        (["generate", f"path={BLOCKS}", "prompt=a", f"prompt_file={__file__}"], "prompt=a and prompt_file="),
        (["plan", "gpus=8"], "recipe is missing"),
        (["plan", "recipe=mdlm_tinyy"], "recipe='mdlm_tinyy' is unknown; did you mean mdlm_tiny"),
        (["plan", "recipe=mdlm_tiny", "memory=-3"], "memory=-3 GB must be above the 10 GB that are left free"),
        (["recipes", "all"], "all is one argument too many: recipes takes none"),
        (["verify", "checkpoint=x", "hf=y"], "hf is unknown; "),
        (["data", "check", "prefix=absent"], "tokenizer is missing"),
        (["data", "check", "prefix=absent", "tokenizer=absent"], "absent.bin"),
    ],
)
def test_wrong_arguments_of_nemo_dllm(nemo, arguments, message):
    code, error = nemo(*arguments)
    assert code == 2 and error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.nemo
def test_failures_end_with_1(nemo, monkeypatch):
    from nemo_dllm.collections.diffusion.inference import text

    monkeypatch.setattr(text, "open_session", lambda *_, **__: {}["key"])
    assert nemo("generate", f"path={BLOCKS}", "prompt=w5")[0] == 1


# Whether a process speaks: at once, later (None), or not at all.
RANKS = {
    "alone": ({}, True),
    "first of torchrun": ({"RANK": "0", "LOCAL_RANK": "0"}, True),
    "first of another node": ({"RANK": "8", "LOCAL_RANK": "0", "NODE_RANK": "1"}, None),
    "second of another node": ({"RANK": "9", "LOCAL_RANK": "1", "NODE_RANK": "1"}, False),
    "second of srun": ({"SLURM_PROCID": "1"}, False),
    "second of a node of srun": ({"SLURM_PROCID": "9", "SLURM_LOCALID": "1"}, False),
    "first of a node of srun": ({"SLURM_PROCID": "8", "SLURM_LOCALID": "0"}, None),
    "first that Lightning started": ({"NODE_RANK": "0", "LOCAL_RANK": "0"}, True),
    "second that Lightning started": ({"NODE_RANK": "0", "LOCAL_RANK": "1"}, False),
}


@pytest.fixture
def rank(monkeypatch):
    """Sets what starts processes sets, and counts the seconds that are waited."""

    def rank(environment):
        for name in ("RANK", "SLURM_PROCID", "SLURM_LOCALID", "NODE_RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        waited = []
        monkeypatch.setattr("time.sleep", waited.append)
        return waited

    return rank


@pytest.mark.parametrize("environment, speaks", RANKS.values(), ids=RANKS)
def test_the_first_of_several_processes_has_the_word(rank, capsys, monkeypatch, environment, speaks):
    waited = rank(environment)

    def train(*_):
        raise PermissionError(errno.EACCES, "Permission denied", "runs")

    monkeypatch.setattr(cli, "_train", train)
    monkeypatch.setattr(sys, "argv", ["nemo-dllm", "pretrain", "--factory", "mdlm_tiny"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: ") == (speaks is not False)
    # The others leave it the time to speak: torchrun ends all with the first that fails.
    assert waited == ([] if speaks else [GRACE])


def test_processes_that_train_no_common_model_speak_for_themselves(rank, capsys, monkeypatch):
    waited = rank({"SLURM_PROCID": "1"})
    monkeypatch.setattr(sys, "argv", ["nemo-dllm", "generate", "no/such/model", "--prompt", "a", "--steps", "0"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, waited) == (2, []) and capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("environment, speaks", RANKS.values(), ids=RANKS)
def test_settings_are_refused_once(rank, environment, speaks):
    waited = rank(environment)
    with pytest.raises(SystemExit if speaks is False else ValueError) as ended, refused_once():
        raise ValueError("two and two are five")
    assert str(ended.value) == ("1" if speaks is False else "two and two are five")
    assert waited == ([] if speaks else [GRACE])
    with pytest.raises(KeyError), refused_once():
        raise KeyError("what no user can mend")
