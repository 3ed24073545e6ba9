"""Lightning data modules for NeMo's Megatron strategy: text for pretraining, and mock data."""

from collections.abc import Sequence
from pathlib import Path

from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.lightning.base import NEMO_DATASETS_CACHE
from nemo.utils import logging

from nemo_dllm.collections.diffusion.data.bad_rows import describe_bad_rows
from nemo_dllm.collections.diffusion.data.base_datamodule import DiffusionDataModule
from nemo_dllm.collections.diffusion.data.bits_per_byte import count_text_bytes, unigram_bits_per_byte
from nemo_dllm.collections.diffusion.data.mock_datamodule import MockDataModule, MockTokenizer
from nemo_dllm.collections.diffusion.data.packed import (
    PackedTextDataset,
    PackedTokens,
    ValidationDataset,
    cached_tokens,
)
from nemo_dllm.collections.diffusion.data.text import (
    check_validation_fraction,
    read_text,
    split_documents,
    standard_library_sources,
)
from nemo_dllm.collections.diffusion.data.tokenizer import cached_byte_bpe, load_nemo_tokenizer

__all__ = ["DiffusionDataModule", "MockDataModule", "MockTokenizer", "TextDataModule"]


class TextDataModule(DiffusionDataModule):
    """Pretraining on text files.

    Documents are split by file, encoded, joined and cut into rows. Tokenizer and tokens are made on first use and
    cached by the content of text and tokenizer.

    Args:
        path: text file, folder, or list of them; None reads the sources of Python's own standard library.
        tokenizer: Hugging Face tokenizer folder or name, or NeMo's AutoTokenizer; None trains a byte-level BPE on the
            training documents.
        vocab_size: of the tokenizer that is trained when `tokenizer` is None.
        suffixes: file-name endings to read inside folders, e.g. [".md"]; None reads all text.
        validation_fraction: expected share of documents for validation, in (0, 1).
        num_val_rows: validation rows in use; None uses all.
        seed: of the order of the training rows; non-negative.
        document_boundaries: True tells the documents of a row apart: positions, attention and blocks begin anew with
            each. False takes a row for one text. None is False, and block diffusion refuses it: whether its blocks may
            span documents should be a decision.
        cache_dir: None uses a folder in NeMo's dataset cache.
        seq_length, micro_batch_size, global_batch_size, num_workers, output_log: see `DiffusionDataModule`.

    Raises:
        ValueError: (at construction) a field is out of range; (at setup) there is too little text.
        FileNotFoundError: (on first use of the tokenizer or the data) `path` or `tokenizer` does not exist.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path] | None = None,
        tokenizer: str | Path | AutoTokenizer | None = None,
        vocab_size: int = 8192,
        seq_length: int = 512,
        micro_batch_size: int = 4,
        global_batch_size: int = 8,
        suffixes: Sequence[str] | None = None,
        validation_fraction: float = 0.05,
        num_val_rows: int | None = None,
        seed: int = 1234,
        num_workers: int | None = None,
        cache_dir: str | Path | None = None,
        output_log: bool = True,
        document_boundaries: bool | None = None,
    ) -> None:
        super().__init__(seq_length, micro_batch_size, global_batch_size, num_workers, output_log)
        if num_val_rows is not None and num_val_rows < 1:
            raise ValueError(f"num_val_rows={num_val_rows} must be at least 1, or None for all")
        if seed < 0:
            raise ValueError(f"seed={seed} must not be negative")
        check_validation_fraction(validation_fraction)
        self.path = path
        self.vocab_size = vocab_size
        self.suffixes = suffixes
        self.validation_fraction = validation_fraction
        self.num_val_rows = num_val_rows
        self.seed = seed
        self.document_boundaries = document_boundaries
        self.cache_dir = Path(cache_dir) if cache_dir else NEMO_DATASETS_CACHE / "diffusion_text"
        self.tokenizer = tokenizer
        self._texts: tuple[list[str], list[str]] | None = None

    @property
    def tokenizer(self) -> AutoTokenizer:
        """NeMo's wrapper of the Hugging Face tokenizer; loaded, and if need be trained, on first use."""
        if not isinstance(self._tokenizer, AutoTokenizer):
            folder = self._tokenizer or cached_byte_bpe(self._split_texts()[0], self.vocab_size, self.cache_dir)
            self._tokenizer = load_nemo_tokenizer(folder)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: str | Path | AutoTokenizer | None) -> None:
        if not isinstance(tokenizer, (str, Path, AutoTokenizer, type(None))):
            raise ValueError(
                f"tokenizer of type {type(tokenizer).__name__} cannot encode a corpus; pass a Hugging Face tokenizer "
                "folder or name, or nemo's AutoTokenizer of it"
            )
        self._tokenizer = tokenizer

    def prepare_data(self) -> None:
        """Fill the cache; Lightning calls this in one process per node before the others read it."""
        self._encode()

    def setup(self, stage: str) -> None:
        """Map the tokens into memory and build the validation data."""
        self._train_tokens, self._validation_tokens = self._encode()
        super().setup(stage)
        self.num_validation_tokens = self._validation_dataset.num_rows * self.seq_length
        self.num_validation_bytes = count_text_bytes(
            self._split_texts()[1],
            self._validation_tokens,
            self.num_validation_tokens,
            self.tokenizer.tokenizer,
        )
        self._texts = None  # a corpus is far larger than what is still needed of it

    def training_dataset(self, num_samples: int) -> PackedTextDataset:
        """The first `num_samples` samples in consumption order."""
        return PackedTextDataset(
            self._train_tokens.tokens,
            self.seq_length,
            num_samples,
            self.seed,
            document_ends=self._train_tokens.document_ends if self.document_boundaries else None,
        )

    def validation_dataset(self) -> ValidationDataset:
        """The validation rows, filled up to a multiple of the global batch size by rows that do not count."""
        return ValidationDataset(
            self._validation_tokens.tokens,
            self.seq_length,
            self.num_val_rows,
            multiple_of=self.global_batch_size,
            document_ends=self._validation_tokens.document_ends if self.document_boundaries else None,
        )

    def unigram_bits_per_byte(self) -> float:
        """Bits per byte of the validation rows under the training tokens' frequencies; needs `setup`."""
        return unigram_bits_per_byte(
            self._train_tokens.tokens,
            self._validation_tokens.tokens[: self.num_validation_tokens],
            self.tokenizer.vocab_size,
            self.num_validation_bytes,
        )

    def _encode(self) -> tuple[PackedTokens, PackedTokens]:
        train, validation = self._split_texts()
        hugging_face = self.tokenizer.tokenizer
        return (
            cached_tokens(train, hugging_face, self.cache_dir),
            cached_tokens(validation, hugging_face, self.cache_dir),
        )

    def _split_texts(self) -> tuple[list[str], list[str]]:
        """Training and validation texts, read once until `setup` is done with them."""
        if self._texts is None:
            corpus = standard_library_sources() if self.path is None else read_text(self.path, self.suffixes)
            if self.path is not None and (corpus.skipped or corpus.num_repeated):
                logging.warning(
                    f"path={self.path}: left out {corpus.num_repeated} files that repeat another, and "
                    f"{len(corpus.skipped)} that cannot be used\n{describe_bad_rows(corpus.skipped)}".rstrip()
                )
            split = split_documents(corpus.documents, self.validation_fraction)
            self._texts = tuple([document.text for document in documents] for documents in split)
        return self._texts
