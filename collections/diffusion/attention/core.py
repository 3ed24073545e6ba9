"""Bidirectional core attention for Megatron's layers.

Shape letters: S positions, B samples, H query heads and G key/value heads of this rank, D head size.
"""

import math

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nemo_dllm.collections.diffusion.attention.masks import bidirectional_mask

# In order of preference on a GPU; torch falls through to the next kernel that takes the inputs.
_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def refuse_unknown(**arguments: object) -> None:
    """Refuse what Megatron may hand over and bidirectional attention would not honour."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} is not supported by bidirectional attention; leave it out")


class BidirectionalAttention(nn.Module):
    """Attention of every position to every real position, with torch's fused kernels.

    Takes the place of Megatron's ``DotProductAttention``: same constructor, same [S, B, heads, D] layout.
    ``attention_mask`` is a bool key mask [B, S], True = real token, or None when there is no padding; then no mask
    tensor exists at all.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__()
        # Megatron's apply_query_key_layer_scaling only moves a factor past an fp16 product; this softmax is fp32.
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.sequence_parallel = config.sequence_parallel

    def forward(
        self,
        query_SBHD: Tensor,
        key_SBGD: Tensor,
        value_SBGD: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params=None,
    ) -> Tensor:
        """Returns the context, [S, B, H * D].

        Raises:
            ValueError: for packed sequences and biases, which this kernel does not know.
        """
        refuse_unknown(packed_seq_params=packed_seq_params, attention_bias=attention_bias)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBHD, key_SBGD, value_SBGD))
        mask = None if attention_mask is None else bidirectional_mask(attention_mask)
        dropout = self.dropout if self.training else 0.0
        if dropout and not self.sequence_parallel:
            with get_cuda_rng_tracker().fork():
                context_BHSD = self.attend(query, key, value, mask, dropout)
        else:
            context_BHSD = self.attend(query, key, value, mask, dropout)
        return context_BHSD.permute(2, 0, 1, 3).flatten(2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        """Scaled dot product attention over [B, heads, S, D]."""
        grouped = query.size(1) != key.size(1)
        with sdpa_kernel(_KERNELS, set_priority=True):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, dropout_p=dropout, scale=self.scale, enable_gqa=grouped
            )


class EagerBidirectionalAttention(BidirectionalAttention):
    """The same attention spelled out, softmax in fp32: the reference that the fused kernels are tested against."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        repeats = query.size(1) // key.size(1)
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        scores = torch.matmul(query, key.transpose(-2, -1)).float() * self.scale
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        probabilities = F.dropout(scores.softmax(-1), dropout)
        return torch.matmul(probabilities.to(value.dtype), value)
