import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

pytestmark = pytest.mark.nemo

FIRST, BEST, LAST = "m--val_loss=2.0000-step=1", "m--val_loss=-1.5000-step=2", "m--val_loss=1.7500-step=3-last"


@pytest.fixture(scope="module")
def locate_checkpoint():
    from nemo_dllm.collections.diffusion.inference import locate_checkpoint

    return locate_checkpoint


def write_checkpoint(folder, order=0):
    """What makes a NeMo checkpoint a complete one; ``order`` is when it was written."""
    (folder / "context").mkdir(parents=True)
    weights = folder / "weights"
    weights.mkdir()
    (weights / ".metadata").write_bytes(pickle.dumps(Metadata(state_dict_metadata={}, storage_data={})))
    (weights / "metadata.json").write_text("{}")
    torch.save({}, weights / "common.pt")
    os.utime(weights / ".metadata", (order, order))
    return folder


@pytest.fixture
def run_folder(tmp_path):
    """Three checkpoints; the last one was written last, the one before it has the lowest validation loss."""
    for order, name in enumerate((FIRST, BEST, LAST)):
        write_checkpoint(tmp_path / "run" / "checkpoints" / name, order)
    return tmp_path / "run"


def test_a_run_stands_for_its_latest_complete_checkpoint(locate_checkpoint, run_folder):
    checkpoints = run_folder / "checkpoints"
    assert locate_checkpoint(run_folder).path == checkpoints / LAST
    (checkpoints / LAST / "weights" / ".metadata").unlink()
    assert locate_checkpoint(run_folder).path == checkpoints / BEST


def test_best_is_the_lowest_validation_loss_among_complete_ones(locate_checkpoint, run_folder):
    checkpoints = run_folder / "checkpoints"
    assert locate_checkpoint(run_folder, best=True).path == checkpoints / BEST
    (checkpoints / BEST / "weights" / "common.pt").unlink()
    assert locate_checkpoint(run_folder, best=True).path == checkpoints / FIRST
    (checkpoints / FIRST / "weights" / "common.pt").unlink()
    with pytest.raises(FileNotFoundError, match="no complete checkpoint with a validation loss"):
        locate_checkpoint(run_folder, best=True)


def test_folders_by_what_they_hold(locate_checkpoint, run_folder, hf_folder):
    nemo = run_folder / "checkpoints" / FIRST
    assert locate_checkpoint(str(nemo))[0] == nemo
    assert locate_checkpoint(nemo).kind.value == "NeMo"
    assert locate_checkpoint(hf_folder).kind.value == "Hugging Face"


def test_errors_say_what_is_expected(locate_checkpoint, run_folder, hf_folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="absent does not exist; name the folder of a run"):
        locate_checkpoint(tmp_path / "absent")
    with pytest.raises(NotADirectoryError, match="config.json is a file; name the folder"):
        locate_checkpoint(hf_folder / "config.json")
    with pytest.raises(FileNotFoundError, match="holds no checkpoint.*`checkpoints`.*`weights`.*`config.json`"):
        locate_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="best=True chooses among the checkpoints of a run"):
        locate_checkpoint(hf_folder, best=True)
    cut_short = run_folder / "checkpoints" / LAST
    (cut_short / "weights" / ".metadata").unlink()
    with pytest.raises(ValueError, match="was not written to its end; take another checkpoint of its run"):
        locate_checkpoint(cut_short)
    (tmp_path / "young" / "checkpoints").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint; train on"):
        locate_checkpoint(tmp_path / "young")
