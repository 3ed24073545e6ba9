"""Low-rank adapters (Hu et al., 2021) for any layers, Transformer Engine's or local ones."""

import re
from dataclasses import fields

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from nemo.collections.llm.peft.lora import LoRA as NeMoLoRA
from nemo.collections.llm.peft.lora import LoRALinear
from nemo.collections.llm.peft.utils import ParallelLinearAdapter
from torch import Tensor

from nemo_dllm.collections.diffusion.attention.layers import have_transformer_engine

ATTENTION_LAYERS = ["linear_qkv", "linear_proj"]
"""Target modules of models with experts."""

_EXPERT = re.compile(r"\bmlp\.experts\.")


class LoRA(NeMoLoRA):
    """NeMo's ``LoRA``, which without Transformer Engine refuses every layer, for Megatron's own linear layers too.

    Fields: see there; ``target_modules`` are ``linear_qkv``, ``linear_proj``, ``linear_fc1`` and ``linear_fc2``, or
    patterns of full names. Routed experts' layers cannot be adapted.
    """

    def __call__(self, model: torch.nn.Module) -> torch.nn.Module:
        """Freeze a model and wrap its layers, see :meth:`transform`."""
        super().__call__(model)
        for module in model.modules():
            if isinstance(module, LanguageModelEmbedding):
                module.register_forward_hook(_require_gradient)
        return model

    def transform(self, m: torch.nn.Module, name: str | None = None, prefix: str | None = None) -> torch.nn.Module:
        """Wrap a linear layer with an adapter; any other module stays.

        Raises:
            ValueError: for an expert's layer.
        """
        if _EXPERT.search(f"{prefix}.{name}") and self.match(m, name, prefix):
            raise ValueError(f"{self._experts_are_refused()}: it names {prefix}.{name}")
        if not isinstance(m, ColumnParallelLinear | RowParallelLinear):
            return super().transform(m, name, prefix) if have_transformer_engine() else m
        found = self.match(m, name, prefix)
        if found is None:
            return m
        adapter = ParallelLinearAdapter(
            m.input_size,
            m.output_size,
            self.dim,
            base_linear_name=found[1],
            activation="identity",
            norm_type=None,
            column_init_method=self.lora_A_init_method,
            row_init_method=self.lora_B_init_method,
            gather_output=False,
            input_is_parallel=isinstance(m, RowParallelLinear),
            dropout=self.dropout,
            dropout_position=self.dropout_position,
            model_parallel_config=m.config,
            alpha=self.alpha,
            is_expert=False,
            a2a_experimental=self.a2a_experimental,
            disable_sequence_parallel_comm=not m.config.sequence_parallel,
            dropout_recompute=self.dropout_recompute,
        )
        return LoRALinear(m, adapter)

    def check_fits(self, config: TransformerConfig) -> None:
        """Check, before anything is built, that no layer is adapted that cannot be.

        Raises:
            ValueError: where ``target_modules`` name layers of routed experts.
        """
        layers = range(config.num_layers if config.num_moe_experts else 0)
        for name in (f"decoder.layers.{layer}.mlp.experts.linear_fc{index}" for layer in layers for index in (1, 2)):
            prefix, _, linear = name.rpartition(".")
            if self.match(None, linear, prefix):
                raise ValueError(self._experts_are_refused())

    def _experts_are_refused(self) -> str:
        return (
            f"peft.target_modules={self.target_modules} would adapt layers of routed experts (mlp.experts), which is "
            f"not supported; set peft.target_modules={ATTENTION_LAYERS}, or to patterns of other layers"
        )


def _require_gradient(embedding: torch.nn.Module, inputs: tuple, output: Tensor) -> None:
    """Recomputed layers get no gradient where none of their inputs needs one, as behind frozen embeddings."""
    if torch.is_grad_enabled() and output.is_leaf:
        output.requires_grad_()


def add_adapters(module: torch.nn.Module, lora: NeMoLoRA) -> None:
    """Wrap the linear layers of a built model, on any device, whichever layers the adapters were trained with."""
    ours = LoRA(**{field.name: getattr(lora, field.name) for field in fields(NeMoLoRA) if field.init})

    def wrap(m: torch.nn.Module, name: str, prefix: str) -> torch.nn.Module:
        wrapped = ours.transform(m, name, prefix)
        if wrapped is not m:
            # Megatron builds an adapter where it would train it.
            wrapped.adapter.to(wrapped.to_wrap.weight.device)
        return wrapped

    _replace(module, wrap)


@torch.no_grad()
def merge_adapters(module: torch.nn.Module) -> None:
    """Add every adapter to the weight that it adapts, in fp32, and take it off."""

    def merge(m: torch.nn.Module, name: str, prefix: str) -> torch.nn.Module:
        if not isinstance(m, LoRALinear):
            return m
        adapter, weight = m.adapter, m.to_wrap.weight
        change = adapter.linear_out.weight.float() @ adapter.linear_in.weight.float() * (adapter.alpha / adapter.dim)
        weight.copy_(weight.float() + change)
        # What Transformer Engine's layers return for an adapter alone.
        for field in ("return_layernorm_output", "return_layernorm_output_gathered"):
            if hasattr(m.to_wrap, field):
                setattr(m.to_wrap, field, False)
        return m.to_wrap

    _replace(module, merge)


def _replace(module: torch.nn.Module, function, prefix: str = "") -> None:
    for name, child in list(module.named_children()):
        new = function(child, name, prefix)
        if new is not child:
            setattr(module, name, new)
        elif not isinstance(child, LoRALinear):
            _replace(child, function, f"{prefix}.{name}" if prefix else name)
