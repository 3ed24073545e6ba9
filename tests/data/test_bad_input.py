"""Inputs as the world has them: each is refused, or its rows are, by file, row and reason."""

import errno
import gzip
import json
import os
import resource

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset
from pyarrow import parquet
from transformers import AutoTokenizer

from nemo_dllm.collections.diffusion.data.bad_rows import bad_row, check_bad_rows, describe_bad_rows
from nemo_dllm.collections.diffusion.data.cache import full_disk_named, write_folder
from nemo_dllm.collections.diffusion.data.chat_encoder import ChatEncoder
from nemo_dllm.collections.diffusion.data.chat_template import ChatTemplate
from nemo_dllm.collections.diffusion.data.documents import parts_of, records_of, rows_of
from nemo_dllm.collections.diffusion.data.preprocess_report import PreprocessReport
from nemo_dllm.collections.diffusion.data.sources import find_sources, repeated_sources
from nemo_dllm.collections.diffusion.data.supervised_tokens import encode_supervised
from nemo_dllm.collections.diffusion.data.tokenizer import byte_tokenizer

GOOD = b'{"text": "good"}\n'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path_factory.mktemp("tokenizer") / "byte"))


def rows_in(path, part_bytes=2**20):
    [source] = find_sources([path])
    return [row for part in parts_of(source, part_bytes) for row in rows_of(part, "text")]


LINES = {
    "UTF-16, of which each line is one": ('{"text": "x"}'.encode("utf-16"), "not UTF-8, byte 0xff at column 1"),
    "a number of more digits than Python reads": (b'{"n": ' + b"9" * 5000 + b"}", "broken JSON, a number with more"),
    "brackets without end": (b"[" * 100_000, "broken JSON, nested too deeply"),
    "NUL": (b'{"text": "a\x00b"}', "broken JSON, Invalid control character at at column 12"),
    "infinity": (b'{"text": 1e999}', "field 'text' is float, not text"),
    "not a number": (b"NaN", "a JSON float, not an object"),
    "two values": (b'{"text": "y"} {"text": "y"}', "broken JSON, Extra data at column 15"),
    "an encoded surrogate": (b'{"text": "\xed\xa0\x80"}', "not UTF-8, byte 0xed at column 11"),
}


@pytest.mark.parametrize("line, reason", LINES.values(), ids=LINES)
@pytest.mark.parametrize("first", [False, True])
def test_a_bad_line_among_good_ones(tmp_path, line, reason, first):
    lines = [line + b"\n", GOOD] if first else [GOOD, line + b"\r\n"]
    (tmp_path / "a.jsonl").write_bytes(b"".join([*lines, GOOD]))
    rows = rows_in(tmp_path / "a.jsonl")
    bad = 0 if first else 1
    assert rows[bad].number == bad + 1 and rows[bad].problem.startswith(reason)
    assert [row.text for row in rows if row.problem is None] == ["good"] * 2


def test_marks_inside_files_put_together(tmp_path):
    (tmp_path / "a.jsonl").write_bytes((b"\xef\xbb\xbf" + GOOD) * 3)
    assert [row.text for row in rows_in(tmp_path / "a.jsonl", 10)] == ["good"] * 3


def test_a_broken_array_is_told_once(tmp_path):
    (tmp_path / "a.json").write_text('[\n {"text": "a"},\n {"text": }\n]\n')
    with pytest.raises(ValueError, match=r"a.json:3: the array that the file is breaks, Expecting value at column 11;"):
        rows_in(tmp_path / "a.json")
    (tmp_path / "b.jsonl").write_text('[\n{"text": "a"}\n')
    assert [(row.number, row.text) for row in rows_in(tmp_path / "b.jsonl")] == [(1, None), (2, "a")]


