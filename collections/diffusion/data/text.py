"""Text documents: reading files and folders, and splitting documents into train and validation."""

import codecs
import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from nemo_dllm.collections.diffusion.data.bad_rows import BadRow, bad_row, describe_bad_rows
from nemo_dllm.collections.diffusion.data.sources import visible_files

# Folders of the standard library that hold tests, an editor, other packages or compiled files instead of library code.
_NOT_LIBRARY_CODE = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})


class Document(NamedTuple):
    """One text with the name by which it is split.

    name: path relative to the folder that was read, with forward slashes (the file's own name for a single file).
    text: the file's characters as they are, without a byte order mark; newlines are not translated.
    """

    name: str
    text: str


class Corpus(NamedTuple):
    """What was read.

    documents: non-empty texts, each distinct, in sorted order per path.
    skipped: files left out because they are binary, not UTF-8, or empty.
    num_repeated: files left out because an earlier one has the same text (it could land in both splits).
    """

    documents: list[Document]
    skipped: list[BadRow]
    num_repeated: int


class DocumentSplit(NamedTuple):
    """Two disjoint, non-empty lists of documents."""

    train: list[Document]
    validation: list[Document]


def read_text(
    path: str | Path | Sequence[str | Path], suffixes: Sequence[str] | None = None, field: str = "path"
) -> Corpus:
    """Read a text file, a folder of text files (recursively), or several of either.

    Hidden files and folders (leading dot) inside a folder are not read.

    Args:
        path: file, folder, or a sequence of them, read in the given order.
        suffixes: file-name endings to read inside folders, e.g. (".py", ".md"); None reads every file. A file that
            `path` names itself is always read.
        field: what the user gave `path` as, for errors.

    Raises:
        FileNotFoundError: a path does not exist.
        ValueError: nothing readable was found.
    """
    paths = [Path(path)] if isinstance(path, (str, Path)) else [Path(p) for p in path]
    named_files = [named_file for p in paths for named_file in _list_files(p, suffixes, field)]
    corpus = _read_files(named_files)
    if not corpus.documents:
        wanted = f" ending in {', '.join(suffixes)}" if suffixes else ""
        raise ValueError(
            f"{field}={_show(paths)} holds no UTF-8 text{wanted}; choose a text file, a folder with text files, or "
            f"other suffixes ({len(corpus.skipped)} files cannot be used)\n{describe_bad_rows(corpus.skipped)}".rstrip()
        )
    return corpus


def standard_library_sources() -> Corpus:
    """Read the Python files of the running interpreter's standard library: real text on every machine, offline."""
    root = Path(sysconfig.get_paths()["stdlib"])
    named_files = [
        (name, file)
        for name, file in _list_files(root, (".py",))
        if not _NOT_LIBRARY_CODE.intersection(Path(name).parent.parts)
    ]
    return _read_files(named_files)


def split_documents(documents: Sequence[Document], validation_fraction: float) -> DocumentSplit:
    """Split by document; a single document is cut, and its tail is the validation text.

    A document's side depends on the hash of its name alone, so that adding or removing other files does not move it.
    Should that leave a side empty, the document nearest to the border changes sides.

    Args:
        documents: at least one.
        validation_fraction: expected share of documents (of characters, for a single document), in (0, 1).

    Raises:
        ValueError: the fraction is out of range, or a single document is too short to cut.
    """
    check_validation_fraction(validation_fraction)
    if len(documents) == 1:
        return _cut_tail(documents[0], validation_fraction)
    position = {document: _unit_hash(document.name) for document in documents}
    validation = {document for document in documents if position[document] < validation_fraction}
    if not validation:
        validation = {min(documents, key=position.__getitem__)}
    elif len(validation) == len(documents):
        validation.remove(max(documents, key=position.__getitem__))
    return DocumentSplit(
        train=[document for document in documents if document not in validation],
        validation=[document for document in documents if document in validation],
    )


def check_validation_fraction(validation_fraction: float) -> None:
    """Raise ValueError unless the fraction is in (0, 1)."""
    if not 0.0 < validation_fraction < 1.0:
        raise ValueError(f"validation_fraction={validation_fraction} must be between 0 and 1, e.g. 0.05")


def _list_files(path: Path, suffixes: Sequence[str] | None, field: str = "path") -> list[tuple[str, Path]]:
    """(name, file) pairs, sorted by name."""
    if path.is_file():
        return [(path.name, path)]
    if not path.is_dir():
        raise FileNotFoundError(f"{field}='{path}' does not exist; name a text file or a folder of text files")
    named_files = [(file.relative_to(path).as_posix(), file) for file in visible_files(path) if file.is_file()]
    return sorted((name, file) for name, file in named_files if suffixes is None or name.endswith(tuple(suffixes)))


def _read_files(named_files: Iterable[tuple[str, Path]]) -> Corpus:
    documents: dict[str, Document] = {}
    skipped: list[BadRow] = []
    num_repeated = 0
    for name, file in named_files:
        text = _decode(file)
        if isinstance(text, BadRow):
            skipped.append(text)
        elif text in documents:
            num_repeated += 1
        else:
            documents[text] = Document(name, text)
    return Corpus(list(documents.values()), skipped, num_repeated)


def _decode(file: Path) -> str | BadRow:
    """The text, or what is wrong and in which line (a NUL byte is valid UTF-8, but no text file has one)."""
    try:
        content = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        return bad_row(str(file), 1, f"cannot be read, {error.strerror}")
    if not content:
        return bad_row(str(file), 1, "empty")
    if b"\0" in content:
        return bad_row(str(file), content[: content.index(b"\0")].count(b"\n") + 1, "binary, it has NUL bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        return bad_row(
            str(file), content[: error.start].count(b"\n") + 1, f"not UTF-8, byte 0x{content[error.start]:02x}"
        )


def _cut_tail(document: Document, validation_fraction: float) -> DocumentSplit:
    num_train = round(len(document.text) * (1.0 - validation_fraction))
    if not 0 < num_train < len(document.text):
        raise ValueError(
            f"'{document.name}' has {len(document.text)} characters, too few to keep "
            f"validation_fraction={validation_fraction} of them for validation; use a longer text"
        )
    return DocumentSplit(
        train=[document._replace(text=document.text[:num_train])],
        validation=[document._replace(text=document.text[num_train:])],
    )


def _unit_hash(name: str) -> float:
    """A number in [0, 1) that depends on the name alone (Python's own hash differs from process to process)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big") / 2**56


def _show(paths: Sequence[Path]) -> str:
    return ", ".join(f"'{path}'" for path in paths)
