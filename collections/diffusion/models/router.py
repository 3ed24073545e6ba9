"""Routers that know which tokens count.

Shape letters: R rows of the model's input, S positions on this rank, T tokens (S times R), E experts, K chosen experts,
C kinds of tokens.
"""

from collections.abc import Callable

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    apply_router_token_dropping,
    compute_routing_scores_for_aux_loss,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from nemo_dllm.collections.diffusion.models.balancing import (
    BALANCE_OVER,
    GroupLoad,
    RoutedTokens,
    TokenKind,
    load_balancing_loss,
    row_load,
    z_losses,
)

Choice = Callable[["BalancedRouter", Tensor], tuple[Tensor, Tensor]]
"""From router and logits [T, E] to weights [T, E], zero for experts that were not chosen, and chosen ones, bool."""


def choose_top(router: "BalancedRouter", logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Megatron's choice, by the fields ``moe_router_*`` of the configuration."""
    config = router.config
    if router.routing_type == "sinkhorn":
        return router.sinkhorn_load_balancing(logits_TE)
    return topk_routing_with_score_function(
        logits_TE,
        router.topk,
        use_pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        scaling_factor=config.moe_router_topk_scaling_factor,
        score_function=router.score_function,
        expert_bias=router.expert_bias,
        fused=config.moe_router_fusion,
    )


def choose_biased_softmax(router: "BalancedRouter", logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of the highest score, softmax over all experts plus the expert's bias, weighed by it.

    So LLaDA-MoE's published class has it; Megatron's own biases belong to sigmoid scores, and to the choice alone.
    """
    scores_TE = logits_TE.softmax(dim=-1, dtype=torch.float32) + router.expert_bias
    chosen_TK = scores_TE.topk(router.topk, dim=-1).indices
    map_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, chosen_TK, True)
    return (scores_TE * map_TE).type_as(logits_TE), map_TE


class BalancedRouter(TopKRouter):
    """Megatron's router, whose auxiliary losses, expert biases and statistics leave out tokens that do not count.

    An auxiliary loss enters the objective as its coefficient times its mean, over all rows of a global batch, whatever
    the loss is divided by: each row is weighed by its part of the loss's denominator. So ``seq_aux_loss`` and the
    z-loss are the same however the global batch is split; ``aux_loss`` is that of micro-batches, by definition.

    It adds no parameter to Megatron's, and nothing that a checkpoint holds, so any built router becomes one by
    :meth:`adopt`.
    """

    balance_over: str
    choose: Choice
    routed: RoutedTokens | None
    """Of the micro-batch that comes next; None: all tokens count, and each row as often as it has positions."""
    load_CE: Tensor
    """fp32: tokens of each kind sent to each expert since :meth:`start_statistics`, on this rank."""
    losses: dict[str, Tensor]
    """Auxiliary losses without coefficient, weighed by shares of the loss's denominator, and summed; and these."""

    @classmethod
    def adopt(cls, router: TopKRouter, balance_over: str = "real", choose: Choice = choose_top) -> None:
        """Turn a built router into this one, in place.

        Args:
            router: Megatron's; its weights and biases stay.
            balance_over: a name of ``BALANCE_OVER``.
            choose: how a token's experts are chosen.
        """
        router.__class__ = cls
        router.balance_over, router.choose, router.routed = balance_over, choose, None
        router.start_statistics()

    def start_statistics(self) -> None:
        """Forget the load and the losses so far."""
        # A buffer follows the weights to their device; not a persistent one, so no checkpoint holds it.
        load_CE = torch.zeros(len(TokenKind), self.num_experts, device=self.weight.device)
        self.register_buffer("load_CE", load_CE, persistent=False)
        self.losses = {}

    def _maintain_float32_expert_bias(self) -> None:
        """As Megatron's, and counts of tokens too: bf16 cannot count beyond 256."""
        for name, buffer in self.named_buffers():
            if buffer.dtype != torch.float32:
                setattr(self, name, buffer.float())

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [T, E], zero for experts that were not chosen, and bool [T, E], True for chosen ones.

        Args:
            logits: [S, R, E].
        """
        routed = self._here(logits)
        counted_SR = torch.stack([routed.kind_RS == kind for kind in BALANCE_OVER[self.balance_over]]).any(0).t()
        logits_TE = logits.flatten(0, 1)
        # Not in the first pass of recomputed activations, nor in evaluation.
        learns = self.training and torch.is_grad_enabled()
        if learns and self.config.moe_z_loss_coeff:
            logits_TE = self._add_z_loss(logits_TE, counted_SR, routed.share_R)
        probs_TE, map_TE = self.choose(self, logits_TE)
        if self.config.moe_expert_capacity_factor is not None:
            probs_TE, map_TE = self._drop(probs_TE, map_TE, routed.kind_RS.t().flatten() != TokenKind.PAD)
        if learns and self.is_aux_loss_enabled():
            assigned_TE, scores_TE = compute_routing_scores_for_aux_loss(logits_TE, self.topk, self.score_function)
            load = self._over_ranks(row_load(counted_SR, assigned_TE, scores_TE))
            probs_TE = self._add_balancing_losses(probs_TE, load, routed.share_R)
        if learns:
            self._count(routed.kind_RS, map_TE)
        return probs_TE, map_TE

    def _here(self, logits: Tensor) -> RoutedTokens:
        """The tokens on this rank."""
        positions, rows, _ = logits.shape
        if self.routed is None:
            kind_RS = torch.full((rows, positions), TokenKind.MASKED, dtype=torch.uint8, device=logits.device)
            return RoutedTokens(kind_RS, torch.full((rows,), float(positions), device=logits.device))
        # The last layer may get the first positions only.
        start = self.tp_group.rank() * positions if self.config.sequence_parallel else 0
        return self.routed._replace(kind_RS=self.routed.kind_RS[:, start : start + positions])

    def _over_ranks(self, load: GroupLoad) -> GroupLoad:
        """Counts of all ranks that hold a part of the rows; scores, which carry gradients, stay local."""
        if self.tp_cp_group.size() == 1:
            return load
        counts = torch.cat([load.tokens_G[:, None], load.assigned_GE], dim=1)
        counts = reduce_from_tensor_model_parallel_region(counts, self.tp_cp_group)
        return load._replace(tokens_G=counts[:, 0], assigned_GE=counts[:, 1:])

    def _add_z_loss(self, logits_TE: Tensor, counted_SR: Tensor, share_R: Tensor) -> Tensor:
        tokens_R = counted_SR.sum(0).float()
        if self.tp_cp_group.size() > 1:
            tokens_R = reduce_from_tensor_model_parallel_region(tokens_R, self.tp_cp_group)
        loss = (z_losses(logits_TE, counted_SR) / tokens_R.clamp(min=1) * share_R).sum()
        return self._attach(logits_TE, "z_loss", loss, self.config.moe_z_loss_coeff, share_R)

    def _add_balancing_losses(self, probs_TE: Tensor, load: GroupLoad, share_R: Tensor) -> Tensor:
        whole = load.together()
        loads = {
            "seq_aux_loss": lambda: (load, share_R),
            "aux_loss": lambda: (whole, share_R.sum()),
            "global_aux_loss": lambda: (self._with_step_so_far(whole), share_R.sum()),
        }
        for name, groups in loads.items():
            coefficient = self.get_aux_loss_coeff(name)
            if coefficient:
                group_load, share_G = groups()
                loss = (load_balancing_loss(group_load, self.topk) * share_G).sum()
                probs_TE = self._attach(probs_TE, name, loss, coefficient, share_R)
        return probs_TE

    def _with_step_so_far(self, load: GroupLoad) -> GroupLoad:
        """The assignments of all ranks and of all micro-batches of the step up to this one; Megatron resets them."""
        with torch.no_grad():
            counts = torch.cat([load.tokens_G, load.assigned_GE[0]])
            # These of ranks with parts of the same rows are summed already.
            counts = counts / self.tp_cp_group.size()
            torch.distributed.all_reduce(counts, group=self.tp_dp_cp_group)
            self.ga_steps += counts[0]
            self.global_tokens_per_expert += counts[1:]
        # Mean assignments, as many as the local tokens: the scores are of these.
        scale = load.tokens_G / self.ga_steps.clamp(min=1)
        return load._replace(assigned_GE=self.global_tokens_per_expert * scale[:, None])

    def _attach(self, carrier: Tensor, name: str, loss: Tensor, coefficient: float, share_R: Tensor) -> Tensor:
        """Give the backward pass through ``carrier`` the gradient of a loss; gradients are later divided by shares."""
        for key, value in ((name, loss.detach()), (f"{name}_share", share_R.sum())):
            self.losses[key] = self.losses.get(key, 0) + value
        return MoEAuxLossAutoScaler.apply(carrier, loss * coefficient)

    def _drop(self, probs_TE: Tensor, map_TE: Tensor, real_T: Tensor) -> tuple[Tensor, Tensor]:
        """Keep as many tokens per expert as its capacity; pads go first."""
        config = self.config
        return apply_router_token_dropping(
            probs_TE * real_T[:, None],
            map_TE & real_T[:, None],
            router_topk=self.topk,
            capacity_factor=config.moe_expert_capacity_factor,
            drop_policy=config.moe_token_drop_policy,
            pad_to_capacity=config.moe_pad_expert_input_to_capacity,
        )

    @torch.no_grad()
    def _count(self, kind_RS: Tensor, map_TE: Tensor) -> None:
        kind_T = kind_RS.t().flatten()
        is_kind_CT = torch.stack([kind_T == kind for kind in TokenKind]).float()
        load_CE = is_kind_CT @ map_TE.float()
        self.load_CE += load_CE
        if self.local_tokens_per_expert is not None:
            self.local_tokens_per_expert += load_CE[list(BALANCE_OVER[self.balance_over])].sum(0)
