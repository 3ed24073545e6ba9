"""Bidirectional core attention through Transformer Engine. Importing this file needs Transformer Engine."""

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from nemo_dllm.collections.diffusion.attention.core import refuse_unknown


class TEBidirectionalAttention(TEDotProductAttention):
    """Transformer Engine's attention without a causal mask.

    ``attention_mask`` is a bool key mask [B, S], True = real token, or None when there is no padding.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params=None,
    ) -> Tensor:
        """Query [S, B, H, D], key and value [S, B, G, D] of this rank; returns the context, [S, B, H * D]."""
        refuse_unknown(packed_seq_params=packed_seq_params, attention_bias=attention_bias)
        if attention_mask is None:
            return super().forward(query, key, value, None, AttnMaskType.no_mask)
        hidden_B11S = ~attention_mask[:, None, None, :]
        return super().forward(query, key, value, hidden_B11S, AttnMaskType.padding)
