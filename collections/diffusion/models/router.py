"""A router that Megatron lacks: softmax scores with a bias per expert.

Shape letters: T tokens (positions times samples), E experts, K chosen experts.
"""

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class BiasedSoftmaxRouter(TopKRouter):
    """Chooses the experts of the highest score, softmax over all experts plus the expert's bias, and weighs by it.

    So LLaDA-MoE's published class has it; Megatron's own biases belong to sigmoid scores, and to the choice alone. The
    bias is a buffer ``expert_bias``, fp32 [E], that training does not move. It has no auxiliary loss.
    """

    @classmethod
    def adopt(cls, router: TopKRouter) -> None:
        """Turn a built softmax router into this one, in place, its bias zero."""
        router.__class__ = cls
        del router.expert_bias
        router.register_buffer("expert_bias", torch.zeros(len(router.weight), device=router.weight.device))

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [T, E], zero for experts that were not chosen, and bool [T, E], True for chosen ones.

        Args:
            logits: [positions, samples, E].
        """
        logits_TE = self.apply_z_loss(logits.flatten(0, 1))
        scores_TE = logits_TE.softmax(dim=-1, dtype=torch.float32) + self.expert_bias
        chosen_TK = scores_TE.topk(self.topk, dim=-1).indices
        routing_map_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, chosen_TK, True)
        return (scores_TE * routing_map_TE).type_as(logits), routing_map_TE
