"""Which files an input stands for."""

import pytest

from nemo_dllm.collections.diffusion.data.sources import find_sources


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


def test_inputs_keep_their_order_and_a_format_wins(folder):
    files = [folder / "b.jsonl", folder / "README.md", folder / "notes.xyz"]
    assert [source.format for source in find_sources(files[:2])] == ["jsonl", "text"]
    assert [source.format for source in find_sources(files, format="lines")] == ["lines"] * 3
    assert [source.name for source in find_sources(files[::-1], format="lines")] == [str(file) for file in files[::-1]]
