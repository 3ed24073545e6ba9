"""Several ranks: started by torchrun's agent, and agreeing on a checkpoint whatever each of them sees of its folder."""

import io
import os
import pickle
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from .conftest import STEPS
from .test_resume import checkpoints_of, fake_checkpoint

pytestmark = pytest.mark.nemo

TWO = {"ranks": 2, "trainer__strategy__tensor_model_parallel_size": 1}


def assert_losses(records, straight, start):
    for record in records:
        assert record["start"] == start
        assert list(record["losses"]) == [str(step) for step in range(start + 1, STEPS + 1)]
        for step, loss in record["losses"].items():
            assert loss == pytest.approx(straight["losses"][step], rel=1e-4), step


def test_two_processes_of_torchrun_train_as_one_started_plainly(run_recipe, straight, killed, tmp_path):
    """From the start, and from a checkpoint: the ranks learn of it through the store of torchrun's agent."""
    assert_losses(run_recipe(tmp_path, torchrun=True, **TWO), straight, 0)
    assert_losses(run_recipe(killed, torchrun=True, **TWO), straight, 6)


@pytest.mark.parametrize("missing", [[(24, True)], [(24, True), (24, False), (12, False)]], ids=["older", "none"])
def test_a_rank_that_sees_another_state_of_the_folder_follows_rank_0(run_recipe, straight, killed, tmp_path, missing):
    other = shutil.copytree(killed, tmp_path / "other")
    for which in missing:
        shutil.rmtree(checkpoints_of(other)[which])
    assert_losses(run_recipe([killed, other], **TWO), straight, 6)


def test_a_rank_that_sees_more_than_rank_0_follows_it_too(run_recipe, straight, killed, tmp_path):
    other = shutil.copytree(killed, tmp_path / "other")
    for which in ((24, True), (24, False)):
        shutil.rmtree(checkpoints_of(killed)[which])
    assert_losses(run_recipe([killed, other], **TWO), straight, 3)


def test_a_rank_that_looks_after_rank_0_has_removed_a_checkpoint_removes_it_too(run_recipe, straight, killed):
    """Two checkpoints where one is kept: without a common list one rank waits for the other's barrier for ever."""
    assert_losses(run_recipe(killed, signals={"late_rank": 1}, **TWO), straight, 6)


def of_rank(rank, store):
    return SimpleNamespace(world_size=2, global_rank=rank, strategy=SimpleNamespace(store=store))


def test_all_ranks_learn_what_rank_0_was_refused(tmp_path):
    from nemo_dllm.collections.diffusion.training.rank_zero import told_by_rank_zero

    def refuse():
        raise FileNotFoundError("there is no complete checkpoint")

    def never():
        raise AssertionError("this rank looked for itself")

    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
    for rank, find_out in ((0, refuse), (1, never)):
        with pytest.raises(FileNotFoundError, match="^there is no complete checkpoint$"):
            told_by_rank_zero(of_rank(rank, store), find_out)


def test_a_rank_waits_until_it_sees_the_checkpoint(tmp_path, monkeypatch):
    from nemo_dllm.collections.diffusion.training import checkpoints

    arriving = threading.Timer(0.5, fake_checkpoint, (tmp_path, "late", 100))
    arriving.start()
    assert checkpoints.seen_by(1, tmp_path / "late") == tmp_path / "late"
    arriving.join()
    monkeypatch.setattr(checkpoints, "_VISIBLE_WITHIN_SECONDS", 0)
    with pytest.raises(FileNotFoundError, match=r"^rank 3 does not see .*/never, which rank 0 goes on from; put the f"):
        checkpoints.seen_by(3, tmp_path / "never")


def test_a_file_system_that_fails_for_a_moment_is_asked_again(monkeypatch):
    from nemo_dllm.collections.diffusion.training import checkpoints

    waits = []
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(sleep=waits.append, monotonic=time.monotonic))
    failures = [OSError("stale file handle")] * 2

    def read():
        if failures:
            raise failures.pop()
        return "found"

    assert checkpoints.patiently(read) == "found"
    assert waits == [1, 2]
    with pytest.raises(OSError, match="input/output error"):
        checkpoints.patiently(lambda: (_ for _ in ()).throw(OSError("input/output error")))
    assert waits == [1, 2, 1, 2, 4, 8]


def pieces_of_rank(rank):
    return lambda weights: [file.unlink() for file in weights.glob(f"__{rank}_*.distcp")]


def emptied(name):
    return lambda weights: (weights / name).write_bytes(b"")


DAMAGES = {
    "no metadata.json": lambda weights: (weights / "metadata.json").unlink(),
    "empty metadata.json": emptied("metadata.json"),
    "empty common.pt": emptied("common.pt"),
    "empty index": emptied(".metadata"),
    "index of something else": lambda weights: (weights / ".metadata").write_bytes(pickle.dumps({"a": 1})),
    "index cut at a byte": lambda weights: os.truncate(weights / ".metadata", 7),
    "common.pt with other bytes": lambda weights: flip(weights / "common.pt"),
    "a rank's files missing": pieces_of_rank(0),
    "a shard that lost its last byte": lambda weights: cut_one_byte(max(weights.glob("*.distcp"))),
    "context cut short": lambda weights: os.truncate(weights.parent / "context" / "io.json", 20),
    "marker of an unfinished save": lambda weights: marker_of(weights.parent).touch(),
}


def marker_of(checkpoint):
    return checkpoint.with_name(f"{checkpoint.name}-unfinished")


def flip(file):
    """Change a byte of the data that a zip archive has a checksum of."""
    archive = io.BytesIO(file.read_bytes())
    with archive.getbuffer() as view:
        middle = len(view) // 3
        view[middle] ^= 0xFF
    file.write_bytes(archive.getvalue())


def cut_one_byte(file):
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_a_broken_checkpoint_is_told_by(killed, damage):
    from nemo_dllm.collections.diffusion.training.checkpoints import damage_of, latest_checkpoint

    kept = checkpoints_of(killed)
    DAMAGES[damage](kept[24, True] / "weights")
    assert damage_of(kept[24, True]).startswith(("is damaged: ", "was not written to its end"))
    assert "\n" not in damage_of(kept[24, True])
    assert latest_checkpoint(killed / "mdlm_tiny" / "checkpoints") == kept[24, False]


@pytest.mark.parametrize(
    "point, start",
    [
        ("no file", 3),
        ("no index", 3),
        pytest.param("one file of several", 3, marks=pytest.mark.slow),
        pytest.param("no metadata.json", 3, marks=pytest.mark.slow),
        pytest.param("no context", 3, marks=pytest.mark.slow),
        ("marker", 3),
        ("removal", 6),
    ],
)
def test_a_kill_during_a_save(run_recipe, straight, tmp_path, point, start):
    """At the checkpoint of step 6, of which only the best and the last are kept; with the last one of step 3 behind."""
    run_recipe(tmp_path, exit_code=-9, signals={"killed_save": (6, point)})
    record = run_recipe(tmp_path)
    assert record["start"] == start
    later = {step: loss for step, loss in straight["losses"].items() if int(step) > start}
    assert record["losses"] == later
    if start == 3:
        assert record["console"].count("was not written to its end; it is not used") == 1
