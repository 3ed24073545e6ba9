"""Runs that are told to end, by Slurm or by Ctrl-C, and checkpoints that are damaged."""

import os
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from .conftest import BATCH, KILLED_AFTER, SMALL, STEPS
from .test_resume import assert_goes_on, checkpoints_of

pytestmark = pytest.mark.nemo

# A background process of a shell, and so of a test, ignores Ctrl-C.
INTERRUPTIBLE = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)


def test_sigterm_saves_the_step_under_way(run_recipe, straight, tmp_path):
    run_recipe(tmp_path, killed_after=KILLED_AFTER, exit_code=143, signals={"killed_by": [signal.SIGTERM]})
    assert_goes_on(run_recipe(tmp_path), straight, KILLED_AFTER + 1)


def test_ctrl_c_saves_the_step_under_way_and_says_where(run_recipe, straight, tmp_path):
    signals = {"killed_by": [signal.SIGINT]}
    console = run_recipe(tmp_path, killed_after=KILLED_AFTER, exit_code=130, signals=signals)["console"]
    saved = checkpoints_of(tmp_path)[(KILLED_AFTER + 1) * BATCH, True]
    step = f"interrupted at step {KILLED_AFTER + 1} of {STEPS}"
    assert f"{step}; the last checkpoint is at {saved}, from which the same command goes on\n" in console
    assert "Ctrl-C: the run ends after this step, and saves; Ctrl-C again ends it at once\n" in console
    assert_goes_on(run_recipe(tmp_path), straight, KILLED_AFTER + 1)


def test_a_second_ctrl_c_ends_the_run_at_once(run_recipe, straight, tmp_path):
    signals = {"killed_by": [signal.SIGINT, signal.SIGINT]}
    console = run_recipe(tmp_path, killed_after=KILLED_AFTER, exit_code=130, signals=signals)["console"]
    assert f"interrupted at step {KILLED_AFTER} of {STEPS}; the last checkpoint is at " in console
    assert_goes_on(run_recipe(tmp_path), straight, 6)


def test_ctrl_c_twice_before_a_checkpoint_says_that_there_is_none(run_recipe, tmp_path):
    signals = {"killed_by": [signal.SIGINT, signal.SIGINT]}
    console = run_recipe(tmp_path, killed_after=1, exit_code=130, signals=signals)["console"]
    assert f"interrupted at step 1 of {STEPS}; there is no checkpoint yet, and the same command starts anew" in console


def test_processes_that_load_data_finish_the_step_too(run_recipe, straight, tmp_path):
    signals = {"killed_by": [signal.SIGINT]}
    run_recipe(tmp_path, killed_after=KILLED_AFTER, exit_code=130, signals=signals, data__num_workers=2)
    assert_goes_on(run_recipe(tmp_path), straight, KILLED_AFTER + 1)


def test_sigterm_saves_where_no_last_checkpoint_is_kept_otherwise(run_recipe, straight, tmp_path):
    signals = {"killed_by": [signal.SIGTERM]}
    run_recipe(tmp_path, killed_after=2, exit_code=143, signals=signals, log__ckpt__save_last=False)
    assert_goes_on(run_recipe(tmp_path), straight, 3)


def test_what_is_written_in_the_background_is_finished_before_the_exit():
    from nemo.utils.callbacks.dist_ckpt_io import AsyncFinalizableCheckpointIO

    from nemo_dllm.collections.diffusion.training.termination import SaveOnTermination

    class Writer(AsyncFinalizableCheckpointIO):
        def __init__(self):
            self.under_way = 0

        def maybe_finalize_save_checkpoint(self, blocking=False):
            assert blocking
            self.under_way = 0

    writer = Writer()
    checkpoint = SimpleNamespace(save_last=True, _monitor_candidates=lambda trainer: {})
    checkpoint._save_last_checkpoint = lambda trainer, candidates: setattr(writer, "under_way", 1)
    strategy = SimpleNamespace(checkpoint_io=writer)
    trainer = SimpleNamespace(checkpoint_callback=checkpoint, strategy=strategy, global_step=1)
    callback = SaveOnTermination()
    callback._receive(signal.SIGTERM, None)
    with pytest.raises(SystemExit, match="143"):
        callback.on_train_batch_end(trainer, None, None, None, 0)
    assert writer.under_way == 0


