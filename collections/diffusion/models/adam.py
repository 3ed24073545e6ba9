"""An AdamW for Megatron where neither Transformer Engine nor apex brings one.

Megatron's distributed optimizer saves and reshards optimizer state on the assumption that the step count stands in
the parameter groups, as in the fused Adam of those packages. torch's AdamW keeps a tensor ``step`` beside every
parameter, which breaks saving or loading.
"""

import functools

import torch
from torch.optim.adam import adam


class GroupStepAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) through torch's fused kernel, with one step count per parameter group.

    A parameter without a gradient stands still for that step, while the count of its group goes on; torch's AdamW would
    stop its count. The fused Adam of apex does the same. A rank whose shard of a group is empty counts with the others.

    Args:
        params: parameters or parameter groups, fp32.
        lr: learning rate.
        betas: decay of the first and second moment, in [0, 1).
        eps: added to the square root of the second moment.
        weight_decay: decoupled weight decay per unit of learning rate; L2 with ``adam_w_mode=False``.
        adam_w_mode: decouple the weight decay.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.adam_w_mode = adam_w_mode
        # torch's kernel wants one step tensor a parameter; they follow the group's count and are never saved.
        self._step_tensors: dict[int, tuple[int, list[torch.Tensor]]] = {}

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters that have a gradient."""
        loss = closure() if closure is not None else None
        for index, group in enumerate(self.param_groups):
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                if group["params"]:
                    group["step"] = group.get("step", 0) + 1
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            steps = self._steps_of(index, group.get("step", 0), params)
            adam(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                steps,
                fused=True,
                decoupled_weight_decay=self.adam_w_mode,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            group["step"] = group.get("step", 0) + 1
            self._step_tensors[index] = (group["step"], steps)
        return loss

    def _steps_of(self, index: int, step: int, params: list[torch.Tensor]) -> list[torch.Tensor]:
        known_step, steps = self._step_tensors.get(index, (None, []))
        if known_step == step and len(steps) == len(params):
            return steps
        device = params[0].device
        return list(torch.full((len(params),), float(step), dtype=torch.float32, device=device).unbind())


def use_group_step_adam() -> None:
    """Give Megatron this Adam where it would take torch's own."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    _load_fp32_shards()
    if optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer.Adam = distrib_optimizer.Adam = GroupStepAdamW
        optimizer.USING_PYTORCH_OPTIMIZER = False
        # The convention that this Adam follows: one step count in each parameter group.
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


@functools.cache
def _load_fp32_shards() -> None:
    """Let the distributed optimizer load a checkpoint of fp32 weights.

    Its shards of them are views of leaves that require gradients, and its default format copies into them as they are.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    load = DistributedOptimizer.load_parameter_state_from_dp_reshardable
    DistributedOptimizer.load_parameter_state_from_dp_reshardable = torch.no_grad()(load)
