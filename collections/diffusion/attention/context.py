"""Context parallelism: each rank holds a contiguous shard of every sample's tokens, and sees the keys of all.

Of [x_t | x_0] a rank holds the same tokens of both halves, one shard after the other. Keys and values are gathered, and
their gradients scattered back, so attention is exact under any pattern.

Shape letters: S positions of this rank, K positions of all ranks, B samples, G key/value heads of this rank, D head
size.
"""

from dataclasses import dataclass, replace

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from nemo_dllm.collections.diffusion.attention.masks import NoisyClean, Pattern, built_field, built_once


def copies(pattern: Pattern) -> int:
    """How many times the positions of a pattern hold the tokens of a sample."""
    return 2 if isinstance(pattern, NoisyClean) else 1


def take_shard(values: Tensor, dim: int, pattern: Pattern, rank: int, ranks: int) -> Tensor:
    """A rank's part of what has one entry for each position along ``dim``."""
    parts = values.unflatten(dim, (copies(pattern), ranks, -1))
    return parts.select(dim + 1, rank).flatten(dim, dim + 1)


def gather_keys(key_SBGD: Tensor, value_SBGD: Tensor, pattern: Pattern, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values of all positions in their order, [K, B, G, D]; their gradients go back to their ranks."""
    size = key_SBGD.size(-1)
    both = gather_from_sequence_parallel_region(torch.cat((key_SBGD, value_SBGD), dim=-1), group=group)
    if copies(pattern) > 1:
        both = both.unflatten(0, (group.size(), copies(pattern), -1)).transpose(0, 1).flatten(0, 2)
    return both[..., :size], both[..., size:]


@dataclass(frozen=True)
class QueryShard:
    """A pattern as one rank needs it: queries are counted among its own positions, keys among all.

    Args:
        whole: the pattern of all positions.
        start: token at which the rank's shard begins.
        tokens: tokens of the shard.
    """

    whole: Pattern
    start: int
    tokens: int
    built: dict = built_field()

    def allows(self, sample: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Bool: may the query attend to the key? Arguments are integer tensors that broadcast together."""
        position = query + self.start
        if isinstance(self.whole, NoisyClean):
            position = position + (self.whole.length - self.tokens) * (query >= self.tokens)
        return self.whole.allows(sample, position, key)


@built_once
def query_shard(pattern: Pattern, rank: int, tokens: int) -> QueryShard:
    """The pattern as rank ``rank`` needs it, whose shard has ``tokens`` tokens."""
    # Of a copy: the pattern keeps the result, and a cycle would hold device memory until the collector comes by.
    return QueryShard(replace(pattern), rank * tokens, tokens)
