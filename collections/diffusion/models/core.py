"""The Megatron model of a diffusion language model.

Shape letters: B samples, S positions, N target positions, H hidden size, V vocabulary rows of this rank, D rotary
dimensions.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from megatron.core.models.gpt.gpt_model import GPTModel as MegatronGPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from nemo_dllm.collections.diffusion.attention.cached_keys import CachedKeys
from nemo_dllm.collections.diffusion.attention.context import take_shard
from nemo_dllm.collections.diffusion.attention.masks import (
    Bidirectional,
    NoisyClean,
    Pattern,
    check_shape,
    token_positions,
)
from nemo_dllm.collections.diffusion.attention.residual import adding_in_place
from nemo_dllm.collections.diffusion.attention.self_attention import rotary_table
from nemo_dllm.collections.diffusion.models.head import DEFAULT_CHUNK, HeadOutput, VocabularyShard, masked_cross_entropy

POSITION_EMBEDDINGS = ("rope", "learned_absolute", "none")


class Targets(NamedTuple):
    """The positions that the head scores, in any order."""

    row_N: Tensor
    """int64: row of each target's *logit* in the hidden states [S, B] flattened, i.e. position * B + sample."""
    token_N: Tensor
    """int64: the clean token to predict."""
    loss_weight_N: Tensor
    """fp32: weight of its negative log-likelihood in the loss."""


# Layers of several experts number theirs.
_EXTRA_STATE = re.compile(r"_extra_state\d*$")


def _forgive_missing_extra_state(module: torch.nn.Module, incompatible_keys) -> None:
    missing = [name for name in incompatible_keys.missing_keys if not _EXTRA_STATE.search(name)]
    incompatible_keys.missing_keys[:] = missing


def _give_experts_an_optimizer_of_their_own(model: torch.nn.Module) -> None:
    """As expert parallelism does: without it, Megatron saves one optimizer, and could not go on from it with two."""
    for layer in model.decoder.layers:
        for parameter in getattr(layer.mlp, "experts", torch.nn.Module()).parameters():
            parameter.allreduce = False


class ScoringOutputLayer(ColumnParallelLinear):
    """Megatron's output layer that also hands its weight to a head of ours.

    The head is called through the layer, because what waits for a module's call, as fully sharded data parallelism
    does to gather its weight, would never happen for one whose weight is only read.
    """

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        score: Callable[[Tensor, Tensor | None], HeadOutput] | None = None,
    ):
        """As Megatron's, or ``score(input_, own weight or None where it is the embedding's)``."""
        if score is None:
            return super().forward(input_, weight, runtime_gather_output)
        return score(input_, self.weight)


