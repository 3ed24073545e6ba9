"""Texts to .bin and .idx through real worker processes; read back with Megatron's own reader."""

import gzip
import json
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from nemo_dllm.collections.diffusion.data import preprocess as preprocess_module
from nemo_dllm.collections.diffusion.data.indexed import check_corpus
from nemo_dllm.collections.diffusion.data.preprocess import preprocess
from nemo_dllm.collections.diffusion.data.tokenizer import byte_tokenizer

EOS = 256
TEXTS = [f"document {i}, né 😀 <|endoftext|>" + "x" * (i % 7) for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer") / "byte")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(preprocess_module, "_MIN_PART_BYTES", 500)
    monkeypatch.setattr(preprocess_module, "_MAX_PART_BYTES", 500)


def write_jsonl(file, rows):
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return file


def documents(prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [np.array(dataset[i]) for i in range(len(dataset))]


def texts_of(prefix):
    found = documents(prefix)
    assert all(document[-1] == EOS and EOS not in document[:-1] for document in found)
    return [bytes(document[:-1].astype(np.uint8)).decode() for document in found]


def files_of(prefix):
    return [prefix.with_suffix(suffix).read_bytes() for suffix in (".bin", ".idx")]


@pytest.fixture
def corpus(tmp_path):
    import datasets

    rows = [{"text": text} for text in TEXTS]
    plain = write_jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.jsonl.gz").write_bytes(
        gzip.compress(plain.read_bytes()[:1000]) + gzip.compress(plain.read_bytes()[1000:])
    )
    with pa.output_stream(str(tmp_path / "c.jsonl.zst"), compression="zstd") as file:
        file.write(plain.read_bytes())
    parquet.write_table(pa.table({"text": TEXTS, "id": range(60)}), tmp_path / "d.parquet", row_group_size=7)
    (tmp_path / "e.log").write_text("\n\n" + "\r\n".join(TEXTS))
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "f"))
    datasets.DatasetDict(test=datasets.Dataset.from_list(rows)).save_to_disk(str(tmp_path / "g"))
    (tmp_path / "i.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "h").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "h" / f"{i:02}.txt").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "name, options",
    [
        ("a.jsonl", {"workers": 3}),
        ("b.jsonl.gz", {}),
        ("c.jsonl.zst", {}),
        ("d.parquet", {"workers": 2}),
        ("e.log", {"format": "lines"}),
        ("f", {}),
        ("g", {"split": "test"}),
        ("h", {}),
        ("i.json", {"workers": 2}),
    ],
)
def test_every_format_and_number_of_workers_give_the_same_bytes(corpus, tokenizer, name, options):
    report = preprocess(corpus / name, corpus / "out" / "x", tokenizer, **{"workers": 1, **options})
    assert texts_of(corpus / "out" / "x") == TEXTS
    assert (report.documents, report.bad_rows) == (60, [])
    assert report.tokens == sum(len(text.encode()) + 1 for text in TEXTS)
    assert report.characters == sum(map(len, TEXTS))
    assert sorted(file.name for file in (corpus / "out").iterdir()) == ["x.bin", "x.idx", "x.report.json"]
    expected = np.concatenate([[*text.encode(), EOS] for text in TEXTS]).astype(np.uint16).tobytes()
    assert (corpus / "out" / "x.bin").read_bytes() == expected


def test_text_field_begin_token_and_large_vocabulary(tmp_path, tokenizer):
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    loaded.add_tokens([f"<{i}>" for i in range(70_000)])
    loaded.bos_token = "<69999>"
    file = write_jsonl(tmp_path / "a.jsonl", [{"body": "ab"}, {"body": "c"}])
    preprocess(file, tmp_path / "x", loaded, text_field="body", prepend_bos=True, append_eos=False, workers=1)
    found = documents(tmp_path / "x")
    assert found[0].dtype == np.int32
    assert [document.tolist() for document in found] == [[loaded.bos_token_id, 97, 98], [loaded.bos_token_id, 99]]


def test_ids_with_holes_and_an_output_named_by_its_file(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 70_000, "</s>": 3}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "b"}])
    preprocess(file, tmp_path / "x.bin", tokenizer, workers=1)
    assert [document.tolist() for document in documents(tmp_path / "x")] == [[70_000, 3]]
    assert check_corpus(tmp_path / "x", tokenizer).endswith("all ids below 70001")


def test_an_output_inside_of_its_input(tmp_path, tokenizer):
    """Neither kept parts nor the report are read as texts."""
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": 3}, {"text": "b"}])
    with pytest.raises(ValueError, match="1 rows cannot be used"):
        preprocess(tmp_path, tmp_path / "x", tokenizer, max_bad_rows=0, workers=1)
    assert list(tmp_path.glob("x.parts/*/report.json"))
    for overwrite in (False, True):
        report = preprocess(tmp_path, tmp_path / "x", tokenizer, workers=1, overwrite=overwrite)
        assert (report.documents, len(report.bad_rows)) == (2, 1)
    # A file that only has such a name is an input.
    write_jsonl(tmp_path / "weather.report.json", [{"text": "c"}])
    assert preprocess(tmp_path, tmp_path / "y", tokenizer, workers=1).documents == 3


