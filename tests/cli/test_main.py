"""The ``nemo-dllm`` command, and the way from a text to a trained model and back to text through it."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fiddle as fdl
import pytest

from nemo_dllm.cli import main as cli
from nemo_dllm.collections.diffusion.sampling import SamplerConfig

MODEL = str(Path(__file__).parents[1] / "golden" / "models" / "a2d_qwen3")
COMMANDS = (
    "generate",
    "serve",
    "recipes",
    "pretrain",
    "finetune",
    "import",
    "export",
    "verify",
    "data preprocess",
    "data check",
    "data show",
)


@pytest.mark.parametrize("arguments", [["--help"], *([*command.split(), "--help"] for command in COMMANDS)])
def test_help_is_quick_and_imports_nothing_heavy(arguments):
    script = f"""
import sys
from nemo_dllm.cli import main as cli
sys.argv = {["nemo-dllm", *arguments]}
try:
    cli.main()
finally:
    assert not {{"torch", "nemo", "nemo_run", "lightning", "transformers"}} & set(sys.modules)
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    assert "Usage: nemo-dllm" in result.stdout
    # Of the processor, since the machine may have other things to do.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


@pytest.fixture
def run_main(monkeypatch):
    """Runs ``nemo-dllm generate`` with something else in the place of what it does."""

    def run(does, *arguments):
        monkeypatch.setattr(sys, "argv", ["nemo-dllm", "generate", MODEL, "--prompt", "a", *arguments])
        monkeypatch.setattr(cli, "_import", lambda *_: SimpleNamespace(generate=lambda **_: does()))
        cli.main()

    return run


