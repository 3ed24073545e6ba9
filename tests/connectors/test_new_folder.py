import os
import socket
import subprocess
import sys

import pytest

from nemo_dllm.connectors.new_folder import refuse_unfinished, replace_folder, unfinished_sibling


@pytest.fixture
def dead():
    """Id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_replaces_without_a_predecessor(tmp_path):
    (tmp_path / "new").mkdir()
    replace_folder(tmp_path / "new", tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def left_of(folder, process, kind="unfinished", host=None):
    left = folder.with_name(f".{folder.name}.{kind}-{host or socket.gethostname()}-{process}")
    (left / "weights").mkdir(parents=True)
    return left


def test_removes_what_dead_processes_left_for_the_same_folder(tmp_path, dead):
    out = tmp_path / "out.v1"
    stay = [
        left_of(out, os.getppid()),
        left_of(out, dead, host="another-machine"),
        left_of(tmp_path / "other", dead),
        left_of(tmp_path / "x.out.v1", dead),
        left_of(out, dead, kind="old"),
    ]
    left_of(out, dead)
    # The id of this process, which another one had before: in containers the same ids come back.
    again = left_of(out, os.getpid())
    assert unfinished_sibling(out) == again
    assert sorted(tmp_path.iterdir()) == sorted(stay)


def test_an_old_folder_goes_once_it_has_a_successor(tmp_path, dead):
    out = tmp_path / "out"
    left = left_of(out, dead, kind="old")
    unfinished_sibling(out)
    assert left.exists()
    out.mkdir()
    unfinished_sibling(out)
    assert not left.exists()


def test_unfinished_folders_are_no_checkpoints(tmp_path):
    refuse_unfinished(tmp_path)
    with pytest.raises(ValueError, match="is a conversion that did not end; convert again, which removes it"):
        refuse_unfinished(left_of(tmp_path / "out", 1))


def test_an_overwrite_that_fails_leaves_what_was_there(tmp_path):
    folder, finished = tmp_path / "model", tmp_path / "finished"
    folder.mkdir()
    (folder / "old").touch()
    with pytest.raises(FileNotFoundError):
        replace_folder(finished, folder)
    assert (folder / "old").exists()
