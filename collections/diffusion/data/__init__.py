"""Data for diffusion language models: clean tokens, loss masks and sample positions, no noise.

The Lightning data modules are in `datamodule`, `pretraining_datamodule` and `supervised_datamodule`, which import NeMo.
"""

from nemo_dllm.collections.diffusion.data.batch_sizes import check_batch_sizes
from nemo_dllm.collections.diffusion.data.bits_per_byte import bits_per_byte, count_text_bytes, unigram_bits_per_byte
from nemo_dllm.collections.diffusion.data.mock import MockDataset
from nemo_dllm.collections.diffusion.data.packed import (
    PackedTextDataset,
    PackedTokens,
    ValidationDataset,
    cached_tokens,
    encode_documents,
    epoch_permutation,
)
from nemo_dllm.collections.diffusion.data.text import (
    Corpus,
    Document,
    DocumentSplit,
    read_text,
    split_documents,
    standard_library_sources,
)
from nemo_dllm.collections.diffusion.data.tokenizer import (
    EOS_TOKEN,
    MASK_TOKEN,
    byte_tokenizer,
    cached_byte_bpe,
    train_byte_bpe,
)

__all__ = [
    "EOS_TOKEN",
    "MASK_TOKEN",
    "Corpus",
    "Document",
    "DocumentSplit",
    "MockDataset",
    "PackedTextDataset",
    "PackedTokens",
    "ValidationDataset",
    "bits_per_byte",
    "byte_tokenizer",
    "cached_byte_bpe",
    "cached_tokens",
    "check_batch_sizes",
    "count_text_bytes",
    "encode_documents",
    "epoch_permutation",
    "read_text",
    "split_documents",
    "standard_library_sources",
    "train_byte_bpe",
    "unigram_bits_per_byte",
]
