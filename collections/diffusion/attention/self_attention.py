"""Megatron's self-attention with its small operations fused on a GPU.

Shape letters: S positions, B samples, G key/value heads and H = G * R query heads of this rank, D head size, T rotary
dimensions (T <= D).
"""

from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from nemo_dllm.collections.diffusion.attention.cached_keys import CachedKeys
from nemo_dllm.collections.diffusion.attention.masks import NoisyClean, Pattern
from nemo_dllm.collections.diffusion.attention.residual import Product, project


class FusedSelfAttention(SelfAttention):
    """Splits, normalises and rotates queries and keys in one kernel; all else is Megatron's.

    ``rotary_pos_emb`` is :func:`rotary_table` instead of Megatron's angles, so that positions may differ between
    samples at no cost.

    Args:
        drop_clean: return only what is read of [x_t | x_0], see :class:`~masks.NoisyClean`: mostly the noised half.
            The queries of the clean half are then not used; the fused projection still computes them, as a part of one
            product.
    """

    def __init__(self, *arguments: object, drop_clean: bool = False, **named: object):
        super().__init__(*arguments, **named)
        self.drop_clean = drop_clean

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        rotary_pos_emb: Tensor | None = None,
        attention_bias: Pattern | CachedKeys | None = None,
        **unused: object,
    ) -> tuple[Tensor | Product, Tensor | None]:
        """Attend.

        Args:
            hidden_states: [S (or this rank's part of it under sequence parallelism), B, hidden].
            attention_mask: unused. Megatron saves it as a tensor when it recomputes layers, which a pattern is not;
                it hands ``attention_bias`` over as it is.
            rotary_pos_emb: cosines and sines, fp32 [2, S, 1 or B, 1, T]; None rotates nothing.
            attention_bias: the pattern of attention, or a cache with the keys and values of other tokens.

        Returns:
            Output [S, B, hidden] before its bias (with ``drop_clean`` that of the noised half), and the bias; see
            :func:`~residual.project`.
        """
        assert all(value is None for value in (attention_mask, *unused.values())), f"not supported: {unused}"
        if self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]:
            rotary_pos_emb = None
        qkv, _ = self.linear_qkv(hidden_states)
        query, key, value = split_norm_rotate(
            qkv,
            self._norm_weight(self.q_layernorm),
            self._norm_weight(self.k_layernorm),
            rotary_pos_emb,
            num_groups=self.num_query_groups_per_partition,
            head_size=self.hidden_size_per_attention_head,
            eps=self.config.layernorm_epsilon,
            interleaved=self.config.rotary_interleaved,
        )
        if self.drop_clean and isinstance(attention_bias, NoisyClean):
            query = query[: attention_bias.output_length // self.config.context_parallel_size]
        if isinstance(attention_bias, CachedKeys):
            key_BLGD, value_BLGD = attention_bias.exchange(
                self.layer_number, key.transpose(0, 1), value.transpose(0, 1)
            )
            key, value = key_BLGD.transpose(0, 1), value_BLGD.transpose(0, 1)
        attend = partial(self.core_attention, pattern=attention_bias)
        if self.checkpoint_core_attention and self.training:
            context = tensor_parallel.checkpoint(attend, False, query, key, value)
        else:
            context = attend(query, key, value)
        return project(self.linear_proj, context, self)

    def _norm_weight(self, norm: nn.Module | None) -> Tensor | None:
        if norm is None or isinstance(norm, IdentityOp):
            return None
        return norm.weight + 1 if self.config.layernorm_zero_centered_gamma else norm.weight


def rotary_table(angles: Tensor) -> Tensor:
    """Cosines and sines of Megatron's rotary angles [S, 1 or B, 1, T]: fp32 [2, S, 1 or B, 1, T]."""
    return torch.stack((angles.cos(), angles.sin())).float()


def split_norm_rotate(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    table: Tensor | None,
    *,
    num_groups: int,
    head_size: int,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [S, B, H, D], keys and values [S, B, G, D] from Megatron's fused projection.

    Args:
        qkv: [S, B, G * (R + 2) * D]: of each key/value head its R query heads, the key, the value.
        q_weight, k_weight: weights [D] of root mean square norms over a head; None normalises nothing.
        table: see :func:`rotary_table`; only the first T dimensions of a head turn.
        num_groups: G.
        head_size: D.
        eps: of the norms.
        interleaved: rotate neighbours instead of halves.
    """
    if qkv.is_cuda and not interleaved:
        from nemo_dllm.collections.diffusion.kernels import rotary

        return rotary.split_norm_rotate(qkv, q_weight, k_weight, table, num_groups, head_size, eps)
    heads = qkv.view(*qkv.shape[:2], num_groups, -1, head_size)
    query = heads[:, :, :, :-2].reshape(*qkv.shape[:2], -1, head_size)
    query = _rotate(_normalise(query, q_weight, eps), table, interleaved)
    key = _rotate(_normalise(heads[:, :, :, -2], k_weight, eps), table, interleaved)
    return query.to(qkv.dtype), key.to(qkv.dtype), heads[:, :, :, -1].contiguous()


def _normalise(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else F.rms_norm(x.float(), (x.size(-1),), weight.float(), eps)


def _rotate(x: Tensor, table: Tensor | None, interleaved: bool) -> Tensor:
    if table is None:
        return x
    cos, sin = table[0], table[1]
    turning, still = x[..., : cos.size(-1)], x[..., cos.size(-1) :]
    if interleaved:
        quarter_turn = torch.stack((-turning[..., 1::2], turning[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = turning.chunk(2, dim=-1)
        quarter_turn = torch.cat((-second, first), dim=-1)
    return torch.cat((turning * cos + quarter_turn * sin, still.to(cos.dtype)), dim=-1)
