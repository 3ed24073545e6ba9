"""What is printed of rows that are known by hand."""

import io
import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from nemo_dllm.collections.diffusion.data.preprocess import preprocess
from nemo_dllm.collections.diffusion.data.row_statistics import RowStatistics, split_documents_of
from nemo_dllm.collections.diffusion.data.show import pieces_of, print_rows, show_data, show_files
from nemo_dllm.collections.diffusion.data.tokenizer import byte_tokenizer

EOS = 256


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path_factory.mktemp("tokenizer") / "byte"))


def row_of(*documents, length, index=0):
    """Documents are (prompt, answer); the end token of each is trained."""
    tokens, loss_mask, ids = [], [], []
    for number, (prompt, answer) in enumerate(documents):
        piece = [*(prompt + answer).encode(), EOS]
        tokens += piece
        loss_mask += [i >= len(prompt.encode()) for i in range(len(piece))]
        ids += [number] * len(piece)
    pads = length - len(tokens)
    return {
        "tokens": torch.tensor(tokens + [EOS] * pads),
        "loss_mask": torch.tensor(loss_mask + [False] * pads),
        "key_mask": torch.arange(length) < len(tokens),
        "document_ids": torch.tensor(ids + [len(documents)] * pads),
        "sample_index": torch.tensor(index),
    }


ROWS = [row_of(("ab", "é"), ("a", "cd"), length=16), row_of(("ab", "é"), length=8, index=1)]


def test_kinds_and_characters_of_several_tokens(tokenizer):
    pieces = [(piece.text, piece.kind, piece.document, piece.num_tokens) for piece in pieces_of(ROWS[0], tokenizer)]
    end = tokenizer.eos_token
    assert pieces == [
        ("a", "prompt", 0, 1),
        ("b", "prompt", 0, 1),
        ("é", "answer", 0, 2),
        (end, "answer", 0, 1),
        ("a", "prompt", 1, 1),
        ("c", "answer", 1, 1),
        ("d", "answer", 1, 1),
        (end, "answer", 1, 1),
        (f"\n{end} x 7", "pad", 2, 7),
    ]


def test_masked_tokens(tokenizer):
    def masked(time, seed=0, row=ROWS[0]):
        return sum(piece.num_tokens for piece in pieces_of(row, tokenizer, time, seed) if piece.kind == "masked")

    assert (masked(0.0), masked(1.0)) == (0, 6)
    long = row_of(("ab", "c" * 1999), length=2002)
    assert abs(masked(0.25, row=long) - 500) < 5 * (2000 * 0.25 * 0.75) ** 0.5
    assert pieces_of(long, tokenizer, 0.5, seed=1) == pieces_of(long, tokenizer, 0.5, seed=1)
    assert pieces_of(long, tokenizer, 0.5, seed=1) != pieces_of(long, tokenizer, 0.5, seed=2)
    assert pieces_of(long, tokenizer, 0.5) != pieces_of(long | {"sample_index": torch.tensor(1)}, tokenizer, 0.5)


def test_statistics():
    statistics = RowStatistics.of(ROWS)
    assert (statistics.rows, statistics.positions) == (2, 24)
    assert statistics.document_lengths.tolist() == [5, 4, 5]
    assert statistics.supervised == 9 / 24 and statistics.padding == 10 / 24
    assert (statistics.unsupervised_rows, statistics.duplicates) == (0, 1)
    assert statistics.histogram(2) == [(4, 4, 1), (5, 5, 2)]
    assert [tokens.tolist() for tokens in split_documents_of(ROWS[1])] == [[*"abé".encode(), EOS]]
    plain = {"tokens": torch.arange(6), "loss_mask": torch.zeros(6, dtype=torch.bool)}
    assert RowStatistics.of([plain]).unsupervised_rows == 1
    assert RowStatistics.of([plain]).document_lengths.tolist() == [6]
    with pytest.raises(ValueError, match="there are no rows to describe"):
        RowStatistics.of([])


