"""Errors of ``nemo-dllm pretrain``, and what it hands to nemo_run."""

import re

import pytest
import yaml

from nemo_dllm.cli.errors import is_for_users, one_line

pytestmark = pytest.mark.nemo


@pytest.fixture(scope="module")
def pretrain():
    """``nemo-dllm pretrain`` with these arguments."""
    from nemo.collections import llm

    import nemo_dllm.recipes  # noqa: F401
    from nemo_dllm.recipes.command_line import run_task

    return lambda *arguments: run_task(llm.pretrain, list(arguments), verbose=False)


TINY = ("--factory", "mdlm_tiny")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "no recipe is named; add --factory NAME"),
        (("--factory", "mdlm_tyny"), "--factory mdlm_tyny is unknown; did you mean mdlm_tiny or bd3lm_tiny"),
        (("--factory", "qwen3_8b_mdlm"), "did you mean qwen3_8b_mdlm_pretrain or qwen3_8b_mdlm_finetune"),
        (("--factory", "xyzzy"), "--factory xyzzy is unknown; `nemo-dllm recipes` lists the names"),
        (
            ("--factory", "qwen3_0p6b_mdlm_finetune"),
            "--factory qwen3_0p6b_mdlm_finetune is a recipe of `finetune`, not of `pretrain`",
        ),
        (("--factory", "mdlm_tiny(pathh=x)"), "--factory mdlm_tiny(pathh=x): pathh is unknown; did you mean path?"),
        (("--factory", "mdlm_tiny(xyzzy=x)"), "xyzzy is unknown; known: path, dir, name, tokenizer"),
        ((*TINY, "trainer.max_stepz=2"), "trainer.max_stepz is unknown; did you mean trainer.max_steps"),
        ((*TINY, "trainerr.max_steps=2"), "trainerr is unknown; did you mean trainer?"),
        ((*TINY, "model.xyzzy=2"), "model.xyzzy is unknown; known: config, objective, optim, tokenizer"),
        ((*TINY, "model.config.xyzzy=2"), "model.config.xyzzy is unknown; known: the fields of Qwen3Config"),
        ((*TINY, "optim.config.lr=abc"), "optim.config.lr=abc cannot be read as float or None"),
        ((*TINY, "trainer.strategy.fsdp=x"), "trainer.strategy.fsdp=x cannot be read as megatron or pytorch or None"),
        ((*TINY, "trainer.max_steps=2.5"), "trainer.max_steps=2.5 cannot be read as int"),
        ((*TINY, "--trainer.max_steps=2"), "--trainer.max_steps=2 is neither an option of nemo llm pretrain nor"),
        ((*TINY, "trainer.max_steps="), "trainer.max_steps='' cannot be read as int"),
        ((*TINY, "steps"), "steps is neither an option of nemo llm pretrain nor FIELD=VALUE"),
        (("mdlm_tiny",), "mdlm_tiny is neither an option of nemo llm pretrain nor FIELD=VALUE; did you mean --factory"),
        (("--factory", "mdlm_tiny(path=x"), "--factory mdlm_tiny(path=x cannot be read; write NAME or"),
        (("--yaml", "absent.yaml"), "--yaml absent.yaml is no file that is there; name a file"),
    ],
)
def test_errors_are_one_line_with_a_way_out(pretrain, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        pretrain(*arguments)
    assert "\n" not in str(caught.value)


def test_what_a_constructor_refuses_is_told_as_a_setting(pretrain):
    """Megatron's own check, in its words, with the place in the recipe."""
    with pytest.raises(ValueError) as caught:
        pretrain(*TINY, "model.config.recompute_granularity=fulll")
    assert is_for_users(caught.value)
    assert one_line(caught.value).startswith("model.config: When using recompute_granuarlity: fulll must be")
    assert "\n" not in one_line(caught.value)


def test_errors_in_a_yaml_file(pretrain, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("run: {factory: mdlm_tiny}\ntrainer: {max_stepz: 2}\n")
    with pytest.raises(ValueError, match="trainer.max_stepz is unknown; did you mean trainer.max_steps"):
        pretrain("--yaml", str(file))


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "recipe.yaml sets no field; write FIELD: VALUE, and run: {factory: NAME}"),
        ("mdlm_tiny", "recipe.yaml sets no field"),
        ("run: {factory: mdlm_tiny", "recipe.yaml is no YAML: "),
    ],
)
def test_a_file_that_sets_nothing(pretrain, tmp_path, content, message):
    file = tmp_path / "recipe.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        pretrain("--yaml", str(file))
    assert "\n" not in str(caught.value)