def test_damaged_archives_name_their_file(tmp_path):
    for content in (gzip.compress(GOOD) + b"garbage", gzip.compress(GOOD * 999)[:-9], GOOD):
        (tmp_path / "a.jsonl.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"a.jsonl.gz: cannot be read as jsonl: .*; it is damaged, or something"):
            rows_in(tmp_path / "a.jsonl.gz")
    (tmp_path / "a.jsonl.zst").write_bytes(GOOD)
    with pytest.raises(ValueError, match=r"a.jsonl.zst: cannot be read as jsonl: ZSTD"):
        rows_in(tmp_path / "a.jsonl.zst")


def test_parquet_files(tmp_path):
    file = tmp_path / "a.parquet"
    # What is declared as text need not be.
    binary = pa.array([b"a", b"b\xff", None], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, binary.buffers())
    parquet.write_table(pa.table({"text": texts, "messages": [None, [{"role": "user", "content": "a"}], None]}), file)
    bad = "not UTF-8, byte 0xff at place 2 of a field"
    assert [(row.text, row.problem) for row in rows_in(file)] == [
        ("a", None),
        (None, bad),
        (None, "field 'text' is NoneType, not text"),
    ]
    records = list(records_of(*find_sources([file])))
    assert [record.problem for record in records] == [None, bad, None]
    assert records[0].fields == {"text": "a", "messages": None}
    parquet.write_table(pa.table({"text": [f"row {i}" * 50 for i in range(1000)]}), file, compression="snappy")
    content = bytearray(file.read_bytes())
    content[100:2000] = bytes(1900)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"a.parquet: cannot be read as parquet: "):
        rows_in(file)
    with pytest.raises(ValueError, match=r"a.parquet: cannot be read as parquet: "):
        list(records_of(*find_sources([file])))
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    parquet.write_table(twice, file)
    with pytest.raises(ValueError, match=r"a.parquet: has several columns of the name text; rename them"):
        rows_in(file)
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), file)
    assert rows_in(file) == []


@pytest.mark.parametrize("damage", ["cut", "lost", "state", "empty"])
def test_damaged_datasets_are_named(tmp_path, damage):
    Dataset.from_dict({"text": [] if damage == "empty" else ["a", "b"]}).save_to_disk(tmp_path / "saved")
    arrow = tmp_path / "saved" / "data-00000-of-00001.arrow"
    {
        "cut": lambda: os.truncate(arrow, 100),
        "lost": arrow.unlink,
        "state": lambda: (tmp_path / "saved" / "state.json").write_text("{}"),
        "empty": lambda: None,
    }[damage]()
    with pytest.raises(ValueError, match="saved' cannot be read as a dataset that `save_to_disk` wrote: .*; it is dam"):
        find_sources([tmp_path / "saved"])


def test_a_dataset_of_the_hub_is_named_as_a_model_is(monkeypatch):
    rows = Dataset.from_dict({"prompt": ["a", "b"], "completion": ["c", "d"]})
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: asked.append((name, split)) or rows)
    [source] = find_sources(["hf://owner/chats"], split="test")
    assert source[:2] == ("owner/chats", "dataset") and asked == [("owner/chats", "test")]
    assert [record.fields for record in records_of(source)] == list(rows)
    with pytest.raises(FileNotFoundError, match="'owner/chats' does not exist; name a file or folder, or hf://NAME"):
        find_sources(["owner/chats"])


@pytest.mark.parametrize("name, format", [("no/where", "dataset"), ("hf://no/where", None)])
def test_a_dataset_that_cannot_be_had(monkeypatch, name, format):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        FileNotFoundError, match=r"the dataset 'no/where' is no folder, and could not be had .* \(.+\)$"
    ):
        find_sources([name], format=format)


def test_values_that_python_does_not_have(tmp_path):
    """A date of the year 150,000 costs its own row only."""
    dates = pa.array([0, 2**62], pa.timestamp("us"))
    parquet.write_table(pa.table({"text": ["a", "b"], "date": dates}), tmp_path / "a.parquet")
    assert [row.text for row in rows_in(tmp_path / "a.parquet")] == ["a", "b"]
    problems = [record.problem for record in records_of(*find_sources([tmp_path / "a.parquet"]))]
    assert problems == [None, "a value cannot be read, date value out of range"]


@pytest.mark.parametrize("write", [parquet.write_table, lambda table, file: Dataset(table).save_to_disk(file)])
def test_columns_make_no_fields_of_nulls(tmp_path, write):
    """Each object of a column has the fields of all; a template would show those that a row does not have."""
    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "find", "arguments": {"text": "b"}}]
    rows = [{"messages": [{"role": "assistant", "tool_calls": [call]}], "id": None} for call in calls]
    write(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [record.fields for record in records_of(*find_sources([tmp_path / "a.parquet"]))] == rows


def test_links_pipes_and_inputs_named_twice(tmp_path):
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "a.jsonl"
    file.write_bytes(GOOD)
    (tmp_path / "data" / "loop").symlink_to(tmp_path / "data")
    # As an editor leaves beside a file that is open.
    (tmp_path / "data" / ".#a.jsonl").symlink_to("user@host.1")
    assert [source.name for source in find_sources([tmp_path / "data"])] == [str(file)]
    again = str(tmp_path / "data" / "loop" / "a.jsonl")
    sources = find_sources([tmp_path / "data", again])
    assert repeated_sources(sources) == [again]
    assert f"1 files are in it more than once, the first: {again}" in PreprocessReport.of(sources, [], 0.0).summary()
    with pytest.raises(ValueError, match="there is no input"):
        find_sources([])
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match=r"pipe.jsonl' is a pipe or a device"):
        find_sources([tmp_path / "pipe.jsonl"])
    for target in (tmp_path / "nowhere", tmp_path / "data" / "b.jsonl"):
        (tmp_path / "data" / "b.jsonl").unlink(missing_ok=True)
        (tmp_path / "data" / "b.jsonl").symlink_to(target)
        with pytest.raises(FileNotFoundError, match=r"b.jsonl' is a link to nothing; mend or delete it"):
            find_sources([tmp_path / "data"])


