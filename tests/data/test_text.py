import codecs

import pytest

from nemo_dllm.collections.diffusion.data.text import (
    Document,
    read_text,
    split_documents,
    standard_library_sources,
)


@pytest.fixture
def folder(tmp_path):
    """Readable: a.txt, b.md, sub/c.txt; not: a NUL byte, Latin-1, an empty file, a copy of a.txt, hidden files."""
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b.md").write_bytes(b"zwei\r\n")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "sub" / "c.txt").write_text("drei é 😀")
    (tmp_path / "binary.txt").write_bytes(b"a\0b")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "sub" / "copy_of_a.txt").write_text("one")
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".hidden.txt").write_text("hidden too")
    return tmp_path


def test_reads_folder_sorted_and_counts_what_it_leaves_out(folder):
    corpus = read_text(folder)
    assert corpus.documents == [
        Document("a.txt", "one"),
        Document("b.md", "zwei\r\n"),
        Document("sub/c.txt", "drei é 😀"),
    ]
    assert corpus.num_repeated == 1
    assert [str(row).removeprefix(f"{folder}/") for row in corpus.skipped] == [
        "binary.txt:1: binary, it has NUL bytes",
        "empty.txt:1: empty",
        "latin.txt:1: not UTF-8, byte 0xe9",
    ]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"one")
    (tmp_path / "b.txt").write_bytes(codecs.BOM_UTF8)
    corpus = read_text(tmp_path)
    assert corpus.documents == [Document("a.txt", "one")]
    assert [row.reason for row in corpus.skipped] == ["empty"]


def test_suffixes_filter_folders_but_not_named_files(folder):
    assert [document.name for document in read_text(folder, [".txt"]).documents] == ["a.txt", "sub/c.txt"]
    assert read_text(folder / "b.md", [".txt"]).documents == [Document("b.md", "zwei\r\n")]


def test_several_paths_keep_their_order_and_read_a_file_once(folder):
    corpus = read_text([folder / "sub", folder / "a.txt", str(folder)])
    assert [document.name for document in corpus.documents] == ["c.txt", "copy_of_a.txt", "b.md"]


def test_errors_name_field_value_and_fix(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"path='.*nowhere' does not exist; name a text file or a folder"):
        read_text([folder, tmp_path / "nowhere"])
    with pytest.raises(
        ValueError, match=r"path='.*empty.txt' holds no UTF-8 text; .* \(1 files cannot be used\)\n  1 x empty, the"
    ):
        read_text(folder / "empty.txt")
    with pytest.raises(ValueError, match=r"holds no UTF-8 text ending in .rst, .tex; .*\(0 files cannot be used\)$"):
        read_text(folder, [".rst", ".tex"])
    for fraction in (0.0, 1.0, -0.1, 5):
        with pytest.raises(ValueError, match=f"validation_fraction={fraction} must be between 0 and 1"):
            split_documents([Document("a", "text")], fraction)


def test_split_is_disjoint_complete_and_near_the_fraction():
    documents = [Document(f"folder/{i}.txt", str(i)) for i in range(2000)]
    train, validation = split_documents(documents, 0.1)
    assert sorted(train + validation) == sorted(documents)
    assert not set(train) & set(validation)
    # Binomial(2000, 0.1): mean 200, standard deviation 13.4; the hash is fixed, so this cannot be flaky.
    assert 160 < len(validation) < 240


def test_split_of_a_name_does_not_depend_on_the_other_documents_or_the_text():
    documents = [Document(f"{i}.txt", str(i)) for i in range(200)]
    validation = {document.name for document in split_documents(documents, 0.2).validation}
    half = [document._replace(text="edited" + document.text) for document in documents[::2]]
    assert {document.name for document in split_documents(half, 0.2).validation} == {
        document.name for document in half if document.name in validation
    }
    larger = {document.name for document in split_documents(documents, 0.5).validation}
    assert validation < larger
    # Golden: the hash is SHA-256 of the name, so other processes and machines agree.
    assert [document.name for document in split_documents(documents[:20], 0.2).validation] == [
        "1.txt",
        "2.txt",
        "18.txt",
    ]


def test_split_never_leaves_a_side_empty():
    documents = [Document(name, name) for name in ("a.txt", "b.txt")]
    for fraction in (1e-9, 1 - 1e-9):
        train, validation = split_documents(documents, fraction)
        assert len(train) == len(validation) == 1


def test_single_document_is_cut_at_its_tail():
    train, validation = split_documents([Document("book.txt", "0123456789")], 0.3)
    assert train == [Document("book.txt", "0123456")]
    assert validation == [Document("book.txt", "789")]
    with pytest.raises(ValueError, match=r"'book.txt' has 4 characters, too few to keep validation_fraction=0.05"):
        split_documents([Document("book.txt", "0123")], 0.05)


def test_standard_library_is_there_and_deterministic():
    corpus = standard_library_sources()
    names = [document.name for document in corpus.documents]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if "/test/" in f"/{name}" or name.startswith(("site-packages", "idlelib"))]
    assert sum(len(document.text) for document in corpus.documents) > 5_000_000
    assert standard_library_sources() == corpus
