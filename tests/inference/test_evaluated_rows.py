"""Which tokens of a file are scored: those of its texts, and of chats the answers."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

pytestmark = pytest.mark.nemo

MODEL = Path(__file__).parents[1] / "golden" / "models" / "a2d_qwen3"
TEXTS = ["w5 w7 w9", "w1 w2"]
CHATS = [
    {"messages": [{"role": "user", "content": "w5 w7"}, {"role": "assistant", "content": "w9 w11"}]},
    {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]},
]
PROMPTS = [{"prompt": "w5 w7 ", "completion": "w9 w11"}, {"prompt": "w1 ", "completion": "w2"}]


def lines(rows):
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


@pytest.fixture
def evaluated(evaluate, tmp_path, capsys):
    """Runs the command on a file of rows and returns what it found, and what it said besides."""

    def run(rows, name="rows.jsonl", **options):
        content = lines(rows).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        capsys.readouterr()
        evaluate(MODEL, tmp_path / name, json=True, **options)
        printed = capsys.readouterr()
        return json.loads(printed.out), printed.err

    return run


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz"])
def test_a_text_of_a_row_is_scored_as_that_of_a_file(evaluated, model, name):
    from nemo_dllm.collections.diffusion.inference.evaluate import evaluate_texts

    found, said = evaluated([{"text": text, "id": 3} for text in TEXTS], name)
    expected = evaluate_texts(model, TEXTS)
    assert (found["nll"], found["rows"], found["tokens"], found["bytes"]) == (expected.nll, 2, 5, 13)
    assert "note" not in said
    assert evaluated([{"body": text} for text in TEXTS], name, text_field="body")[0] == found


def test_a_text_file_stays_what_it_is(evaluated, model):
    from nemo_dllm.collections.diffusion.inference.evaluate import evaluate_texts

    found, _ = evaluated(TEXTS, "text.txt")
    assert found["nll"] == evaluate_texts(model, ["w5 w7 w9\nw1 w2\n"]).nll


def test_parquet_and_folders_of_rows(evaluated, tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    from nemo_dllm.collections.diffusion.inference.evaluated_rows import read_texts

    expected, _ = evaluated([{"text": text} for text in TEXTS])
    folder = tmp_path / "folder"
    folder.mkdir()
    parquet.write_table(pa.table({"text": TEXTS}), folder / "a.parquet")
    (folder / "README.md").write_text("about them")
    assert read_texts(folder, "text", 0, None) == read_texts(folder / "a.parquet", "text", 0, None) == TEXTS
    assert read_texts(folder, "text", 0, 1) == TEXTS[:1]
    with pytest.raises(ValueError, match="text_field='body' is not a column of 1 inputs: .*a.parquet has text"):
        read_texts(folder, "body", 0, None)
    # Settings of a program among its texts.
    (folder / "a.parquet").rename(folder / "package.json")
    (folder / "package.json").write_text('{"name": "x"}')
    assert sorted(read_texts(folder, "text", 0, None)) == ["about them", '{"name": "x"}']


def test_of_chats_the_answers_are_scored(evaluated, model, tmp_path):
    """The tokens by hand: prompts are given, the words of answers and what ends them count."""
    from nemo_dllm.collections.diffusion.inference.evaluated_rows import rows_of_chats

    found, said = evaluated(PROMPTS, chat_template="")
    assert (found["rows"], found["tokens"], found["bytes"]) == (2, 5, len("w9 w11") + len("w2"))
    assert "note: answers are scored, prompts are given: 2 samples of 8 tokens, 0 cut" in said
    eos = model.tokenizer.eos_id
    rows = rows_of_chats(model, tmp_path / "rows.jsonl", 512, None, "").rows
    assert [row.tokens for row in rows] == [[5, 7, 9, 11, eos], [1, 2, eos]]
    assert [row.scored for row in rows] == [[False, False, True, True, True], [False, True, True]]
    cut, num_bytes = rows_of_chats(model, tmp_path / "rows.jsonl", 3, 1, "")
    assert (cut[0].tokens, cut[0].scored, num_bytes) == ([5, 7, 9], [False, False, True], 2)


def test_a_shifted_model_has_no_logits_for_the_first_token_of_an_answer_without_a_prompt(model, tmp_path):
    from nemo_dllm.collections.diffusion.inference.evaluated_rows import rows_of_chats

    (tmp_path / "rows.jsonl").write_text(lines([{"prompt": "", "completion": "w9 w11"}]))
    shifted = replace(model, objective=replace(model.objective, right_shift=True))
    for loaded, first in ((model, True), (shifted, False)):
        (row,) = rows_of_chats(loaded, tmp_path / "rows.jsonl", 512, None, "").rows
        assert row.scored == [first, True, True]


def test_chats_go_through_their_template(evaluated):
    template = "{% for m in messages %}{{ 'w20 ' if m.role == 'user' else 'w30 ' }}{{ m.content }} {% endfor %}"
    found, said = evaluated(CHATS, chat_template=template)
    # Of each answer its words and the end token.
    assert (found["rows"], found["tokens"]) == (2, 5)
    assert "2 samples of 12 tokens" in said
    assert evaluated(CHATS, chat_template=template, max_rows=1)[0]["rows"] == 1
    with_text = [{"text": "w5", **row} for row in CHATS]
    assert evaluated(with_text)[0]["tokens"] == 2


@pytest.mark.parametrize(
    "row, reason",
    [
        ('{"text": "w1"', r"rows.jsonl:2: broken JSON, .* at column 14"),
        ({"body": "w1"}, "rows.jsonl:2: no field 'text', only 'body'"),
        ({"text": 3}, "rows.jsonl:2: field 'text' is int, not text"),
        ("3", "rows.jsonl:2: a JSON int, not an object"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(evaluated, monkeypatch, row, reason):
    rows = [{"text": "w5 w7"}, row, {"text": "w1"}]
    found, said = evaluated(rows, max_bad_rows=1)
    assert found["tokens"] == 3
    assert said.startswith("note: 1 rows are left out\n") and "rows.jsonl:2: " in said
    module = "nemo_dllm.collections.diffusion.inference.evaluate.load_checkpoint"
    monkeypatch.setattr(module, lambda *_, **__: pytest.fail("loaded the model first"))
    with pytest.raises(ValueError, match=rf"(?s)more than max_bad_rows=0; mend the input.*{reason}"):
        evaluated(rows)


def test_fields_by_other_names(evaluated):
    expected, _ = evaluated(PROMPTS, chat_template="")
    renamed = [{"q": row["prompt"], "a": row["completion"], "text": "w3"} for row in PROMPTS]
    columns = {"prompt": "q", "completion": "a"}
    assert evaluated(renamed, chat_template="", columns=columns)[0] == expected
    with pytest.raises(ValueError, match="columns={'question': 'q'} has unknown question; known: messages, "):
        evaluated(renamed, columns={"question": "q"})


def test_a_split_of_a_dataset(evaluate, evaluated, capsys, tmp_path):
    from datasets import Dataset, DatasetDict

    expected, _ = evaluated([{"text": text} for text in TEXTS])
    splits = {"train": Dataset.from_list([{"text": "w3"}]), "test": Dataset.from_list([{"text": t} for t in TEXTS])}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    capsys.readouterr()
    evaluate(MODEL, tmp_path / "saved", json=True, split="test")
    assert json.loads(capsys.readouterr().out) == expected
    with pytest.raises(ValueError, match="split"):
        evaluate(MODEL, tmp_path / "saved")


def test_chats_that_cannot_be_read_are_named(evaluated, monkeypatch):
    broken = {"messages": [{"role": "user", "content": "w5"}]}
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="rows.jsonl:3: there is no turn of the assis"):
        module = "nemo_dllm.collections.diffusion.inference.evaluate.load_checkpoint"
        patch.setattr(module, lambda *_, **__: pytest.fail("loaded the model first"))
        evaluated([*CHATS, broken])
    with pytest.raises(ValueError, match="(?s)more than max_bad_rows=0.*rows.jsonl:3: there is no turn of the assist"):
        evaluated([*CHATS, broken], chat_template="{% for m in messages %}{{ m.content }} {% endfor %}")
    with pytest.raises(ValueError, match="has no chat template; pass chat_template"):
        evaluated(CHATS)


def test_files_without_a_text(evaluated):
    with pytest.raises(ValueError, match="rows.jsonl: no row has a text$"):
        evaluated([{"text": ""}])
    with pytest.raises(ValueError, match="rows.jsonl: no row has a text$"):
        evaluated([])