def test_what_a_user_can_mend_is_one_line_that_names_the_option(run_main, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_main(lambda: SamplerConfig(top_k=0))
    assert capsys.readouterr().err == "error: --top-k=0 must be at least 1; leave it None to sample from all tokens\n"


def test_an_error_in_a_recipe_says_where(run_main, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_main(lambda: fdl.build(fdl.Config(dict, data=fdl.Config(SamplerConfig, max_length=0))))
    assert capsys.readouterr().err.startswith("error: data: --max-length=0 must be at least 1;")


@pytest.mark.parametrize(
    "does, arguments",
    [(lambda: SamplerConfig(top_k=0), ["--verbose"]), (lambda: json.loads("{"), []), (lambda: {}["key"], [])],
)
def test_all_else_keeps_its_traceback(run_main, does, arguments):
    with pytest.raises((ValueError, KeyError)):
        run_main(does, *arguments)


@pytest.mark.parametrize(
    "arguments, about",
    [
        (["generate", "absent"], "'absent' does not exist"),
        (["generate", ".", "--prompt", "a", "--prompt-file", __file__], "--prompt=a and --prompt-file="),
        (["generate", ".", "--prompt-file", "absent.jsonl"], "'absent.jsonl' does not exist"),
        (["generate", ".", "--top-k", "many"], "Invalid value for '--top-k': "),
        (["generate"], "Missing argument 'PATH'"),
        (["infill", ".", "--text", "a <mask>", "--prefix", "a"], "--text=a <mask> and --prefix=a"),
        (["chat", "absent"], "'absent' does not exist"),
        (["evaluate", "."], "Missing argument 'DATA'"),
        (["plan", "x", "--gpus", "many"], "'--gpus'"),
        (["plan", "x", "gpus=8"], "gpus=8 is no field of the recipe; write --gpus 8"),
        (["plan", "x", "--gpuss", "8"], "--gpuss (Possible options: --gpus)"),
        (["recipes", "all"], "unexpected extra argument"),
        (["data", "show", "x"], "Missing option '--tokenizer'"),
        (["trainn"], "No such command 'trainn'"),
        (["--nope"], "No such option: --nope"),
    ],
)
def test_wrong_arguments_are_one_line_before_nemo_is_imported(monkeypatch, capsys, arguments, about):
    monkeypatch.setattr(sys, "argv", ["nemo-dllm", *arguments])
    monkeypatch.setattr(cli, "_import", lambda *_: pytest.fail("imported NeMo"))
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and about in line
    command = " ".join(["nemo-dllm", *arguments[: 2 if arguments[0] == "data" else 1]])
    known = arguments[0] not in ("trainn", "--nope")
    assert line.endswith(f"(`{command if known else 'nemo-dllm'} --help`)")


@pytest.mark.parametrize("arguments", [[], ["data"]])
def test_no_arguments_ask_for_help(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["nemo-dllm", *arguments])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    shown = capsys.readouterr()
    assert " ".join(["Usage: nemo-dllm", *arguments]) in shown.out and shown.err == ""


@pytest.mark.parametrize(
    "command, arguments, message",
    [
        ("generate", ["--steps", "0"], "error: --steps=0 must be from 1 to --max-new-tokens=128"),
        ("serve", ["--preset", "best"], "error: --preset='best' is unknown; known: dllm_bd3lm"),
        ("chat", ["--stop-strings", ""], "error: --stop-strings=('',) hold an empty text"),
        (
            "evaluate",
            ["absent.txt"],
            "error: DATA=absent.txt does not exist; name a file or folder that is there, or",
        ),
    ],
)
def test_settings_that_nothing_can_mend_end_before_nemo_is_imported(monkeypatch, capsys, command, arguments, message):
    monkeypatch.setattr(sys, "argv", ["nemo-dllm", command, MODEL, *arguments])
    monkeypatch.setattr(cli, "_import", lambda *_: pytest.fail("imported NeMo"))
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capsys.readouterr().err.startswith(message)


class Recorder:
    """In the place of the modules of commands: keeps what they are called with."""

    def __getattr__(self, name):
        return lambda **arguments: setattr(self, "called", (name, arguments))


@pytest.mark.parametrize(
    "arguments, settings",
    [
        ([], {}),
        (["--top-k", "5", "--temperature", "0.5"], {"top_k": 5, "temperature": 0.5}),
        (["--threshold", "none", "--cache", "None"], {"threshold": None, "cache": None}),
        (["--no-stop-at-eos", "--tempered-confidence"], {"stop_at_eos": False, "tempered_confidence": True}),
        (
            ["--stop-token-ids", "3", "--stop-token-ids", "4", "--stop-strings", "a b"],
            {"stop_token_ids": [3, 4], "stop_strings": ["a b"]},
        ),
    ],
)
def test_settings_that_are_given_are_told_from_those_that_are_not(monkeypatch, arguments, settings):
    recorder = Recorder()
    monkeypatch.setattr(cli, "_import", lambda *_: recorder)
    monkeypatch.setattr(sys, "argv", ["nemo-dllm", "generate", MODEL, "--prompt", "a", *arguments])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    name, called = recorder.called
    assert (name, called["settings"]) == ("generate", settings)
    assert (called["path"], called["prompt"], called["batch_size"]) == (Path(MODEL), "a", 8)


# From here on: a model of 28 thousand parameters, four steps on a small text, in processes as a user starts them.

SIZES = {
    "trainer": {"max_steps": 4, "val_check_interval": 2, "log_every_n_steps": 1},
    "model": {
        "config": {
            "num_layers": 2,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_attention_heads": 2,
            "num_query_groups": 1,
            "kv_channels": 16,
            "seq_length": 32,
        }
    },
    "data": {
        "vocab_size": 300,
        "seq_length": 32,
        "micro_batch_size": 4,
        "global_batch_size": 4,
        "num_val_rows": 4,
    },
}
MASK = "<|mask|>"
PYTHON_RUN = """
import nemo_run as run
from nemo_dllm.recipes.tiny import mdlm_tiny
recipe = mdlm_tiny(path="text", dir="python")
for path, value in {fields}.items():
    owner = recipe
    *parents, field = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, field, value)
run.run(recipe, direct=True)
"""


def flat(fields, prefix=""):
    """{"a": {"b": 1}} as {"a.b": 1}."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with small texts, and a function that runs a command in it."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "text").mkdir()
    for file in sorted(Path(__file__).parents[2].glob("connectors/*.py"))[:12]:
        (folder / "text" / f"{file.stem}.txt").write_text(file.read_text()[:6000])
    commands = Path(sys.executable).parent

    def run(program, *arguments):
        environment = os.environ | {
            "NEMO_HOME": str(folder / "nemo"),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "COLUMNS": "200",
        }
        result = subprocess.run(
            [commands / program, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        return result

    return folder, run


@pytest.fixture(scope="module")
def from_command_line(workplace):
    """Folder of the run that ``nemo llm pretrain`` makes."""
    folder, run = workplace
    overrides = [f"{path}={value}" for path, value in flat(SIZES)]
    run("nemo", "llm", "pretrain", "--factory", "mdlm_tiny(path='text', dir='nemo_cli')", "--yes", *overrides)
    return folder / "nemo_cli" / "mdlm_tiny"


@pytest.fixture(scope="module")
def from_yaml(workplace):
    """Folder of the same run by ``nemo-dllm pretrain`` and a YAML file, and what the command printed."""
    folder, run = workplace
    recipe = {"run": {"factory": "mdlm_tiny(path=text, dir=yaml)"}, **SIZES}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder / "yaml" / "mdlm_tiny", run("nemo-dllm", "pretrain", "--yaml", "recipe.yaml")


def losses(run_folder):
    """Training and validation losses by step, as TensorBoard has them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_folder / "tensorboard")).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in ("train/loss", "validation/loss")
    }


