"""What a user types after ``nemo llm pretrain`` and ``nemo dllm``, without starting a process for it."""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nemo

MODELS = Path(__file__).parents[1] / "golden" / "models"

FIELDS = {
    "trainer.max_steps": 4,
    "model.config.hidden_size": 32,
    "model.objective.schedule": "cosine",
    "data.path": "texts",
    "data.num_val_rows": None,
    "optim.config.lr": 1e-3,
}


@pytest.fixture(scope="module")
def parse():
    """What ``nemo llm pretrain`` makes of a factory, a YAML file and overrides."""
    from nemo.collections import llm
    from nemo_run.cli.api import RunContext

    import nemo_dllm.recipes  # noqa: F401

    def parse(*overrides, factory=None, yaml=None):
        context = RunContext(name="pretrain", factory=factory, yaml=yaml and str(yaml))
        return context.parse_fn(llm.pretrain, list(overrides))

    return parse


def test_arguments_of_a_recipe(parse, tmp_path):
    text = tmp_path / "file.txt"
    text.write_text("text")
    recipe = parse(factory=f"mdlm_tiny(path='{text}', dir=X, name='my run')")
    assert (recipe.data.path, recipe.log.log_dir, recipe.log.name) == (str(text), "X", "my run")


def test_command_line_yaml_and_python_give_the_same_recipe(parse, tiny, tmp_path):
    for path, value in FIELDS.items():
        owner, _, field = path.rpartition(".")
        target = tiny
        for name in owner.split("."):
            target = getattr(target, name)
        setattr(target, field, value)
    assert parse(*(f"{path}={value}" for path, value in FIELDS.items()), factory="mdlm_tiny") == tiny
    fields = """
trainer: {max_steps: 4}
model:
  config: {hidden_size: 32}
  objective: {schedule: cosine}
data: {path: texts, num_val_rows: null}
optim: {config: {lr: 1e-3}}
"""
    (tmp_path / "fields.yaml").write_text(fields)
    assert parse(factory="mdlm_tiny", yaml=tmp_path / "fields.yaml") == tiny
    (tmp_path / "whole.yaml").write_text(f"run: {{factory: mdlm_tiny}}\n{fields}")
    assert parse(yaml=tmp_path / "whole.yaml") == tiny
    assert parse("trainer.max_steps=9", yaml=tmp_path / "whole.yaml").trainer.max_steps == 9


@pytest.mark.parametrize(
    "override, value",
    [
        ("data.path=texts", "texts"),
        ("data.path=['a.txt', 'b']", ["a.txt", "b"]),
        ("data.path=None", None),
        ("data.suffixes=['.md']", [".md"]),
        ("data.num_val_rows=12", 12),
        ("trainer.log_every_n_steps=5", 5),
        ("optim.config.lr=1", 1.0),
        ("optim.config.use_distributed_optimizer=false", False),
    ],
)
def test_types_of_overrides(parse, override, value):
    target = parse(override, factory="mdlm_tiny")
    for name in override.partition("=")[0].split("."):
        target = getattr(target, name)
    assert target == value and type(target) is type(value)


def test_the_start_of_a_run_is_a_field(parse):
    recipe = parse("init_from=hf://Qwen/Qwen3-0.6B", "mask_init=zero", factory="qwen3_0p6b_a2d_pretrain")
    assert (recipe.init_from, recipe.mask_init) == ("hf://Qwen/Qwen3-0.6B", "zero")


def test_nemo_dllm_has_our_commands():
    from nemo_run.cli.api import list_entrypoints

    from nemo_dllm.cli.sampling import COMMANDS

    ours = {"recipes", "import_hf", "export_hf", "verify", "preprocess", *(command.name for command in COMMANDS)}
    assert ours <= set(list_entrypoints()["dllm"])
    assert {"preprocess", "check", "show"} <= set(list_entrypoints()["dllm"]["data"])


