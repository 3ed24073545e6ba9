"""Building whole models on the CPU, with or without CUDA in the machine, to fill them from a checkpoint."""

import torch
from megatron.core import tensor_parallel
from nemo.lightning import _strategy_lib

from nemo_dllm.collections.diffusion.models.model import DiffusionModel


def build_on_cpu(model: DiffusionModel, dtype: torch.dtype | None = None) -> None:
    """Build the model with undefined weights: all are read from a checkpoint.

    Args:
        model: not built; it needs ``single_process``.
        dtype: of all weights, without a wrapper that casts inputs and outputs; None leaves it to the configuration,
            with norms in fp32.
    """
    if not tensor_parallel.get_cuda_rng_tracker().is_initialized():
        tensor_parallel.model_parallel_cuda_manual_seed(model.objective.seed)
    if dtype is not None:
        model.config.params_dtype = dtype
        model.config.bf16 = model.config.fp16 = False
    model.config.perform_initialization = False
    with _strategy_lib.megatron_cpu_init_context(model.config):
        model.configure_model()
    if dtype is not None:
        cast_parameters(model.module, dtype)


def cast_parameters(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give all parameters one dtype, in place: norms are fp32 until a precision plugin casts them."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
