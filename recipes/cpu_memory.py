"""Whether a run fits a machine without a GPU, which would start to swap, and end processes of others."""

import lightning.pytorch as pl
import nemo.lightning as nl
import psutil
from lightning.pytorch.accelerators import CPUAccelerator

from nemo_dllm.collections.diffusion.models.fsdp import is_fully_sharded
from nemo_dllm.collections.diffusion.models.model import DiffusionModel
from nemo_dllm.recipes.builder import Layout, layout_of_strategy, strategy_fields
from nemo_dllm.recipes.memory import estimate_training_memory


def check_cpu_memory(model: DiffusionModel, data: pl.LightningDataModule, trainer: nl.Trainer) -> None:
    """Refuse what cannot fit: weights, gradients and optimizer state of all processes alone are more than there is.

    Raises:
        ValueError: says what it takes, and what there is.
    """
    vocab_size = model.config.vocab_size or getattr(data, "vocab_size", None)
    if not isinstance(trainer.accelerator, CPUAccelerator) or vocab_size is None:
        return
    strategy, processes = trainer.strategy, trainer.num_devices
    fields = {name: getattr(strategy, name, None) for name in strategy_fields(Layout())}
    fields["fsdp"] = "megatron" if is_fully_sharded(strategy) else None
    each = estimate_training_memory(
        model.config,
        model.objective,
        layout_of_strategy(fields, processes * trainer.num_nodes),
        seq_length=data.seq_length,
        micro_batch_size=data.micro_batch_size,
        global_batch_size=data.global_batch_size,
        vocab_size=vocab_size,
    )
    needed, there = processes * (each.weights + each.gradients + each.optimizer), psutil.virtual_memory().total
    if needed > there:
        raise ValueError(
            f"no GPU is here, and the processes of trainer.devices={processes} need at least {needed / 1e9:.0f} GB of "
            f"memory, of which this machine has {there / 1e9:.0f}; set trainer.devices=1, or take a smaller recipe, "
            "such as mdlm_tiny"
        )
