"""Runs of the smallest recipe, each in a process of its own."""

import json
import runpy
import shutil
from pathlib import Path

import pytest

STEPS, INTERVAL, KILLED_AFTER = 12, 3, 7
SEQ_LENGTH, BATCH = 16, 4
SMALL = {
    "model.config.num_layers": 2,
    "model.config.hidden_size": 32,
    "model.config.ffn_hidden_size": 48,
    "model.config.num_attention_heads": 2,
    "model.config.num_query_groups": 1,
    "model.config.kv_channels": 16,
    "data.vocab_size": 300,
    "data.seq_length": SEQ_LENGTH,
    "data.micro_batch_size": 2,
    "data.global_batch_size": BATCH,
    "data.num_val_rows": 8,
    "trainer.max_steps": STEPS,
    "trainer.val_check_interval": INTERVAL,
    "trainer.log_every_n_steps": 2,
    "optim.lr_scheduler.warmup_steps": 2,
}


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A text of 600 lines that are easy to tell apart."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n".join(f"line {i} holds {i * i} and {i % 7}" for i in range(600)))
    return file


@pytest.fixture(scope="session")
def run_recipe(forks, text, tmp_path_factory):
    """Runs a tiny recipe, made smaller still, in a folder, with some of its fields edited.

    ``folder`` is that of all ranks or a list of one for each; ``torchrun`` has torchrun's agent start the ranks.
    Returns what recorded_run.py wrote, of each rank where there are several. ``exit_code`` is by default that of a run
    that was killed where asked for, ``signals`` are further arguments of it.
    """
    script = Path(__file__).with_name("recorded_run.py")
    small = SMALL | {"data.path": str(text), "data.cache_dir": str(tmp_path_factory.mktemp("cache"))}

    def run(
        folder,
        ranks=1,
        killed_after=None,
        precision="fp32",
        factory="mdlm_tiny",
        exit_code=None,
        signals=None,
        torchrun=False,
        **edits,
    ):
        records = tmp_path_factory.mktemp("records")
        edits = {name.replace("__", "."): value for name, value in edits.items()}
        processes = []
        for rank in range(ranks):
            folders = [str(one) for one in folder] if isinstance(folder, list) else str(folder)
            job = {"folder": folders, "records": str(records), "rank": rank, "ranks": ranks, "launched": torchrun}
            job |= {
                "killed_after": killed_after,
                "precision": precision,
                "factory": factory,
                "edits": small | {"trainer.devices": ranks} | edits,
                **(signals or {}),
            }
            arguments = (str(script), {"job": job}, "__main__")
            if not torchrun:
                processes.append(forks.Process(target=runpy.run_path, args=arguments))
        if torchrun:
            launch = {"ranks": ranks, "logs": f"{records}/torchrun", "arguments": arguments}
            arguments = (str(script.with_name("torchrun_launch.py")), launch, "__main__")
            processes.append(forks.Process(target=runpy.run_path, args=arguments))
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=600)
            if process.is_alive():
                process.kill()
        expected = exit_code if exit_code is not None else 0 if killed_after is None else -9
        consoles = [(records / f"console{rank}").read_text() for rank in range(ranks)]
        assert {process.exitcode for process in processes} == {expected}, consoles[0][-3000:]
        written = [json.loads((records / f"record{rank}").read_text()) for rank in range(ranks)]
        for record, console in zip(written, consoles, strict=True):
            record["console"] = console
        return written[0] if ranks == 1 else written

    return run


@pytest.fixture(scope="session")
def straight_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("straight")


@pytest.fixture(scope="session")
def straight(run_recipe, straight_folder):
    """The record of an uninterrupted run."""
    return run_recipe(straight_folder)


@pytest.fixture(scope="session")
def killed_folder(run_recipe, tmp_path_factory):
    """The folder of a run that was killed after a step; all its checkpoints are kept, after steps 3 and 6."""
    folder = tmp_path_factory.mktemp("killed")
    run_recipe(folder, killed_after=KILLED_AFTER, log__ckpt__save_top_k=-1)
    return folder


@pytest.fixture
def killed(killed_folder, tmp_path):
    """A copy of that folder to go on in."""
    return shutil.copytree(killed_folder, tmp_path / "run")
