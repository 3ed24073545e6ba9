"""Errors of ``nemo-dllm pretrain``, and what it hands to nemo_run."""

import re

import pytest
import yaml

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
        (("--factory", "mdlm_tyny"), "--factory mdlm_tyny is unknown; did you mean mdlm_tiny or bd3lm_tiny?"),
        (("--factory", "xyzzy"), "--factory xyzzy is unknown; see (`nemo-dllm recipes` lists all)"),
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
        ((*TINY, "trainer.max_steps=2.5"), "trainer.max_steps=2.5 cannot be read as int"),
        ((*TINY, "--trainer.max_steps=2"), "--trainer.max_steps=2 is neither an option of nemo llm pretrain nor"),
        ((*TINY, "steps"), "steps is neither an option of nemo llm pretrain nor FIELD=VALUE"),
        (("--yaml", "absent.yaml"), "absent.yaml"),
    ],
)
def test_errors_are_one_line_with_a_way_out(pretrain, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        pretrain(*arguments)
    assert "\n" not in str(caught.value)


def test_errors_in_a_yaml_file(pretrain, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("run: {factory: mdlm_tiny}\ntrainer: {max_stepz: 2}\n")
    with pytest.raises(ValueError, match="trainer.max_stepz is unknown; did you mean trainer.max_steps"):
        pretrain("--yaml", str(file))


def test_what_the_user_asks_to_see_is_shown(pretrain, capsys):
    pretrain(*TINY, "trainer.max_steps=17", "--dryrun")
    assert "max_steps=17" in capsys.readouterr().out


def test_a_recipe_can_be_exported(pretrain, tmp_path, monkeypatch):
    # NeMo leaves a representer of any object behind once it has saved a checkpoint's context in this process.
    monkeypatch.setattr(yaml.SafeDumper, "yaml_multi_representers", {})
    pretrain(*TINY, "trainer.max_steps=17", "--to-yaml", str(tmp_path / "recipe.yaml"))
    assert "max_steps: 17" in (tmp_path / "recipe.yaml").read_text()


def test_nemo_runs_own_command_is_as_it_was(pretrain):
    from nemo.collections import llm
    from nemo_run.cli import api

    with pytest.raises(ValueError):
        pretrain()
    assert llm.pretrain.cli_entrypoint.run_ctx_cls is api.RunContext
    assert not hasattr(api, "print")
