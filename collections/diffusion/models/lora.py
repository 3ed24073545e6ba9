"""Low-rank adapters (Hu et al., 2021) for any layers, Transformer Engine's or local ones."""

from dataclasses import fields

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from nemo.collections.llm.peft.lora import LoRA as NeMoLoRA
from nemo.collections.llm.peft.lora import LoRALinear
from nemo.collections.llm.peft.utils import ParallelLinearAdapter, is_expert_linear

from nemo_dllm.collections.diffusion.attention.layers import have_transformer_engine


class LoRA(NeMoLoRA):
    """NeMo's ``LoRA``, which without Transformer Engine refuses every layer, for Megatron's own linear layers too.

    Fields: see there; ``target_modules`` are ``linear_qkv``, ``linear_proj``, ``linear_fc1`` and ``linear_fc2``.
    """

    def transform(self, m: torch.nn.Module, name: str | None = None, prefix: str | None = None) -> torch.nn.Module:
        """Wrap a linear layer with an adapter; any other module stays."""
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
            is_expert=is_expert_linear(found[1]),
            a2a_experimental=self.a2a_experimental,
            disable_sequence_parallel_comm=not m.config.sequence_parallel,
            dropout_recompute=self.dropout_recompute,
        )
        return LoRALinear(m, adapter)


def add_adapters(module: torch.nn.Module, lora: NeMoLoRA) -> None:
    """Wrap the linear layers of a built model, whichever layers the adapters were trained with."""
    ours = LoRA(**{field.name: getattr(lora, field.name) for field in fields(NeMoLoRA) if field.init})
    _replace(module, ours.transform)


@torch.no_grad()
def merge_adapters(module: torch.nn.Module) -> None:
    """Add every adapter to the weight that it adapts, in fp32, and take it off."""

    def merge(m: torch.nn.Module, name: str, prefix: str) -> torch.nn.Module:
        if not isinstance(m, LoRALinear):
            return m
        adapter, weight = m.adapter, m.to_wrap.weight
        change = adapter.linear_out.weight.float() @ adapter.linear_in.weight.float() * (adapter.alpha / adapter.dim)
        weight.copy_(weight.float() + change)
        return m.to_wrap

    _replace(module, merge)


def _replace(module: torch.nn.Module, function, prefix: str = "") -> None:
    for name, child in list(module.named_children()):
        new = function(child, name, prefix)
        if new is not child:
            setattr(module, name, new)
        elif not isinstance(child, LoRALinear):
            _replace(child, function, f"{prefix}.{name}" if prefix else name)
