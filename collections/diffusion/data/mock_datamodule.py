"""A data module of random tokens, with a tokenizer to match, for benchmarks and tests."""

from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec
from nemo.lightning.io.mixin import IOMixin

from nemo_dllm.collections.diffusion.data.base_datamodule import DiffusionDataModule
from nemo_dllm.collections.diffusion.data.mock import MockDataset


class MockTokenizer(TokenizerSpec, IOMixin):
    """A tokenizer without a vocabulary: the text of ids [7, 12] is "7 12".

    Args:
        vocab_size: ids are in [0, vocab_size).
        mask_token_id: None takes the last id.
    """

    def __init__(self, vocab_size: int, mask_token_id: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.mask_id = vocab_size - 1 if mask_token_id is None else mask_token_id
        self.eos_id = self.bos_id = self.pad_id = vocab_size - 2 if self.mask_id == vocab_size - 1 else vocab_size - 1

    def text_to_tokens(self, text: str) -> list[str]:
        """Split at spaces."""
        return text.split()

    def tokens_to_text(self, tokens: list[str]) -> str:
        """Join with spaces."""
        return " ".join(tokens)

    def tokens_to_ids(self, tokens: list[str]) -> list[int]:
        """Read each token as a number."""
        return [int(token) for token in tokens]

    def ids_to_tokens(self, ids: list[int]) -> list[str]:
        """Write each id as a number."""
        return [str(int(token_id)) for token_id in ids]

    def text_to_ids(self, text: str) -> list[int]:
        """ "7 12" to [7, 12]."""
        return self.tokens_to_ids(self.text_to_tokens(text))

    def ids_to_text(self, ids: list[int]) -> str:
        """[7, 12] to "7 12"."""
        return self.tokens_to_text(self.ids_to_tokens(ids))


class MockDataModule(DiffusionDataModule):
    """Uniform random tokens in which the mask token never occurs.

    Args:
        vocab_size: ids are in [0, vocab_size); not needed with a tokenizer.
        tokenizer: any NeMo tokenizer; None makes a `MockTokenizer`.
        mask_token_id: None takes the tokenizer's.
        num_val_rows: validation rows, rounded up to a multiple of `global_batch_size`.
        seed: non-negative; validation rows are drawn with seed + 1.
        seq_length, micro_batch_size, global_batch_size, num_workers, output_log: see `DiffusionDataModule`.

    Raises:
        ValueError: a field is out of range, or neither `vocab_size` nor `tokenizer` is given.
    """

    def __init__(
        self,
        vocab_size: int | None = None,
        tokenizer: TokenizerSpec | None = None,
        mask_token_id: int | None = None,
        seq_length: int = 2048,
        micro_batch_size: int = 4,
        global_batch_size: int = 8,
        num_val_rows: int = 8,
        seed: int = 1234,
        num_workers: int | None = None,
        output_log: bool = True,
    ) -> None:
        super().__init__(seq_length, micro_batch_size, global_batch_size, num_workers, output_log)
        if vocab_size is None and tokenizer is None:
            raise ValueError("vocab_size=None and tokenizer=None; set one of them")
        for field, value, smallest in (("num_val_rows", num_val_rows, 1), ("seed", seed, 0)):
            if value < smallest:
                raise ValueError(f"{field}={value} must be at least {smallest}")
        self.tokenizer = tokenizer or MockTokenizer(vocab_size, mask_token_id)
        self.vocab_size = vocab_size or self.tokenizer.vocab_size
        self.mask_token_id = self.tokenizer.mask_id if mask_token_id is None else mask_token_id
        self.num_val_rows = num_val_rows
        self.seed = seed

    def training_dataset(self, num_samples: int) -> MockDataset:
        """The first `num_samples` samples in consumption order."""
        return MockDataset(self.vocab_size, self.seq_length, num_samples, self.seed, self.mask_token_id)

    def validation_dataset(self) -> MockDataset:
        """Validation rows, a multiple of the global batch size."""
        num_rows = -(-self.num_val_rows // self.global_batch_size) * self.global_batch_size
        return MockDataset(self.vocab_size, self.seq_length, num_rows, self.seed + 1, self.mask_token_id)
