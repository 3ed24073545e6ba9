"""How tokens spread over the experts of a run, to every logger of the trainer.

Shape letters: N layers, C kinds of tokens, E experts, A auxiliary losses.
"""

import math

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from torch import Tensor

from nemo_dllm.collections.diffusion.models.balancing import TokenKind
from nemo_dllm.collections.diffusion.models.moe_layer import moe_layers

KINDS = {"masked": TokenKind.MASKED, "unmasked": TokenKind.VISIBLE, "clean": TokenKind.CLEAN}
"""Names in metrics; ``clean`` is the clean copy of block diffusion."""
LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")


def load_metrics(load_NCE: Tensor, num_groups: int = 4) -> dict[str, float]:
    """The load of experts by kind of token, in groups of layers.

    ``max`` and ``min`` are the highest and lowest load of an expert in units of the mean load (1 in balance, at most E
    / K), ``entropy`` that of the load in units of ln E (1 in balance): each a mean over the layers of a group. Kinds
    without tokens are left out.

    Args:
        load_NCE: tokens sent to each expert; zeros for dense layers.
        num_groups: runs of layers, as equal as can be.
    """
    metrics = {}
    sparse = load_NCE.sum((1, 2)).nonzero().flatten()
    for layers in sparse.tensor_split(min(num_groups, len(sparse)) or 1):
        for name, kind in KINDS.items():
            load_NE = load_NCE[layers, kind].double()
            load_NE = load_NE[load_NE.any(1)]
            if len(load_NE) == 0:
                continue
            share_NE = load_NE / load_NE.sum(1, keepdim=True)
            experts = share_NE.size(1)
            place = f"train/experts/layers_{layers[0] + 1}-{layers[-1] + 1}/{name}"
            metrics[f"{place}_max"] = (experts * share_NE.max(1).values).mean().item()
            metrics[f"{place}_min"] = (experts * share_NE.min(1).values).mean().item()
            entropy_N = -torch.special.xlogy(share_NE, share_NE).sum(1)
            metrics[f"{place}_entropy"] = (entropy_N / math.log(experts)).mean().item()
    return metrics


class ExpertLoad(pl.Callback):
    """Logs :func:`load_metrics` and the auxiliary losses, without their coefficients and averaged over layers.

    Each time over the steps since the last, every ``trainer.log_every_n_steps`` steps; nothing for a dense model.
    """

    def __init__(self):
        self.latest: dict[str, float] = {}
        """The metrics that were logged last."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget what came before."""
        for layer in moe_layers(trainer.model):
            layer.router.start_statistics()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Sum over all ranks, log and start anew."""
        config = pl_module.config
        if not config.num_moe_experts or trainer.global_step % trainer.log_every_n_steps:
            return
        routers = {layer.layer_number - 1: layer.router for layer in moe_layers(trainer.model)}
        device = torch.cuda.current_device()
        load_NCE = torch.zeros(config.num_layers, len(TokenKind), config.num_moe_experts, device=device)
        losses_NA2 = torch.zeros(config.num_layers, len(LOSSES), 2, device=device)
        sharing = parallel_state.get_tensor_and_context_parallel_group().size()
        for layer, router in routers.items():
            load_NCE[layer] = router.load_CE
            for index, name in enumerate(LOSSES):
                if name in router.losses:
                    # Ranks that hold parts of one row hold parts of its losses, and all of its share.
                    losses_NA2[layer, index, 0] = router.losses[name]
                    losses_NA2[layer, index, 1] = router.losses[f"{name}_share"] / sharing
            router.start_statistics()
        for value in (load_NCE, losses_NA2):
            torch.distributed.all_reduce(value)
        self.latest = load_metrics(load_NCE.cpu()) | _loss_metrics(losses_NA2.cpu())
        for logger in trainer.loggers:
            logger.log_metrics(self.latest, step=trainer.global_step)


def _loss_metrics(losses_NA2: Tensor) -> dict[str, float]:
    sums_NA, shares_NA = losses_NA2.unbind(-1)
    means_NA = sums_NA / shares_NA
    metrics = {
        f"train/experts/{name}": means_N.nanmean().item() for name, means_N in zip(LOSSES, means_NA.t(), strict=True)
    }
    return {name: value for name, value in metrics.items() if not math.isnan(value)}
