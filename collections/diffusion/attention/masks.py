"""Attention masks of diffusion language models, torch only.

Shape letters: B samples, L tokens of a sample, Q query positions, K key positions.

Every boolean mask of this project says True = may attend. Megatron and Transformer Engine say True = hidden; the
core-attention modules translate at their own border and nowhere else.

A pattern says who attends to whom. Its predicate ``allows`` is the only definition: dense masks and the masks of
FlexAttention are both made of it. Documents packed into one sample never attend to each other. Hidden keys (padding)
are seen by nobody but themselves, so that no query is left without a key: softmax over nothing is NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, wraps

import torch
from torch import Tensor


def visible_keys(key_mask_BL: Tensor) -> Tensor:
    """Normalise a padding mask and make every row attendable.

    Args:
        key_mask_BL: bool [B, L], or an integer tensor of zeros and ones; True or 1 = real token.

    Returns:
        bool [B, L]. A row without a single real token sees all its positions: softmax over no key is NaN, and
        nothing of such a row is trained or read.

    Raises:
        ValueError: for floating point masks, whose meaning (0/1 or 0/-inf) cannot be told.
    """
    if key_mask_BL.is_floating_point():
        raise ValueError(
            f"key_mask has dtype {key_mask_BL.dtype}, where 0/1 and 0/-inf cannot be told apart; "
            "pass a bool mask, True = real token"
        )
    key_mask_BL = key_mask_BL.bool()
    return key_mask_BL | ~key_mask_BL.any(dim=-1, keepdim=True)


def document_positions(document_BL: Tensor) -> Tensor:
    """Position of each token within its document: int64 [B, L], 0 wherever another document begins.

    Args:
        document_BL: integers [B, L]; neighbours with the same number belong to one document.
    """
    index_L = torch.arange(document_BL.size(1), device=document_BL.device)
    begins_BL = torch.ones_like(document_BL, dtype=torch.bool)
    begins_BL[:, 1:] = document_BL[:, 1:] != document_BL[:, :-1]
    return index_L - (index_L * begins_BL).cummax(dim=1).values


def built_field() -> dict:
    """Field of a pattern for what is made of it, see :func:`built_once`."""
    return field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True)
class Bidirectional:
    """Every token sees every token.

    Args:
        key_mask_BL: bool or integers of 0 and 1 [B, L], True = real token; None = no padding.
        document_BL: integers [B, L], the same number for the tokens of one document; None = one document.
    """

    key_mask_BL: Tensor | None = None
    document_BL: Tensor | None = None
    built: dict = built_field()

    def __post_init__(self):
        _normalise(self)

    def allows(self, sample: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Bool: may the query attend to the key? Arguments are integer tensors that broadcast together."""
        return _within(self, sample, query, key, (query >= 0) & (key >= 0))


