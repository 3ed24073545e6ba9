"""What a training starts from is looked for before anything is loaded."""

import os
import subprocess
import sys

import pytest

from nemo_dllm.cli.init_from import check_init_from

FINETUNE = ("--factory", "qwen3_8b_mdlm_finetune")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        (*FINETUNE, "init_from=nosuch"),
        (*FINETUNE, "init_from='nosuch'"),
        ("--dryrun", "--factory=qwen3_8b_mdlm_finetune", "trainer.max_steps=2", "init_from=nosuch"),
        ("-f", "qwen3_8b_mdlm_finetune(init_from='nosuch', dataset=chats)"),
        ("--factory", "qwen3_8b_mdlm_finetune(init_from=nosuch)"),
        ("--factory", "qwen3_8b_mdlm_finetune(init_from='imported')", "init_from=nosuch"),
    ],
)
def test_a_folder_that_is_not_there_is_told(here, arguments):
    (here / "imported" / "context").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"^init_from=nosuch is no folder that is there; "):
        check_init_from(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        FINETUNE,
        (*FINETUNE, "init_from=imported"),
        (*FINETUNE, "init_from=None"),
        (*FINETUNE, "init_from=owner/name"),
        (*FINETUNE, "init_from=hf://name"),
        (*FINETUNE, "init_from=nosuch", "run.executor=slurm"),
        (*FINETUNE, "init_from=nosuch", "resume.resume_from_path=elsewhere"),
        ("--yaml", "recipe.yaml", "init_from=nosuch"),
        ("--factory", "what is this", "trainer.max_steps"),
    ],
)
def test_what_may_be_there_is_left_to_the_training(here, arguments):
    (here / "imported" / "context").mkdir(parents=True)
    check_init_from(arguments)


@pytest.mark.parametrize(
    "kept, arguments",
    [
        ("nemo_experiments/qwen3_8b_mdlm_finetune", FINETUNE),
        ("nemo_experiments/qwen3_8b_mdlm_finetune/version_0", FINETUNE),
        ("runs/mine", ("--factory", "qwen3_8b_mdlm_finetune(dir='runs', name='mine')")),
        ("runs/mine", (*FINETUNE, "log.log_dir=runs", "log.name=mine")),
    ],
)
def test_a_run_that_may_go_on_does_not_need_it(here, kept, arguments):
    arguments = (*arguments, "init_from=gone")
    with pytest.raises(FileNotFoundError, match="^init_from=gone "):
        check_init_from(arguments)
    (here / kept / "start").mkdir(parents=True)
    check_init_from(arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("finetune", *FINETUNE, "init_from=nosuch"), "error: init_from=nosuch is no folder that is there; "),
        (("import", "nosuch", "out"), "error: SOURCE=nosuch is no folder that is there; "),
    ],
)
def test_the_command_says_so_without_nemo(arguments, message):
    code = f"import sys; sys.modules['nemo'] = None; sys.argv[1:] = {list(arguments)}"
    code += "\nfrom nemo_dllm.cli.main import main\nmain()"
    environment = {key: value for key, value in os.environ.items() if "RANK" not in key}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1
