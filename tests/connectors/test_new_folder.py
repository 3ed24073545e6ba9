import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_dllm.connectors.new_folder import (
    name_full_disk,
    place_folder,
    refuse_existing,
    refuse_unfinished,
    unfinished_sibling,
)


@pytest.fixture
def dead():
    """Id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_replaces_without_a_predecessor(tmp_path):
    (tmp_path / "new").mkdir()
    place_folder(tmp_path / "new", tmp_path / "out", overwrite=False)
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
    # Of a process that was killed between its two renames.
    shutil.rmtree(out)
    left_of(out, dead, kind="old")
    finished = unfinished_sibling(out)
    finished.mkdir()
    place_folder(finished, out, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_unfinished_folders_are_no_checkpoints(tmp_path):
    refuse_unfinished(tmp_path)
    with pytest.raises(ValueError, match="is a conversion that did not end; convert again, which removes it"):
        refuse_unfinished(left_of(tmp_path / "out", 1))


def test_an_overwrite_that_fails_leaves_what_was_there(tmp_path):
    folder, finished = tmp_path / "model", tmp_path / "finished"
    folder.mkdir()
    (folder / "old").touch()
    with pytest.raises(FileNotFoundError):
        place_folder(finished, folder, overwrite=True)
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
    place_folder(finished, out, overwrite=True)
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


@pytest.mark.parametrize("meanwhile", ["folder", "file", "link"])
def test_what_another_process_has_made_meanwhile_stays(tmp_path, meanwhile):
    finished, out, elsewhere = tmp_path / "finished", tmp_path / "out", tmp_path / "elsewhere"
    for folder in (finished, elsewhere):
        folder.mkdir()
        (folder / folder.name).touch()
    refuse_existing(out, overwrite=False)
    make = {
        "folder": lambda: shutil.copytree(elsewhere, out),
        "file": out.touch,
        "link": lambda: out.symlink_to(elsewhere),
    }
    make[meanwhile]()
    before = sorted(path.name for path in tmp_path.rglob("*") if "finished" not in path.parts)
    with pytest.raises(FileExistsError, match="out has been made by another process meanwhile; use it, or choose"):
        place_folder(finished, out, overwrite=False)
    assert not finished.exists()
    assert sorted(path.name for path in tmp_path.rglob("*")) == [name for name in before if name != "finished"]


def test_processes_that_replace_the_same_folder_at_the_same_time(tmp_path):
    out = tmp_path / "out"
    children = []
    for child in range(3):
        pid = os.fork()
        if pid == 0:
            try:
                for number in range(100):
                    finished = tmp_path / f"finished-{child}"
                    finished.mkdir()
                    (finished / f"{child}-{number}").touch()
                    place_folder(finished, out, overwrite=True)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and len(list(out.iterdir())) == 1


@pytest.mark.parametrize("out", [".", "..", "absent/.."])
def test_a_folder_needs_a_name(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is no name that a folder can be made under; name it"):
        refuse_existing(Path(out), overwrite=True)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_made_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refuse_existing(tmp_path / "new" / "deeper" / "out", overwrite=False)
    for out, kind, reason in (
        (tmp_path / "file" / "out", NotADirectoryError, "Not a directory: .*file"),
        (tmp_path / "loop" / "out", OSError, "Too many levels of symbolic links"),
        (tmp_path / ("n" * 254), OSError, "File name too long"),
        (Path("/proc/out"), OSError, "No such file or directory: /proc"),
    ):
        with pytest.raises(kind, match=f"(out|nnn) cannot be made .{reason}.*; choose another folder"):
            refuse_existing(out, overwrite=False)
    with pytest.raises(ValueError, match="/proc cannot be replaced: it is a mount point; name a folder in it"):
        refuse_existing(Path("/proc"), overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]


def test_a_full_disk_is_named_when_a_tree_is_copied(tmp_path):
    (tmp_path / "tree").mkdir()
    for name in "ab":
        (tmp_path / "tree" / name).write_bytes(bytes(2000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(shutil.Error) as failed:
            shutil.copytree(tmp_path / "tree", tmp_path / "copy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(OSError, match=r"out could not be written; is the disk full\? \(\[Errno 27\]") as named:
        name_full_disk(failed.value, tmp_path / "out")
    assert named.value.errno == errno.EFBIG and str(named.value).count("copy") == 1
    assert name_full_disk(shutil.Error([("a", "b", "[Errno 13] Permission denied: 'a'")]), tmp_path) is None
    assert name_full_disk(OSError(errno.EIO, "unreadable"), tmp_path) is None