@pytest.mark.nemo
def test_command_line_yaml_and_python_train_the_same_model(workplace, from_command_line, from_yaml):
    folder, run = workplace
    run("python", "-c", PYTHON_RUN.format(fields=dict(flat(SIZES))))
    expected = losses(folder / "python" / "mdlm_tiny")
    assert [step for step, _ in expected["train/loss"]] == [1, 2, 3, 4]
    assert [step for step, _ in expected["validation/loss"]] == [2, 4]
    assert losses(from_command_line) == losses(from_yaml[0]) == expected


@pytest.mark.nemo
def test_a_run_prints_progress_and_places_only(from_yaml):
    output = from_yaml[1]
    assert output.stderr == ""
    lines = output.stdout.splitlines()
    assert "validation" in output.stdout and all(line.startswith("step ") for line in lines[:-3])
    assert lines[-3:] == [
        "checkpoints: yaml/mdlm_tiny/checkpoints",
        "logs: yaml/mdlm_tiny (tensorboard --logdir yaml/mdlm_tiny/tensorboard)",
        "sample: nemo-dllm generate yaml/mdlm_tiny --prompt TEXT",
    ]


@pytest.mark.nemo
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(workplace):
    folder, run = workplace
    command = ["nemo-dllm", "pretrain", "--factory", "mdlm_tiny(path='text', dir='full disk')"]
    command += [f"{path}={value}" for path, value in flat(SIZES)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    full = subprocess.run(
        [Path(sys.executable).parent / command[0], *command[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        # No file grows beyond this, as on a disk without room.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)),
    )
    (line,) = full.stderr.splitlines()
    assert full.returncode == 2 and line.startswith("error: ")
    assert ".ckpt could not be written; is the disk full? The checkpoints before it are whole" in line
    assert "step 4/4" in run(*command).stdout


@pytest.mark.nemo
def test_a_run_writes_text(workplace, from_command_line):
    _, run = workplace
    output = run("nemo-dllm", "generate", from_command_line, "--prompt=def read", "--max-new-tokens=12", "--watch")
    assert output.stdout.startswith("def read")
    assert MASK not in output.stdout
    masked = re.findall(r"^\[step \d+, (\d+) masked\]$", output.stderr, re.MULTILINE)
    assert masked[-1] == "0"
    assert not re.search("nemo|warning", output.stderr, re.IGNORECASE)


@pytest.mark.parametrize("environment, told", [({}, True), ({"LOCAL_RANK": "1", "RANK": "1"}, False)])
def test_a_terminal_is_told_at_once_what_takes_so_long(environment, told):
    """The first of a run's processes does; who reads standard error from a file or a pipe finds errors alone there."""
    code = "import sys; sys.modules['nemo.collections'] = None; sys.argv[1:] = ['recipes']"
    command = [sys.executable, "-c", f"{code}\nfrom nemo_dllm.cli.main import main\nmain()"]
    clean = {key: value for key, value in os.environ.items() if "RANK" not in key}
    terminal, end = os.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end, env=clean | environment) as process:
        os.close(end)
        shown = os.read(terminal, 1000).decode()
        assert process.stdout.read() == b""
    os.close(terminal)
    assert shown.startswith("loading NeMo, which takes about 15 seconds") == told
    done = subprocess.run(command, capture_output=True, text=True, env=clean | environment, timeout=300)
    assert "loading NeMo" not in done.stdout + done.stderr