class DiffusionCore(MegatronGPTModel):
    """Megatron's GPT with explicit positions and a head that scores chosen positions only.

    It adds no parameter and no state beyond ``logical_vocab_size``, so any built ``GPTModel`` becomes one by
    :meth:`adopt`: whatever a NeMo config does while building (rope scaling, embedding multipliers) stays.
    """

    logical_vocab_size: int

    @classmethod
    def adopt(cls, model: MegatronGPTModel, logical_vocab_size: int, *, fully_sharded: bool = False) -> "DiffusionCore":
        """Turn a built Megatron GPT into a diffusion core, in place.

        Args:
            model: the model; its parameters are kept.
            logical_vocab_size: number of tokens; rows beyond are padding that never takes probability.
            fully_sharded: the model is going to be sharded by Megatron-FSDP, which knows one optimizer only.

        Raises:
            ValueError: for position embeddings that the core cannot compute.
        """
        if model.position_embedding_type not in POSITION_EMBEDDINGS:
            raise ValueError(
                f"position_embedding_type={model.position_embedding_type!r} is not supported; "
                f"choose from {', '.join(POSITION_EMBEDDINGS)}"
            )
        model.__class__ = cls
        model.logical_vocab_size = logical_vocab_size
        if model.post_process:
            model.output_layer.__class__ = ScoringOutputLayer
        if not fully_sharded:
            _give_experts_an_optimizer_of_their_own(model)
        model.register_load_state_dict_post_hook(_forgive_missing_extra_state)
        return model

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """As Megatron's, without Transformer Engine's extra state, which holds nothing but the scales of fp8.

        A checkpoint is then the same whether its layers were Transformer Engine's or local.
        """
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.config.fp8:
            return state
        return {name: value for name, value in state.items() if not _EXTRA_STATE.search(name)}

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | Pattern | CachedKeys | None = None,
        targets: Targets | None = None,
        logits_at_N: Tensor | None = None,
    ) -> Tensor | HeadOutput:
        """Run this pipeline stage.

        Under context parallelism inputs, targets and results are of this rank's shard (``attention.context``); the
        pattern is that of all positions.

        Args:
            input_ids: int64 [B, S].
            position_ids: int64 [S] (shared by all samples) or [B, S]; None counts 0..S-1, in both halves of
                [x_t | x_0] alike and in every packed document anew.
            attention_mask: who attends to whom: a pattern of ``attention.masks``, or a key mask [B, S] (bool or
                integers of 0 and 1, True = real token) that stands for ``Bidirectional(key_mask)``; None =
                ``Bidirectional()``. With :class:`CachedKeys`, which ``position_ids`` must come with, the input is some
                tokens of each text only.
            targets: positions to score; None asks for logits.
            logits_at_N: int64, rows of the hidden states as in :class:`Targets`; None asks for all logits.

        Returns:
            Hidden states [S, B, H] on every stage but the last. There :class:`HeadOutput` for ``targets``, else
            logits [B, S, logical vocabulary] (all vocabulary shards gathered), or [N, logical vocabulary] for
            ``logits_at_N``. Under :class:`NoisyClean` with S = 2L the last stage's result is of the noised half alone:
            logits [B, L, ...]. That half comes first, so the rows of ``targets`` are what they were: position * B +
            sample, position in [0, L). With ``clean_output`` it is of both halves, and position is in [0, 2L).

        Raises:
            ValueError: for a pattern of another shape than the input.
        """
        hidden_SBH = self.encode(input_ids, position_ids, attention_mask)
        if not self.post_process:
            return hidden_SBH
        if targets is not None:
            return self._score(hidden_SBH, targets)
        if logits_at_N is None and isinstance(attention_mask, NoisyClean):
            return self.logits(hidden_SBH)[:, : attention_mask.output_length // self.pg_collection.cp.size()]
        return self.logits(hidden_SBH, logits_at_N)

    def encode(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | Pattern | CachedKeys | None = None,
    ) -> Tensor:
        """Hidden states [S, B, H] of this pipeline stage, on the last one after the final norm; see :meth:`forward`."""
        pattern = attention_mask
        if pattern is None or isinstance(pattern, Tensor):
            pattern = Bidirectional(pattern)
        contexts = self.pg_collection.cp.size()
        if not isinstance(pattern, CachedKeys):
            check_shape(pattern, len(input_ids), input_ids.size(1) * contexts)
            if position_ids is None:
                position_ids = token_positions(pattern, input_ids.device)
                if contexts > 1:
                    position_ids = self._shard_of_positions(pattern, position_ids, input_ids)
        with adding_in_place(self.decoder):
            return self.decoder(
                hidden_states=self._embed(input_ids, position_ids) if self.pre_process else None,
                # A pattern is no tensor: see FusedSelfAttention.
                attention_mask=None,
                attention_bias=pattern,
                rotary_pos_emb=self._rotary_table(input_ids.size(1), position_ids),
            )

    def _shard_of_positions(self, pattern: Pattern, position_ids: Tensor | None, input_ids: Tensor) -> Tensor:
        group = self.pg_collection.cp
        if position_ids is None:
            position_ids = torch.arange(input_ids.size(1) * group.size(), device=input_ids.device)
        return take_shard(position_ids, position_ids.dim() - 1, pattern, group.rank(), group.size())

    def _embed(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        if position_ids is None and self.position_embedding_type == "learned_absolute":
            position_ids = torch.arange(input_ids.size(1), device=input_ids.device)
        return self.embedding(input_ids, position_ids)

    def _rotary_table(self, length: int, position_ids: Tensor | None) -> Tensor | None:
        """Cosines and sines, see ``rotary_table``. Megatron's angles count 0..S-1 whatever the positions are."""
        if self.position_embedding_type != "rope":
            return None
        rope = self.rotary_pos_emb
        if position_ids is None:
            return rotary_table(rope(length))
        # Megatron may have made them on the CPU.
        rope.inv_freq = rope.inv_freq.to(position_ids.device)
        positions_SB = (position_ids[None] if position_ids.dim() == 1 else position_ids).t().float()
        if rope.seq_len_interpolation_factor is not None:
            positions_SB = positions_SB / rope.seq_len_interpolation_factor
        angles = positions_SB[:, :, None, None] * rope.inv_freq
        if rope.rotary_interleaved:
            return rotary_table(torch.stack((angles, angles), dim=-1).flatten(-2))
        return rotary_table(torch.cat((angles, angles), dim=-1))

    def logits(self, hidden_SBH: Tensor, at_N: Tensor | None = None) -> Tensor:
        """Logits [B, S, logical vocabulary] of hidden states, or [N, logical vocabulary]; see :meth:`forward`."""
        if at_N is not None:
            return self.logits(hidden_SBH.flatten(0, 1)[at_N, None])[0]
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits_SBV, _ = self.output_layer(hidden_SBH, weight=weight, runtime_gather_output=True)
        return logits_SBV[..., : self.logical_vocab_size].transpose(0, 1).contiguous()

    def _score(self, hidden_SBH: Tensor, targets: Targets) -> HeadOutput:
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, group=group)
        else:
            hidden_SBH = copy_to_tensor_model_parallel_region(hidden_SBH, group=group)
        hidden_NH = hidden_SBH.flatten(0, 1).index_select(0, targets.row_N)

        def score(hidden_NH: Tensor, weight_VH: Tensor | None) -> HeadOutput:
            if self.share_embeddings_and_output_weights:
                weight_VH = self.shared_embedding_or_output_weight()
            start = group.rank() * weight_VH.size(0)
            shard = VocabularyShard(
                start=start,
                valid=min(max(self.logical_vocab_size - start, 0), weight_VH.size(0)),
                group=group if group.size() > 1 else None,
            )
            return masked_cross_entropy(
                hidden_NH, weight_VH, targets.token_N, targets.loss_weight_N, shard, chunk=DEFAULT_CHUNK
            )

        return self.output_layer(hidden_NH, score=score)