def test_terminal_and_page_say_the_same(tokenizer, tmp_path):
    stream = io.StringIO()
    print_rows(
        ROWS,
        RowStatistics.of(ROWS),
        tokenizer,
        1.0,
        notes=["7 left out [/INST]"],
        html=tmp_path / "a.html",
        stream=stream,
    )
    page = (tmp_path / "a.html").read_text()
    for text in (stream.getvalue(), page):
        assert "sample 1: 8 tokens, 3 trained, t = 1" in text
        assert "--- document 1" in text and "▒▒▒" in text and "é" not in text
        assert "2 rows of 24 positions: 37.5% trained, 41.7% padding" in text
        assert "7 left out [/INST]" in text
    assert "background-color: #808000" in page  # the style of masked tokens


def test_show_data_sets_a_module_up_and_reads_no_row_twice(tokenizer):
    class Data:
        tokenizer = None

        def prepare_data(self):
            self.calls = ["prepare"]

        def setup(self, stage):
            self.calls.append((stage, self.trainer.global_step))

        def training_dataset(self, num_samples):
            return _Repeating(num_samples)

    data = Data()
    data.tokenizer = SimpleNamespace(tokenizer=tokenizer)
    statistics = show_data(data, num_samples=1, num_rows=50, stream=io.StringIO())
    assert data.calls == ["prepare", ("fit", 0)]
    assert statistics.rows == 2
    with pytest.raises(ValueError, match=r"time=2 must be in \[0, 1\]"):
        show_data(data, time=2)


class _Repeating:
    """Two rows, again and again."""

    num_rows = 2

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __getitem__(self, index):
        return ROWS[index % 2]


def test_files(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": "ab", "completion": "c"}\n{"q": "a", "completion": "bcd"}\n{"q": 3}\n')
    stream = io.StringIO()
    options = {"columns": {"prompt": "q"}, "chat_template": "", "stream": stream}
    statistics = show_files(tmp_path / "a.jsonl", tokenizer, seq_length=16, **options)
    assert (statistics.rows, statistics.supervised) == (2, 6 / 32)
    shown = stream.getvalue()
    assert "in all: 2 samples of 9 tokens, 0 cut" in shown and "a.jsonl:3: there are no fields" in shown
    packed = show_files(tmp_path / "a.jsonl", tokenizer, seq_length=16, packing=True, block_size=4, **options)
    assert (packed.rows, sorted(packed.document_lengths.tolist())) == (1, [4, 8])


def test_files_of_an_encoded_corpus(tokenizer, tmp_path):
    (tmp_path / "a.log").write_text("one\ntwo\nthree\n")
    preprocess(tmp_path / "a.log", tmp_path / "x", tokenizer, format="lines", workers=1)
    stream = io.StringIO()
    statistics = show_files(tmp_path / "x", tokenizer, seq_length=7, stream=stream)
    assert (statistics.rows, statistics.padding, statistics.supervised) == (2, 0.0, 1.0)
    assert "in all: 3 documents, 14 tokens" in stream.getvalue()
    for suffix in (".bin", ".idx"):
        again = show_files(tmp_path / f"x{suffix}", tokenizer, seq_length=7, stream=io.StringIO())
        assert again.document_lengths.tolist() == statistics.document_lengths.tolist()


def test_what_a_terminal_would_act_on_is_shown(tokenizer, tmp_path):
    """Escape sequences, backspaces, marks of direction; and in the page, tags."""
    words = "\x1b[2J<script>\x07\x08\r\x7f\u202e[red]\t"
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "completion": words}))
    stream = io.StringIO()
    show_files(
        tmp_path / "a.jsonl", tokenizer, seq_length=64, chat_template="", html=tmp_path / "a.html", stream=stream
    )
    assert r"␛[2J<script>␇␈␍\u007f\u202e[red]" in stream.getvalue()
    assert not {"\x1b", "\x07", "\x08", "\r", "\x7f", "\u202e"} & set(stream.getvalue())
    page = (tmp_path / "a.html").read_text()
    assert "␛" in page and "\x1b" not in page and "&lt;script&gt;" in page and "<script>" not in page


def test_more_bad_rows_than_usual(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text("{\n" * 101 + '{"prompt": "a", "completion": "b"}')
    with pytest.raises(ValueError, match="101 rows cannot be used, more than max_bad_rows=100"):
        show_files(tmp_path / "a.jsonl", tokenizer, chat_template="")
    stream = io.StringIO()
    show_files(tmp_path / "a.jsonl", tokenizer, seq_length=8, chat_template="", max_bad_rows=101, stream=stream)
    assert "101 rows cannot be used:" in stream.getvalue()
