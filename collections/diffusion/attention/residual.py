"""The residual, to which the matrix product before it adds itself, where no gradient is asked for.

A product that is added to what its output held before costs no more than one that is not (Y <- Y + X W^T, torch's
``addmm_``), while an addition of its own reads two tensors and writes one. The residual is lost by that, so only one
that this very pass has made, and nobody else can have kept, is written to.

Shape letters: S positions, B samples, H hidden size, K inputs of a projection.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from megatron.core.extensions.transformer_engine import TERowParallelLinear
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook


class Product(NamedTuple):
    """The output of a projection, not computed yet."""

    input_SBK: Tensor
    weight_HK: Tensor


class _Pass(threading.local):
    """What this thread's pass through the layers may do."""

    adds_in_place = False
    made: Tensor | None = None
    """The last residual that the pass has made."""


_PASS = _Pass()


@contextmanager
def adding_in_place(decoder: TransformerBlock) -> Iterator[None]:
    """For one pass through the layers of ``decoder``: products may add themselves to the residuals of the pass.

    Its input, its output and all that is not a residual stay as they are. All is as without it in training, where
    gradients are recorded, for layers that do not compute plain products (tensor parallelism, fp8, autocast) or whose
    norms are recomputed, for which Megatron asks whether a projection's output has a gradient, and where a hook could
    keep a residual.
    """
    _PASS.adds_in_place = not (
        torch.is_grad_enabled()
        or decoder.training
        or any(map(torch.is_autocast_enabled, ("cuda", "cpu")))
        or not _is_plain(decoder.config)
        or _has_any_global_hook()
        or any(map(_is_watched, decoder.layers))
    )
    try:
        yield
    finally:
        _PASS.adds_in_place, _PASS.made = False, None


def _is_plain(config: TransformerConfig) -> bool:
    recomputed = config.recompute_modules if config.recompute_granularity == "selective" else ()
    return config.tensor_model_parallel_size == 1 and not (config.fp8 or config.fp4) and "layernorm" not in recomputed


def keeps_no_tensor(hook: Callable) -> Callable:
    """Mark a hook of a module that reads its inputs and outputs while it runs, and keeps none of them."""
    hook.keeps_no_tensor = True
    return hook


def _is_watched(module: nn.Module) -> bool:
    """True where a hook of the module or of a direct part could keep what it is given."""
    # A loop, as this is asked for every layer of every pass; mostly there are no hooks.
    for part in (module, *module._modules.values()):
        if part is None or not (part._forward_pre_hooks or part._forward_hooks):
            continue
        hooks = (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
        if not all(hasattr(hook, "keeps_no_tensor") for hook in hooks):
            return True
    return False


def project(linear: nn.Module, input_SBK: Tensor, owner: nn.Module) -> tuple[Tensor | Product, Tensor | None]:
    """``linear(input_SBK)``, left to the addition of the residual where that can do it.

    Args:
        linear: a part of ``owner``.
        input_SBK: [S, B, K].
        owner: the module that returns the result to its layer.

    Returns:
        The output [S, B, H] before its bias, or the product that it is, and the bias.
    """
    if not _PASS.adds_in_place or not _is_plain_product(linear) or _is_watched(owner):
        return linear(input_SBK)
    # Without a bias, Transformer Engine's layers have an empty one.
    bias = linear.bias if linear.bias is not None and linear.bias.numel() else None
    return Product(input_SBK, linear.weight), bias


def _is_plain_product(linear: nn.Module) -> bool:
    """Not for adapters around a layer and other subclasses, nor for weights that are quantized or sharded."""
    return type(linear) in (RowParallelLinear, TERowParallelLinear) and type(linear.weight) is nn.Parameter


def get_bias_product_add(training: bool, fused: bool) -> Callable:
    """Megatron's bias-dropout-add, which also takes what :func:`project` returns, and the first positions alone.

    The attention of a layer that drops the clean half returns no more; the residual is then cut to them.
    """
    bias_dropout_add = get_bias_dropout_add(training, fused)

    def bias_product_add(
        output_with_bias: tuple[Tensor | Product, Tensor | None], residual_SBH: Tensor, dropout: float
    ) -> Tensor:
        output, bias_H = output_with_bias
        is_product = isinstance(output, Product)
        positions = (output.input_SBK if is_product else output).size(0)
        # Of all positions, not even a view: the tensor itself says whose it is.
        if positions < residual_SBH.size(0):
            residual_SBH = residual_SBH[:positions]
        if is_product:
            total_SBH = _add_product(output, bias_H, residual_SBH)
        else:
            total_SBH = bias_dropout_add(output_with_bias, residual_SBH, dropout)
        if _PASS.adds_in_place:
            # As a layer does with what it returns; the next one is then given this very tensor.
            total_SBH = _PASS.made = make_viewless_tensor(total_SBH, requires_grad=False, keep_graph=False)
        return total_SBH

    return bias_product_add


# Megatron turns gradients on around the addition.
@torch.no_grad()
def _add_product(product: Product, bias_H: Tensor | None, residual_SBH: Tensor) -> Tensor:
    weight_HK = product.weight_HK
    rows_NK = product.input_SBK.reshape(-1, weight_HK.size(1))
    if residual_SBH is _PASS.made and residual_SBH.is_contiguous():
        total_SBH = residual_SBH
        total_SBH.view(-1, weight_HK.size(0)).addmm_(rows_NK, weight_HK.t())
    else:
        total_SBH = torch.addmm(residual_SBH.flatten(0, 1), rows_NK, weight_HK.t()).view_as(residual_SBH)
    return total_SBH if bias_H is None else total_SBH.add_(bias_H)
