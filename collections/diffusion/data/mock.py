"""Random tokens for benchmarks and tests."""

import numpy as np
import torch
from torch.utils.data import Dataset

from nemo_dllm.collections.diffusion.data.samples import check_index, clean_sample


class MockDataset(Dataset):
    """Uniform random token ids; sample i is a function of (seed, i) alone.

    Items are `clean_sample`s with `sample_index` = i.

    Args:
        vocab_size: ids are in [0, vocab_size).
        sequence_length: L.
        num_samples: length of the dataset.
        seed: non-negative.
        mask_token_id: an id that never occurs; None allows all.

    Raises:
        ValueError: `mask_token_id` is outside the vocabulary.
        IndexError: (on access) the index is outside [0, num_samples).
    """

    def __init__(
        self, vocab_size: int, sequence_length: int, num_samples: int, seed: int = 0, mask_token_id: int | None = None
    ) -> None:
        if mask_token_id is not None and not 0 <= mask_token_id < vocab_size:
            raise ValueError(
                f"mask_token_id={mask_token_id} is outside the vocabulary of {vocab_size}; "
                f"choose one in 0 to {vocab_size - 1}"
            )
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.num_samples = num_samples
        self.seed = seed
        self.mask_token_id = mask_token_id

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        check_index(index, self.num_samples)
        generator = np.random.default_rng((self.seed, int(index)))
        if self.mask_token_id is None:
            tokens = generator.integers(self.vocab_size, size=self.sequence_length)
        else:
            tokens = generator.integers(self.vocab_size - 1, size=self.sequence_length)
            tokens += tokens >= self.mask_token_id
        return clean_sample(tokens, index)
