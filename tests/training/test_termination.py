"""Runs that are told to end, by Slurm or by Ctrl-C, and checkpoints that are damaged."""

import signal
from types import SimpleNamespace

import pytest

from .conftest import KILLED_AFTER, STEPS
from .test_resume import assert_goes_on, checkpoints_of

pytestmark = pytest.mark.nemo


def test_sigterm_saves_the_step_under_way(run_recipe, straight, tmp_path):
    run_recipe(tmp_path, killed_after=KILLED_AFTER, exit_code=143, signals={"killed_by": signal.SIGTERM})
    assert_goes_on(run_recipe(tmp_path), straight, KILLED_AFTER + 1)


def test_sigterm_saves_where_no_last_checkpoint_is_kept_otherwise(run_recipe, straight, tmp_path):
    signals = {"killed_by": signal.SIGTERM}
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
    signals = {"killed_by": signal.SIGTERM, "killed_rank": 1}
    run_recipe(tmp_path, killed_after=KILLED_AFTER, exit_code=143, signals=signals, **layout)
    for record in run_recipe(tmp_path, **layout):
        # All agree a step later.
        assert record["start"] == KILLED_AFTER + 2
        for step in range(KILLED_AFTER + 3, STEPS + 1):
            assert record["losses"][str(step)] == pytest.approx(straight["losses"][str(step)], rel=1e-4)


def test_ctrl_c_while_saving_ends_the_run_and_leaves_the_checkpoint_before(run_recipe, straight, tmp_path):
    """No process waits for another, and what is half written is passed over."""
    run_recipe(tmp_path, exit_code=1, signals={"interrupted_save": 6}, log__ckpt__save_top_k=-1)
    assert_goes_on(run_recipe(tmp_path), straight, 3)


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
