import os
import socket
import subprocess
import sys

import pytest

from nemo_dllm.connectors.new_folder import refuse_existing, refuse_unfinished, replace_folder, unfinished_sibling


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


@pytest.mark.parametrize("target", ["folder", "file", "link", "broken link"])
def test_whatever_has_the_name_is_replaced(tmp_path, target):
    finished, out, elsewhere = tmp_path / "finished", tmp_path / "out", tmp_path / "elsewhere"
    for folder in (finished, elsewhere):
        folder.mkdir()
        (folder / folder.name).touch()
    make = {
        "folder": out.mkdir,
        "file": out.touch,
        "link": lambda: out.symlink_to(elsewhere),
        "broken link": lambda: out.symlink_to("/nowhere"),
    }
    make[target]()
    with pytest.raises(FileExistsError, match="out exists; choose another folder or pass overwrite=True"):
        refuse_existing(out, overwrite=False)
    refuse_existing(out, overwrite=True)
    replace_folder(finished, out)
    assert [file.name for file in out.iterdir()] == ["finished"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "out"]
    assert (elsewhere / "elsewhere").exists()


def test_what_is_read_is_not_overwritten(tmp_path):
    source = tmp_path / "models" / "source"
    source.mkdir(parents=True)
    (tmp_path / "link").symlink_to(source)
    for out in (source, source.parent, tmp_path / "link"):
        with pytest.raises(ValueError, match="cannot be replaced: .*source, which is read, is in it"):
            refuse_existing(out, True, reads=(source,))
    refuse_existing(source / "new", True, reads=(source,))
    (source / "inside").mkdir()
    refuse_existing(source / "inside", True, reads=(source,))
