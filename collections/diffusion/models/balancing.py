"""Which tokens count when experts are balanced, and the losses that balance them.

Shape letters: R rows of the model's input, L tokens of a row, S positions of the model's input, T tokens (S times R),
E experts, K chosen experts of a token, G groups of tokens.
"""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.attention.masks import NoisyClean, Pattern
from nemo_dllm.collections.diffusion.objectives.absorbing import Corruption
from nemo_dllm.collections.diffusion.objectives.losses import LOSS_NORMS


class TokenKind(IntEnum):
    """What a token of the model's input is."""

    PAD = 0
    CLEAN = 1
    """In the clean copy of [noised row | clean row]."""
    VISIBLE = 2
    """In the noised row, prompts included, and not masked."""
    MASKED = 3


BALANCE_OVER = {
    "real": (TokenKind.CLEAN, TokenKind.VISIBLE, TokenKind.MASKED),
    "noised": (TokenKind.VISIBLE, TokenKind.MASKED),
    "masked": (TokenKind.MASKED,),
}
"""Kinds of tokens over which experts are balanced, by name."""


class RoutedTokens(NamedTuple):
    """What routers must know of the tokens of a micro-batch."""

    kind_RS: Tensor
    """uint8, a :class:`TokenKind` for each position; under context parallelism of this rank's shard."""
    share_R: Tensor
    """fp32: each row's part of the loss's denominator; they sum to that of the whole micro-batch, on every rank."""


def routed_tokens(pattern: Pattern, noised: Corruption, *, loss_norm: str, views: int) -> RoutedTokens:
    """Describe the tokens of a micro-batch to the routers.

    Args:
        pattern: who attends to whom; its key mask tells pads.
        noised: the noised rows.
        loss_norm: what the loss is divided by.
        views: rows of a sample, which share its part of the denominator.
    """
    kind_RS = torch.where(noised.masked, TokenKind.MASKED, TokenKind.VISIBLE).to(torch.uint8)
    real_RL = pattern.key_mask_BL
    if isinstance(pattern, NoisyClean):
        kind_RS = torch.cat([kind_RS, torch.full_like(kind_RS, TokenKind.CLEAN)], dim=1)
        real_RS = None if real_RL is None else real_RL.repeat(1, 2)
    else:
        real_RS = real_RL
    if real_RS is not None:
        kind_RS = kind_RS.masked_fill(~real_RS, TokenKind.PAD)
    count = LOSS_NORMS[loss_norm]
    share_R = torch.stack([count(row_L[None])[1] for row_L in noised.maskable]).float() / views
    return RoutedTokens(kind_RS, share_R)


# Layers get nothing of a batch but its pattern, and get it again where they recompute their activations.
_ROUTED = "routed tokens"


def give_to_layers(pattern: Pattern, routed: RoutedTokens | None) -> None:
    """Let the layers that attend by ``pattern`` know of its tokens."""
    pattern.built[_ROUTED] = routed


def given_to_layer(pattern: object) -> RoutedTokens | None:
    """What :func:`give_to_layers` gave; None where nothing was."""
    return pattern.built.get(_ROUTED) if isinstance(pattern, Pattern) else None


class GroupLoad(NamedTuple):
    """How groups of tokens spread over the experts."""

    tokens_G: Tensor
    """fp32: tokens that count."""
    assigned_GE: Tensor
    """fp32: of these, the ones sent to each expert."""
    score_GE: Tensor
    """fp32: sums of their scores, which sum to one for a token."""

    def together(self) -> "GroupLoad":
        """All groups as one."""
        return GroupLoad(*(x.sum(0, keepdim=True) for x in self))


def row_load(counted_SR: Tensor, assigned_TE: Tensor, score_TE: Tensor) -> GroupLoad:
    """The load of each row.

    Args:
        counted_SR: bool, tokens that count.
        assigned_TE: bool, experts of each token.
        score_TE: fp32.
    """
    counted_SR1 = counted_SR[..., None].float()

    def row_sum(x_TE: Tensor) -> Tensor:
        return (x_TE.view(*counted_SR.shape, -1) * counted_SR1).sum(0)

    return GroupLoad(counted_SR1.sum((0, 2)), row_sum(assigned_TE), row_sum(score_TE))


def load_balancing_loss(load: GroupLoad, topk: int) -> Tensor:
    """E / K * sum over experts of (share of the tokens assigned * mean score): [G], fp32, 1 in balance.

    Fedus et al. (2021), "Switch Transformers", equation 4, for K experts per token. A group without tokens has none.
    """
    per_token_G1 = 1 / load.tokens_G.clamp(min=1)[:, None]
    return load.score_GE.size(1) / topk * (load.assigned_GE * per_token_G1 * load.score_GE * per_token_G1).sum(1)


def z_losses(logits_TE: Tensor, counted_SR: Tensor) -> Tensor:
    """Squared log-sum-exp of each token's router logits, summed over the tokens of a row that count: [R], fp32.

    Zoph et al. (2022), "ST-MoE", equation 5.
    """
    lse_SR = logits_TE.float().logsumexp(dim=-1).view_as(counted_SR)
    return (lse_SR.square() * counted_SR).sum(0)