@dataclass(frozen=True)
class BlockCausal:
    """Every token sees its own block and all earlier ones; with ``block_size`` 1 this is the causal mask.

    Args:
        block_size: tokens of a block, >= 1. Blocks need not divide the length: the last one may be short.
        key_mask_BL: as of :class:`Bidirectional`.
        document_BL: as of :class:`Bidirectional`; blocks are counted from the start of each document.
        position_BL: integers >= 0 [B, L]: a token's block is its position // ``block_size``. None = its index in
            the sample, or in its document where ``document_BL`` is given.

    Raises:
        ValueError: for a block size below 1.
    """

    block_size: int
    key_mask_BL: Tensor | None = None
    document_BL: Tensor | None = None
    position_BL: Tensor | None = None
    built: dict = built_field()

    def __post_init__(self):
        _normalise(self)

    def allows(self, sample: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Bool: may the query attend to the key? Arguments are integer tensors that broadcast together."""
        allowed = _block(self, sample, query) >= _block(self, sample, key)
        return _within(self, sample, query, key, allowed)


@dataclass(frozen=True)
class NoisyClean:
    """The mask of block diffusion training over [x_t | x_0] (Arriola et al., 2025, section 3.3 and appendix B.6).

    The input holds the noised tokens of a sample, then the clean ones: 2 * ``length`` positions. A noised token sees
    the noised tokens of its own block and the clean tokens of earlier blocks; a clean token sees the clean tokens of
    its own and earlier blocks. One pass then gives every block what block-by-block generation would show it.

    Args:
        block_size: tokens of a block, >= 1; the last block may be short.
        length: L, tokens of a sample: half of the input.
        key_mask_BL, document_BL, position_BL: as of :class:`BlockCausal`, of the tokens of one half; the same for both.
        clean_causal: a clean token sees itself and the clean tokens before it only, for a next-token loss on that half.
        clean_output: the outputs of the clean half are read too; else only those of the noised half.

    Raises:
        ValueError: for a block size below 1.
    """

    block_size: int
    length: int
    key_mask_BL: Tensor | None = None
    document_BL: Tensor | None = None
    position_BL: Tensor | None = None
    clean_causal: bool = False
    clean_output: bool = False
    built: dict = built_field()

    def __post_init__(self):
        _normalise(self)

    @property
    def output_length(self) -> int:
        """Positions of which the model's outputs are read, from the first."""
        return 2 * self.length if self.clean_output else self.length

    def allows(self, sample: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Bool: may the query attend to the key? Arguments are integer tensors that broadcast together."""
        noisy_query, noisy_key = query < self.length, key < self.length
        query_block = _block(self, sample, _token(self, query))
        key_block = _block(self, sample, _token(self, key))
        own_block = query_block == key_block
        allowed = (
            (noisy_query & noisy_key & own_block)
            | (~noisy_key & (query_block > key_block))
            | (~noisy_query & ~noisy_key & own_block)
        )
        if self.clean_causal:
            allowed = allowed & (noisy_query | (key <= query))
        return _within(self, sample, query, key, allowed)


Pattern = Bidirectional | BlockCausal | NoisyClean


def _tensors(pattern: Pattern) -> list[Tensor]:
    # What wraps a pattern has its tensors.
    return [value for value in vars(getattr(pattern, "whole", pattern)).values() if isinstance(value, Tensor)]


def sees_all_real_tokens(pattern: Pattern) -> bool:
    """True where a key mask, or none, says it all: the case that every fused kernel takes."""
    return isinstance(pattern, Bidirectional) and pattern.document_BL is None


def sees_all_tokens(pattern: Pattern) -> bool:
    """True where there is nothing to mask."""
    return sees_all_real_tokens(pattern) and pattern.key_mask_BL is None


def num_samples(pattern: Pattern) -> int:
    """Samples that a pattern tells apart: B, or 1 where all are alike."""
    return next((len(value) for value in _tensors(pattern)), 1)


def check_shape(pattern: Pattern, samples: int, positions: int) -> None:
    """Check that a pattern is that of an input [``samples``, ``positions``].

    Raises:
        ValueError: for another length or number of samples, which the kernels would read beyond or repeat.
    """
    tokens = positions
    if isinstance(pattern, NoisyClean):
        tokens = pattern.length
        if positions != 2 * tokens:
            raise ValueError(
                f"the input has {positions} positions, but NoisyClean(length={tokens}) is of {2 * tokens}; "
                "pass the noised tokens, then the clean ones"
            )
    for name, value in vars(pattern).items():
        if isinstance(value, Tensor) and value.shape != (samples, tokens):
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; give one row for each sample and one entry for each token: "
                f"{(samples, tokens)}"
            )


def token_positions(pattern: Pattern, device: torch.device) -> Tensor | None:
    """The positions that a pattern implies, for embeddings: int64 [S] or [B, S]; None = counted from 0.

    Both halves of [x_t | x_0] have the same, and each packed document starts at 0.
    """
    if isinstance(pattern, Bidirectional):
        return None if pattern.document_BL is None else document_positions(pattern.document_BL)
    if isinstance(pattern, BlockCausal):
        return pattern.position_BL
    position = torch.arange(pattern.length, device=device) if pattern.position_BL is None else pattern.position_BL
    return torch.cat((position, position), dim=-1)


def built_once(build: Callable) -> Callable:
    """Keep what ``build(pattern, *shape)`` returns: all layers of a forward pass, and its recomputation, need the same.

    Patterns without tensors share the latest few results with their equals, from step to step; what is made of tensors,
    or of a pattern that equals itself alone, lives as long as that pattern.
    """
    # Few: the dense mask of a long canvas is large.
    shared = lru_cache(maxsize=4)(build)

    @wraps(build)
    def build_or_find(pattern: Pattern, *shape: object):
        if type(pattern).__hash__ is not object.__hash__ and not _tensors(pattern):
            # Training may use what a validation built, and a backward pass takes no inference tensors.
            with torch.inference_mode(False):
                return shared(pattern, *shape)
        key = (build, *shape)
        if key not in pattern.built:
            pattern.built[key] = build(pattern, *shape)
        return pattern.built[key]

    return build_or_find


@built_once
def dense_mask(pattern: Pattern, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Every bit of a pattern, in the form of scaled dot product attention.

    Returns:
        bool [B, 1, Q, K], to broadcast over heads; B is 1 where all samples are alike.
    """
    samples = num_samples(pattern)
    sample_B11, query_1Q1, key_11K = (
        torch.arange(size, device=device).view(shape)
        for size, shape in ((samples, (-1, 1, 1)), (num_queries, (1, -1, 1)), (num_keys, (1, 1, -1)))
    )
    return pattern.allows(sample_B11, query_1Q1, key_11K).expand(samples, -1, -1)[:, None]


def bidirectional_mask(key_mask_BL: Tensor) -> Tensor:
    """Padding mask in the form of scaled dot product attention: bool [B, 1, 1, K], broadcast over heads and queries."""
    return key_mask_BL[:, None, None, :]


def _normalise(pattern: Pattern) -> None:
    """Bring a pattern's fields into the form that its predicate reads."""
    if not isinstance(pattern, Bidirectional):
        if pattern.block_size < 1:
            raise ValueError(f"block_size={pattern.block_size} is no number of tokens; choose 1 or more")
        if pattern.position_BL is None and pattern.document_BL is not None:
            object.__setattr__(pattern, "position_BL", document_positions(pattern.document_BL))
    if pattern.key_mask_BL is not None:
        object.__setattr__(pattern, "key_mask_BL", visible_keys(pattern.key_mask_BL))


def _block(pattern: BlockCausal | NoisyClean, sample: Tensor, index: Tensor) -> Tensor:
    position = index if pattern.position_BL is None else pattern.position_BL[sample, index]
    return position // pattern.block_size


def _token(pattern: Pattern, position: Tensor) -> Tensor:
    """Index in the sample of the token at a position of the input."""
    if not isinstance(pattern, NoisyClean):
        return position
    return position - pattern.length * (position >= pattern.length)


def _within(pattern: Pattern, sample: Tensor, query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
    """Narrow ``allowed`` to one document and to real keys; a pad keeps itself."""
    document_BL, key_mask_BL = pattern.document_BL, pattern.key_mask_BL
    if document_BL is not None:
        same = document_BL[sample, _token(pattern, query)] == document_BL[sample, _token(pattern, key)]
        allowed = allowed & same
    if key_mask_BL is not None:
        allowed = (allowed & key_mask_BL[sample, _token(pattern, key)]) | (query == key)
    return allowed