def test_import_and_export_by_nemo_and_by_us(single_process, monkeypatch, capsys, tmp_path):
    """NeMo's own commands, and ours without a model, give the same files."""
    from nemo_run.cli.api import create_cli

    def nemo(*arguments):
        monkeypatch.setattr(sys, "argv", ["nemo", *arguments])
        create_cli()(list(arguments), standalone_mode=False)

    source = MODELS / "qwen3_tied"
    nemo("llm", "import", "--yes", f"model=a2d('{source}')", f"source=hf://{source}", f"output_path={tmp_path / 'n'}")
    nemo("llm", "export", "--yes", f"path={tmp_path / 'n'}", "target=hf", f"output_path={tmp_path / 'h'}")
    nemo("dllm", "import", f"source={source}", f"output_path={tmp_path / 'n2'}")
    # A run stands for its checkpoint.
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "n2").rename(tmp_path / "run" / "checkpoints" / "n2")
    nemo("dllm", "export", f"path={tmp_path / 'run'}", f"output_path={tmp_path / 'h2'}")
    files = {file.name: file.read_bytes() for file in (tmp_path / "h").iterdir()}
    again = {file.name: file.read_bytes() for file in (tmp_path / "h2").iterdir()}
    assert [name for name in files if files[name] != again[name]] == ["nemo_dllm_conversion.json"]
    assert files.keys() == again.keys()
    capsys.readouterr()
    for same in ("n", "run"):
        nemo("dllm", "verify", f"hf_path={source}", f"checkpoint={tmp_path / same}")
        assert "passed" in capsys.readouterr().out


@pytest.fixture
def nemo(single_process, monkeypatch, capsys):
    """Runs a ``nemo`` command and returns what it printed last."""
    from nemo_run.cli.api import create_cli

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["nemo", *arguments])
        create_cli()(list(arguments), standalone_mode=False)
        return capsys.readouterr().out.splitlines()[-1]

    return run


def test_nemo_dllm_samples(nemo, tmp_path):
    path = f"path={MODELS / 'sdar'}"
    printed = nemo("dllm", "generate", path, "prompt=w5 w7", "max_new_tokens=3", "threshold=None", "stop_token_ids=[3]")
    assert printed.startswith("w5 w7 ")
    assert nemo("dllm", "infill", path, "prefix=w5", "suffix=w7", "length=2", "cache=None").endswith(" w7")
    (tmp_path / "text.txt").write_text("w5 w7")
    printed = nemo("dllm", "evaluate", path, f"data={tmp_path / 'text.txt'}", "num_draws=1")
    assert printed == "2 tokens, 5 bytes in 1 rows of at most 512 tokens, 1 noise levels each"


@pytest.mark.parametrize(
    "typed",
    [
        ["DATA", "--num-draws", "1", "--seq-length=4"],
        ["num_draws=1", "DATA", "seq_length=4"],
        ["--seq-length", "4", "--data", "DATA", "--num-draws=1", "--no-best"],
    ],
)
def test_arguments_may_be_typed_as_those_of_nemo_dllm(nemo, tmp_path, typed):
    # What is before = is no name.
    text = tmp_path / "a=b" / "text.txt"
    text.parent.mkdir()
    text.write_text("w5 w7")
    typed = [str(text) if word == "DATA" else word for word in typed]
    printed = nemo("dllm", "evaluate", str(MODELS / "sdar"), *typed)
    assert printed == "2 tokens, 5 bytes in 1 rows of at most 4 tokens, 1 noise levels each"


@pytest.mark.parametrize("option", [["--for", "sglang"], ["--for=sglang"], ["for=sglang"], ["engine=sglang"]])
def test_export_for_an_engine(nemo, tmp_path, option):
    out = tmp_path / "out"
    printed = nemo("dllm", "export", f"path={MODELS / 'sdar'}", f"output_path={out}", *option)
    assert printed.startswith(f"serve it: python -m sglang.launch_server --model-path {out} --trust-remote-code")
    assert (out / "dllm_algorithm.yaml").read_text() == "block_size: 4\n"


def test_what_a_user_can_mend_is_one_line(nemo, capsys):
    with pytest.raises(SystemExit, match="2"):
        nemo("dllm", "generate", f"path={MODELS / 'qwen3'}")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "qwen3 is an autoregressive model" in line


def test_recipes_are_listed_with_a_line_each(capsys):
    from nemo_dllm.recipes import commands
    from nemo_dllm.recipes.builder import RECIPES

    commands.recipes()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(RECIPES)
    assert all(line.endswith(".") for line in lines)