def test_what_the_user_asks_to_see_is_shown(pretrain, capsys):
    pretrain(*TINY, "trainer.max_steps=17", "--dryrun")
    assert "max_steps=17" in capsys.readouterr().out


@pytest.fixture
def export(pretrain, tmp_path, monkeypatch):
    """Writes a recipe to a file, and returns it."""

    def export(*arguments):
        # NeMo leaves a representer of any object behind once it has saved a checkpoint's context in this process.
        monkeypatch.setattr(yaml.SafeDumper, "yaml_multi_representers", {})
        pretrain(*arguments, "--to-yaml", str(tmp_path / "recipe.yaml"))
        return tmp_path / "recipe.yaml"

    return export


def test_a_recipe_can_be_exported_and_read_back(export, recipes):
    """By our command and by NeMo's, with overrides on top."""
    from nemo.collections import llm
    from nemo_run.cli.api import RunContext

    from nemo_dllm.recipes.command_line import QuietRun

    for name in ("mdlm_tiny", "llama31_8b_a2d_pretrain", "sdar_1p7b_pretrain"):
        file = export("--factory", name, "trainer.max_steps=17")
        assert "max_steps: 17" in file.read_text()
        expected = recipes[name]
        expected.trainer.max_steps = 17
        assert QuietRun(name="pretrain", yaml=str(file)).parse_fn(llm.pretrain, []) == expected
        expected.optim.config.lr = 0.5
        context = RunContext(name="pretrain", factory=f"saved(path='{file}')")
        assert context.parse_fn(llm.pretrain, ["optim.config.lr=0.5"]) == expected


@pytest.mark.parametrize("value", ["", "''", '""'])
def test_an_empty_text_is_one(value):
    """A shell takes the quotes off."""
    from nemo_dllm.recipes.command_line import read_recipe

    recipe = "qwen3_0p6b_a2d_finetune(init_from='hf://name', dataset='chats.jsonl')"
    assert read_recipe(recipe, [f"data.chat_template={value}"]).data.chat_template == ""


def test_an_interrupted_run_is_no_success(pretrain, monkeypatch):
    """Ctrl-C before the trainer listens: what reads the arguments ends with a code of its own."""
    import nemo_run as run

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", interrupt)
    with pytest.raises(SystemExit, match="130"):
        pretrain(*TINY)


@pytest.mark.parametrize("devices, message", [("0", "not a valid input"), ("x", "should be an int > 0")])
def test_what_a_constructor_refuses_with_another_error_is_a_setting_too(pretrain, devices, message):
    with pytest.raises(Exception, match=message) as caught:
        pretrain(*TINY, f"trainer.devices={devices}")
    assert is_for_users(caught.value)
    assert one_line(caught.value).startswith("trainer: ") and "\n" not in one_line(caught.value)


def test_files_that_hold_no_recipe_of_the_command(export, tmp_path):
    from nemo_dllm.recipes.saved import read_recipe

    file = export("--factory", "mdlm_tiny")
    with pytest.raises(ValueError, match="recipe.yaml holds a recipe of `pretrain`, not of `finetune`"):
        read_recipe(file, "finetune")
    file.write_text(file.read_text().replace("MDLMModel", "MDLMMoodel"))
    with pytest.raises(ValueError, match="_target_=nemo_dllm.collections.*MDLMMoodel does not exist here"):
        read_recipe(file, "pretrain")
    file.write_text("trainer: {max_steps: 1}")
    with pytest.raises(ValueError, match="recipe.yaml holds no whole recipe; write it with --to-yaml"):
        read_recipe(file, "pretrain")


def test_nemo_runs_own_command_is_as_it_was(pretrain):
    from nemo.collections import llm
    from nemo_run.cli import api

    from nemo_dllm.recipes.refusals import RefuseOnce

    with pytest.raises(ValueError):
        pretrain()
    assert llm.pretrain.cli_entrypoint.run_ctx_cls is RefuseOnce
    assert not hasattr(api, "print")
