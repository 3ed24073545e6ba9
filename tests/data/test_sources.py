"""Which files an input stands for."""

import gzip
from pathlib import Path

import pytest

from nemo_dllm.collections.diffusion.data.documents import first_fields, read_text_rows, records_of
from nemo_dllm.collections.diffusion.data.sources import find_sources, has_fields
from nemo_dllm.collections.diffusion.data.text import read_text


@pytest.fixture
def folder(tmp_path):
    for name in (
        "b.jsonl",
        "data/a.parquet",
        "README.md",
        "dataset_info.json",
        ".hidden/c.jsonl",
        "notes.xyz",
        "d.json.gz",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("12345")
    return tmp_path


def names(folder, **options):
    return [
        (str(source.name).removeprefix(f"{folder}/"), source.format) for source in find_sources([folder], **options)
    ]


def test_a_folder_as_the_hub_has_it(folder):
    assert names(folder) == [("b.jsonl", "jsonl"), ("d.json.gz", "jsonl"), ("data/a.parquet", "parquet")]
    assert names(folder, format="parquet") == [("data/a.parquet", "parquet")]
    assert names(folder, format="text") == [("README.md", "text")]
    for name in ("b.jsonl", "d.json.gz", "data/a.parquet"):
        (folder / name).unlink()
    assert names(folder) == [("README.md", "text")]
    assert find_sources([folder])[0].size == 5


def test_rows_with_fields_and_texts_are_told_by_names(folder):
    told = {file.name: has_fields(file) for file in folder.rglob("*") if file.is_file()}
    assert {name for name, rows in told.items() if rows} == {
        "b.jsonl",
        "a.parquet",
        "c.jsonl",
        "d.json.gz",
        "dataset_info.json",
    }
    assert has_fields("hf://owner/name") and not has_fields("owner/name")
    assert has_fields(folder)
    (folder / "b.jsonl").unlink()
    assert has_fields(folder)
    (folder / "data" / "a.parquet").unlink()
    # What is left in it is hidden, or may be the settings of a program.
    assert not has_fields(folder)
    (folder / "state.json").touch()
    assert has_fields(folder)


def test_texts_of_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text('not json\n{"text": "one"}\n\n{"text": ""}\n{"text": "two"}\n{"body": 1}\n')
    sources = find_sources([tmp_path])
    assert first_fields(sources) == {"text": "one"}
    found = read_text_rows(sources, max_bad_rows=2)
    assert found.texts == ["one", "two"] and [row.row for row in found.bad_rows] == [1, 6]
    assert read_text_rows(sources, max_bad_rows=1, max_texts=2).texts == ["one", "two"]
    with pytest.raises(ValueError, match=r"(?s)^2 rows cannot be used.*a.jsonl:6: no field 'text', only 'body'"):
        read_text_rows(sources, max_bad_rows=1)
    with pytest.raises(ValueError, match="max_bad_rows=-1 must be at least 0"):
        read_text_rows(sources, max_bad_rows=-1)
    (tmp_path / "a.jsonl").write_text("")
    assert first_fields(sources) == {}


def test_inputs_keep_their_order_and_a_format_wins(folder):
    files = [folder / "b.jsonl", folder / "README.md", folder / "notes.xyz"]
    assert [source.format for source in find_sources(files[:2])] == ["jsonl", "text"]
    assert [source.format for source in find_sources(files, format="lines")] == ["lines"] * 3
    assert [source.name for source in find_sources(files[::-1], format="lines")] == [str(file) for file in files[::-1]]


def test_names_in_capitals_and_patterns(tmp_path):
    for name in ("b.JSONL", "a.Jsonl.GZ", "c.txt", ".d.jsonl"):
        (tmp_path / name).write_text("1")
    assert names(tmp_path) == [("a.Jsonl.GZ", "jsonl"), ("b.JSONL", "jsonl")]
    assert [Path(source.name).name for source in find_sources([tmp_path / "*.?son*"])] == ["a.Jsonl.GZ"]
    assert [Path(source.name).name for source in find_sources([tmp_path / "[bc].*"])] == ["b.JSONL", "c.txt"]
    with pytest.raises(FileNotFoundError, match=r"/\*.parquet' matches no file"):
        find_sources([tmp_path / "*.parquet"])
    (tmp_path / "a[1].jsonl").write_text("1")
    assert len(find_sources([tmp_path / "a[1].jsonl"])) == 1


def test_nothing_is_not_the_folder_that_one_is_in():
    with pytest.raises(ValueError, match="an input has an empty name"):
        find_sources([""])


def test_compressed_in_capitals(tmp_path):
    (tmp_path / "a.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "a"}'))
    assert [record.fields for record in records_of(*find_sources([tmp_path / "a.JSONL.GZ"]))] == [{"text": "a"}]


def test_folders_behind_links_are_read_once(tmp_path):
    inside, outside = tmp_path / "data" / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir(parents=True)
        (folder / "a.jsonl").write_text("1")
    (tmp_path / "data" / "link").symlink_to(outside)
    (tmp_path / "data" / "zero").symlink_to(inside)
    (outside / "loop").symlink_to(tmp_path / "data")
    assert names(tmp_path / "data") == [("inside/a.jsonl", "jsonl"), ("link/a.jsonl", "jsonl")]
    (outside / "a.jsonl").write_text("other")
    documents = read_text(tmp_path / "data").documents
    assert [document.name for document in documents] == ["inside/a.jsonl", "link/a.jsonl"]