MESSAGES = [
    ({"messages": "hi"}, "field messages is str, not a list of messages"),
    ({"messages": []}, "there is no turn of the assistant"),
    ({"messages": [{"role": ["a"], "content": "x"}]}, "turn 0 has the role ['a']; known: system"),
    ({"messages": [1]}, "turn 0 is int, not a message"),
    ({"prompt": "a", "completion": ["x"]}, "turn 1 is str, not a message"),
    ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "turn 0 has content other than text"),
    ({"messages": [{"role": "assistant", "content": {"a": 1}}]}, "turn 0 has content of type dict, not text"),
    ({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "user", "content": "b"}]}, "there is no"),
    ({"x" * 10_000: 1}, "there are no fields messages"),
    ({"messages": [{"role": "assistant", "content": "b"}], "tools": 3}, "field tools is not a list of JSON schemas"),
    ({"messages": [{"role": "assistant", "content": "b", "index": "x"}]}, "the chat template fails: "),
]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t }}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}|"
    "{{ 1 // (m.index or 1) }}{% endfor %}"
)


def test_rows_of_all_shapes_in_one_file(tmp_path, tokenizer):
    good = [{"prompt": "a", "completion": "b"}, {"conversations": [{"from": "gpt", "value": "b"}]}]
    rows = [good[0], *(row for row, _ in MESSAGES), good[1]]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    encoder = ChatEncoder(tokenizer, ChatTemplate(tokenizer, TEMPLATE))
    corpus = encode_supervised(find_sources([tmp_path / "a.jsonl"]), encoder)
    assert corpus.samples.rows[:, 1].tolist() == [1, len(rows)]
    assert [row.row for row in corpus.bad_rows] == list(range(2, len(rows)))
    for row, (_, reason) in zip(corpus.bad_rows, MESSAGES, strict=True):
        assert row.reason.startswith(reason) and len(row.reason) <= 401 and "\n" not in row.reason


def test_a_template_that_is_not_jinja(tokenizer):
    with pytest.raises(ValueError, match="the chat template is not Jinja: .* in line 2"):
        ChatTemplate(tokenizer, "{% for m in messages %}\n{{ m.content }")


def test_kinds_are_counted_and_what_is_not_shown_too():
    rows = [bad_row("a", line, f"turn {line} has the role 'r{line}'; known: x") for line in range(1, 31)]
    rows += [bad_row("b", line, f"{'abcdefg'[line]} is wrong, more") for line in range(7)]
    assert describe_bad_rows(rows).splitlines() == [
        "  30 x turn 1 has the role 'r1'; known: x, the first: a:1: turn 1 has the role 'r1'; known: x",
        *(f"  1 x {'abcd'[i]} is wrong, the first: b:{i}: {'abcd'[i]} is wrong, more" for i in range(4)),
        "  and 3 of 3 more kinds, the first: b:4: e is wrong, more",
    ]
    with pytest.raises(ValueError, match=r"(?s)^37 rows cannot be used, more than max_bad_rows=36; .*30 x turn 1 has"):
        check_bad_rows(rows, 36)
    check_bad_rows(rows, 37)


@pytest.mark.parametrize(
    "write", [lambda file: file.write_bytes(bytes(9000)), lambda file: np.save(file, np.ones(9000))]
)
def test_a_full_disk(tmp_path, write):
    """As far as a process can have one: files may have 4 kB."""
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, kept[1]))
    try:
        with pytest.raises(OSError, match=f"while writing in '{tmp_path}': make room there"):
            write_folder(tmp_path / "folder", lambda folder: write(folder / "file.npy"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert list(tmp_path.iterdir()) == []


def test_other_errors_of_files_are_left_alone(tmp_path):
    with pytest.raises(FileNotFoundError), full_disk_named(tmp_path):
        raise FileNotFoundError(errno.ENOENT, "nothing", "file")
    with pytest.raises(OSError, match="Input/output error"), full_disk_named(tmp_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    with pytest.raises(OSError, match="^no tokenizer in that folder$"), full_disk_named(tmp_path):
        raise OSError("no tokenizer in that folder")