def test_a_signal_to_one_rank_ends_all_at_one_step(run_recipe, straight, tmp_path):
    layout = {"ranks": 2, "trainer__strategy__tensor_model_parallel_size": 1}
    signals = {"killed_by": [signal.SIGTERM], "killed_rank": 1}
    run_recipe(tmp_path, killed_after=KILLED_AFTER, exit_code=143, signals=signals, **layout)
    for record in run_recipe(tmp_path, **layout):
        # All agree a step later.
        assert record["start"] == KILLED_AFTER + 2
        for step in range(KILLED_AFTER + 3, STEPS + 1):
            assert record["losses"][str(step)] == pytest.approx(straight["losses"][str(step)], rel=1e-4)


def test_ctrl_c_while_saving_lets_the_checkpoint_be_finished(run_recipe, straight, tmp_path):
    run_recipe(tmp_path, exit_code=130, signals={"interrupted_save": [6, 1]}, log__ckpt__save_top_k=-1)
    kept = {samples for samples, _ in checkpoints_of(tmp_path)}
    assert kept == {3 * BATCH, 6 * BATCH, 7 * BATCH}
    assert_goes_on(run_recipe(tmp_path), straight, 7)


def test_ctrl_c_twice_while_saving_leaves_the_checkpoint_before(run_recipe, straight, tmp_path):
    """No process waits for another, and what is half written is passed over."""
    run_recipe(tmp_path, exit_code=130, signals={"interrupted_save": [6, 2]}, log__ckpt__save_top_k=-1)
    assert_goes_on(run_recipe(tmp_path), straight, 3)


@pytest.mark.parametrize("number, ended", [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")])
def test_the_command_ends_all_its_processes_with_the_code_of_the_signal(number, ended, text, tmp_path):
    """Lightning, which starts the second, kills the first where the other has ended with another code than 0."""
    fields = [f"{name}={value}" for name, value in SMALL.items()]
    fields += [f"data.path={text}", f"data.cache_dir={tmp_path}/cache", "trainer.max_steps=100000", "trainer.devices=2"]
    command = [sys.executable, "-m", "nemo_dllm.cli", "pretrain", "--factory", "mdlm_tiny(dir='run')", *fields]
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE, *command],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
        )  # fmt: skip
        watch = threading.Timer(600, os.killpg, (process.pid, signal.SIGKILL))
        watch.start()
        for line in process.stdout:
            if "validation" in line:
                process.send_signal(number)
                break
        (line,) = process.stdout.read().splitlines()[-1:]
        code = process.wait()
        watch.cancel()
    errors = (tmp_path / "errors").read_text()
    assert code == 128 + number, errors
    assert re.fullmatch(
        rf"{ended} at step \d+ of 100000; the last checkpoint is at run/mdlm_tiny/checkpoints/\S+-last, from which "
        "the same command goes on",
        line,
    ), line
    assert "Traceback" not in errors


def shorten(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage",
    [
        lambda weights: shorten(next(weights.glob("*.distcp"))),
        lambda weights: next(weights.glob("*.distcp")).unlink(),
        lambda weights: shorten(weights / ".metadata"),
        lambda weights: shorten(weights / "common.pt"),
        lambda weights: (weights / "metadata.json").write_text("{"),
    ],
    ids=["a short shard", "a missing shard", "a short index", "a short common.pt", "metadata.json"],
)
def test_a_damaged_checkpoint_is_told_from_a_complete_one(killed, damage):
    from nemo_dllm.collections.diffusion.training.checkpoints import damage_of, latest_checkpoint

    kept = checkpoints_of(killed)
    assert damage_of(kept[24, True]) is None
    damage(kept[24, True] / "weights")
    assert damage_of(kept[24, True]).startswith("is damaged: ")
    assert latest_checkpoint(killed / "mdlm_tiny" / "checkpoints") == kept[24, False]


def test_a_run_says_that_it_passes_over_a_damaged_checkpoint(run_recipe, straight, killed):
    kept = checkpoints_of(killed)
    for which in ((24, True), (24, False)):
        shorten(next((kept[which] / "weights").glob("*.distcp")))
    record = run_recipe(killed)
    assert_goes_on(record, straight, 3)
    assert f"{kept[24, True].name} is damaged: " in record["console"]
    assert ".distcp is shorter than it was; it is not used" in record["console"]
