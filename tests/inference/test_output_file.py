"""Files of results: what is under which name, before, at and after the end."""

import os

import pytest

pytestmark = pytest.mark.nemo


@pytest.fixture(scope="module")
def output_file():
    from nemo_dllm.collections.diffusion.inference import output_file

    return output_file


def test_a_file_appears_whole(output_file, tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("old")
    with output_file.whole_file(path) as file:
        print("é", file=file, flush=True)
        assert path.read_text() == "old"
    assert path.read_text(encoding="utf-8") == "é\n" and os.listdir(tmp_path) == ["out.jsonl"]


def test_a_link_stays_one(output_file, tmp_path):
    (tmp_path / "link").symlink_to("out.jsonl")
    with output_file.whole_file(tmp_path / "link") as file:
        file.write("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "out.jsonl").read_text() == "new"


def test_what_an_interruption_leaves(output_file, tmp_path, capsys):
    path = tmp_path / "out.jsonl"
    path.write_text("old")
    for written, left in (("", ["out.jsonl"]), ("a line\n", ["out.jsonl", "out.jsonl.unfinished"])):
        with pytest.raises(KeyboardInterrupt), output_file.whole_file(path) as file:
            file.write(written)
            raise KeyboardInterrupt
        assert path.read_text() == "old" and sorted(os.listdir(tmp_path)) == left
    assert (tmp_path / "out.jsonl.unfinished").read_text() == "a line\n"
    assert capsys.readouterr().err == f"note: what was written until then is in {tmp_path / left[1]}\n"


def test_a_file_that_cannot_be_opened_is_told_as_such(output_file, tmp_path):
    with (
        pytest.raises(FileNotFoundError, match="out.jsonl.unfinished"),
        output_file.whole_file(tmp_path / "x/out.jsonl"),
    ):
        pass


def test_a_device_is_written_as_it_comes(output_file, tmp_path):
    output_file.check_can_write(os.devnull)
    with output_file.whole_file(os.devnull) as file:
        file.write("text")


@pytest.mark.parametrize(
    "name, error, message",
    [
        ("absent/out.jsonl", FileNotFoundError, "output=.*absent/out.jsonl is in a folder that does not exist"),
        (".", IsADirectoryError, "output=.* is a folder; name a file"),
        ("/proc/out.jsonl", PermissionError, "output=/proc/out.jsonl cannot be written .*; name another file"),
    ],
)
def test_what_cannot_be_written_is_told_before(output_file, tmp_path, name, error, message):
    with pytest.raises(error, match=message):
        output_file.check_can_write(tmp_path / name)
    output_file.check_can_write(tmp_path / "out.jsonl")
    assert os.listdir(tmp_path) == []