BAD_ROWS = [
    ('{"text": "good"}\n', None),
    ('{"text": "cut\n', "broken JSON, Invalid control character at|broken JSON, Unterminated string"),
    ("\n", None),
    ('{"content": "x", "id": 3}\n', "no field 'text', only 'content', 'id'"),
    ('{"text": 3}\n', "field 'text' is int, not text"),
    ('{"text": null}\n', "field 'text' is NoneType, not text"),
    ("[1]\n", "a JSON list, not an object"),
    (
        '{"text": "\\ud800"}\n',
        "field 'text' has half of a surrogate pair at character 1, which is no text; take it out",
    ),
    ('{"text": ""}\n', None),
    ('{"text": "last"}', None),
]


def test_bad_rows_are_left_out_with_line_and_reason(tmp_path, tokenizer):
    first = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * 90}] * 20)
    second = write_jsonl(tmp_path / "b.jsonl", [row for row, _ in BAD_ROWS])
    second.write_bytes(b"\xef\xbb\xbf" + second.read_bytes())
    third = tmp_path / "c.jsonl"
    third.write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')
    (tmp_path / "d.jsonl").touch()
    (tmp_path / "e.jsonl.gz").touch()
    report = preprocess([first, second, third, *sorted(tmp_path.glob("[de].*"))], tmp_path / "x", tokenizer, workers=2)
    assert texts_of(tmp_path / "x") == ["x" * 90] * 20 + ["good", "last", "fine"]
    assert (report.documents, report.empty) == (23, 1)
    assert report.empty_files == [str(tmp_path / "d.jsonl"), str(tmp_path / "e.jsonl.gz")]
    expected = [(line, reason) for line, (_, reason) in enumerate(BAD_ROWS, start=1) if reason]
    found = [(row.row, row.reason) for row in report.bad_rows if row.source == str(second)]
    assert [line for line, _ in found] == [line for line, _ in expected]
    assert all(
        any(r in reason for r in wanted.split("|")) for (_, reason), (_, wanted) in zip(found, expected, strict=True)
    )
    assert str(report.bad_rows[-1]) == f"{third}:2: not UTF-8, byte 0xff at column 11"
    assert json.loads((tmp_path / "x.report.json").read_text())["bad_rows"][-1][:2] == [str(third), 2]
    assert f"1 x broken JSON, the first: {second}:2:" in report.summary()


def test_rows_of_an_array_are_its_elements(tmp_path, tokenizer):
    (tmp_path / "a.json").write_text('\n [{"text": "a"},\n {"text": 3}, 4,\n {"text": "b"}]\n')
    report = preprocess(tmp_path / "a.json", tmp_path / "x", tokenizer, workers=1)
    assert texts_of(tmp_path / "x") == ["a", "b"]
    assert [(row.row, row.reason) for row in report.bad_rows] == [
        (2, "field 'text' is int, not text"),
        (3, "a JSON int, not an object"),
    ]
    (tmp_path / "b.jsonl").write_text('[1]\n{"text": "a"}\n')
    report = preprocess(tmp_path / "b.jsonl", tmp_path / "y", tokenizer, workers=1)
    assert [(row.row, row.reason) for row in report.bad_rows] == [(1, "a JSON list, not an object")]


def test_binary_and_not_utf8_text_files(tmp_path, tokenizer):
    for name, content in {"a": b"good", "b": b"\x00", "c": b"g\xfc"}.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    report = preprocess(tmp_path, tmp_path / "out" / "x", tokenizer, workers=1)
    assert texts_of(tmp_path / "out" / "x") == ["good"]
    assert [row.reason for row in report.bad_rows] == ["binary, it has NUL bytes", "not UTF-8, byte 0xfc at column 2"]


def test_nulls_in_parquet(tmp_path, tokenizer):
    parquet.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet", row_group_size=1)
    report = preprocess(tmp_path / "a.parquet", tmp_path / "x", tokenizer, workers=1)
    assert [tuple(row)[1:] for row in report.bad_rows] == [(2, "field 'text' is NoneType, not text")]


def test_a_file_that_breaks_in_a_worker_is_told_in_one_line(tmp_path, tokenizer):
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": [f"row {i}" * 50 for i in range(100)]}), file, compression="snappy")
    content = bytearray(file.read_bytes())
    content[100:500] = bytes(400)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"a.parquet: cannot be read as parquet: .*; it is damaged") as caught:
        preprocess(file, tmp_path / "x", tokenizer, workers=1)
    assert caught.traceback[-1].path.name == "preprocess.py" and caught.value.__cause__ is None


