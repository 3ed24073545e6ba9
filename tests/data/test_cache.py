import pytest

from nemo_dllm.collections.diffusion.data.cache import cached_folder, content_key, write_folder


def test_key_depends_on_content_order_and_borders():
    keys = [content_key(parts) for parts in (["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"], ["ab", "c", ""])]
    assert len(set(keys)) == len(keys)
    assert content_key(["ab", "c"]) == content_key([b"ab", b"c"])


def test_written_once(tmp_path):
    calls = []

    def write(folder):
        calls.append(folder)
        (folder / "content").write_text("done")

    for _ in range(2):
        assert (cached_folder(tmp_path / "cache" / "key", write) / "content").read_text() == "done"
    assert len(calls) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["key"]


def test_failed_write_leaves_nothing_and_is_tried_again(tmp_path):
    def fail(folder):
        (folder / "content").write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        cached_folder(tmp_path / "key", fail)
    assert list(tmp_path.iterdir()) == []
    cached_folder(tmp_path / "key", lambda folder: (folder / "content").write_text("whole"))
    assert (tmp_path / "key" / "content").read_text() == "whole"


def test_loser_of_a_race_takes_the_winners_folder(tmp_path):
    def lose(folder):
        (folder / "content").write_text("second")
        write_folder(tmp_path / "key", lambda winner: (winner / "content").write_text("first"))

    assert (cached_folder(tmp_path / "key", lose) / "content").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_existing_folder_is_not_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "content").write_text("mine")
    with pytest.raises(FileExistsError, match=r"folder='.*mine' exists; choose another name, or delete it"):
        write_folder(tmp_path / "mine", lambda folder: (folder / "content").write_text("other"))
    assert (tmp_path / "mine" / "content").read_text() == "mine"