def test_too_many_bad_rows_stop_and_a_higher_limit_goes_on(tmp_path, tokenizer):
    rows = [{"text": f"{i:0100}"} for i in range(20)]
    file = write_jsonl(tmp_path / "a.jsonl", [*rows, "{\n", "[\n", *rows])
    with pytest.raises(
        ValueError, match=r"(?s)2 rows cannot be used, more than max_bad_rows=1.*a.jsonl:21: broken JSON"
    ):
        preprocess(file, tmp_path / "x", tokenizer, workers=1, max_bad_rows=1)
    assert not (tmp_path / "x.idx").exists() and not (tmp_path / "x.bin").exists()
    # What is there is not made again: a mark in the first part is found in the output.
    first = tmp_path / "x.parts" / "00000000" / "tokens.bin"
    first.write_bytes(bytes(len(first.read_bytes())))
    shutil.rmtree(tmp_path / "x.parts" / "00000001")
    preprocess(file, tmp_path / "x", tokenizer, workers=1, max_bad_rows=2)
    found = documents(tmp_path / "x")
    num_marked = sum(not document.any() for document in found)
    assert 0 < num_marked < 6
    assert [int(bytes(d[:-1].astype(np.uint8))) for d in found[num_marked:]] == [*range(20), *range(20)][num_marked:]


def test_parts_of_other_settings_are_refused(tmp_path, tokenizer):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, "{\n"])
    with pytest.raises(ValueError, match="1 rows cannot be used"):
        preprocess(file, tmp_path / "x", tokenizer, workers=1, max_bad_rows=0)
    with pytest.raises(ValueError, match="parts of a run with other append_eos; delete the folder"):
        preprocess(file, tmp_path / "x", tokenizer, workers=1, append_eos=False)
    write_jsonl(file, [{"text": "b"}])
    with pytest.raises(ValueError, match="other inputs;"):
        preprocess(file, tmp_path / "x", tokenizer, workers=1)


def test_errors_before_any_work(tmp_path, tokenizer):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    for name, columns in {"b.parquet": ["text"], "c.parquet": ["body", "id"]}.items():
        parquet.write_table(pa.table({column: ["a"] for column in columns}), tmp_path / name)
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "e.xyz").touch()
    cases = {
        "workers=0 must be at least 1": ([file], {"workers": 0}),
        r"text_field='text' is not a column of 1 inputs: .*c.parquet has body, id": (tmp_path.glob("[bc].*"), {}),
        r"d.parquet: cannot be read as parquet": ([tmp_path / "d.parquet"], {}),
        r"format='csv' is unknown; known: jsonl, parquet": ([file], {"format": "csv"}),
        r"e.xyz': the format does not follow from the name": ([tmp_path / "e.xyz"], {}),
        r"the tokenizer has no bos_token; set one, or pass prepend_bos=False": ([file], {"prepend_bos": True}),
    }
    for message, (inputs, options) in cases.items():
        with pytest.raises(ValueError, match=message):
            preprocess(sorted(inputs), tmp_path / "x", tokenizer, **options)
    with pytest.raises(FileNotFoundError, match="nowhere' does not exist"):
        preprocess(tmp_path / "nowhere", tmp_path / "x", tokenizer)
    with pytest.raises(FileNotFoundError, match="holds no files of lines format"):
        preprocess(tmp_path, tmp_path / "x", tokenizer, format="lines")
    (tmp_path / "y.idx").touch()
    with pytest.raises(FileExistsError, match=r"y.idx' exists; choose another output_prefix, or pass overwrite=True"):
        preprocess(file, tmp_path / "y", tokenizer)
    preprocess(file, tmp_path / "y", tokenizer, workers=1, overwrite=True)
    assert texts_of(tmp_path / "y") == ["a"]


def test_nothing_to_encode_and_a_cut_archive(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="1 inputs hold no document: 0 documents"):
        preprocess(write_jsonl(tmp_path / "a.jsonl", ["\n"]), tmp_path / "x", tokenizer, workers=1)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": "a"}).encode() * 99)[:-20])
    with pytest.raises(ValueError, match=r"b.jsonl.gz: cannot be read as jsonl: .*[Tt]runcated"):
        preprocess(tmp_path / "b.jsonl.gz", tmp_path / "y", tokenizer, workers=1)


SCRIPT = """
import sys
from nemo_dllm.collections.diffusion.data.preprocess import preprocess
if __name__ == "__main__":
    preprocess(sys.argv[1], sys.argv[2], sys.argv[3], workers=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["killed", "full disk"])
def test_a_run_cut_short_goes_on(tmp_path, tokenizer, ending):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": f"{i:09}" * 99} for i in range(5_000)])
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(file), str(tmp_path / "x"), str(tokenizer)]

    def limit_files():
        if ending == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**22, 2**22))

    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=limit_files)
    if ending == "killed":
        while not list(tmp_path.glob("x.parts/0*2")):
            time.sleep(0.01)
        run.send_signal(signal.SIGKILL)
    error = run.communicate()[1]
    assert run.returncode != 0
    assert ending == "killed" or "finished parts are kept in" in error
    # A file whose name starts with a dot is what a process was about to finish.
    kept = {folder.name: folder.stat().st_mtime_ns for folder in tmp_path.glob("x.parts/[0-9]*")}
    assert len(kept) >= 3 and not (tmp_path / "x.idx").exists()
    subprocess.run(command, check=True)
    again = [*command[:3], str(tmp_path / "y"), command[4]]
    subprocess.run(again, check=True)
    assert files_of(tmp_path / "x") == files_of(tmp_path / "y")
