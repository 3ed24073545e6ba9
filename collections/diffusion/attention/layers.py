"""The layer specification of a diffusion model: Megatron's stock layers with another core attention."""

import copy
import importlib.util
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_dllm.collections.diffusion.attention.core import PatternAttention, eager, sdpa
from nemo_dllm.collections.diffusion.attention.experts import GroupedExperts, can_group
from nemo_dllm.collections.diffusion.attention.flex import check_no_dropout, flex
from nemo_dllm.collections.diffusion.attention.mlp import FusedMLP
from nemo_dllm.collections.diffusion.attention.norms import LOCAL_NORMS
from nemo_dllm.collections.diffusion.attention.residual import get_bias_product_add
from nemo_dllm.collections.diffusion.attention.self_attention import FusedSelfAttention

ATTENTION_BACKENDS = ("auto", "sdpa", "te", "flex", "eager")
TRANSFORMER_IMPLS = ("auto", "local", "transformer_engine")

# Fields of a config that ask for more than these layers do, and their plain values.
_PLAIN = {
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "softmax_type": "vanilla",
    "window_size": None,
}


def have_transformer_engine() -> bool:
    """True where Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def check_layer_choice(transformer_impl: str, attention_backend: str) -> None:
    """Check the two fields that choose a layer's implementation, before anything is built.

    Raises:
        ValueError: for an unknown name, where Transformer Engine is asked for and absent, and where FlexAttention is
            asked for without a GPU.
    """
    for field, value, known in (
        ("attention_backend", attention_backend, ATTENTION_BACKENDS),
        ("transformer_impl", transformer_impl, TRANSFORMER_IMPLS),
    ):
        if value not in known:
            raise ValueError(f"{field}={value!r} is unknown; choose from {', '.join(known)}")
    wants = [
        f"{field}={value!r}"
        for field, value in (("transformer_impl", transformer_impl), ("attention_backend", attention_backend))
        if value in ("transformer_engine", "te")
    ]
    if wants and not have_transformer_engine():
        raise ValueError(
            f"{' and '.join(wants)} needs Transformer Engine, which is not installed; "
            "install the extra `te` (pip install 'nemo-dllm[te]') or use 'auto'"
        )
    if attention_backend == "flex" and not torch.cuda.is_available():
        raise ValueError(
            "attention_backend='flex' needs a CUDA device: FlexAttention has no backward pass on a CPU; "
            "use 'auto', which takes it on a GPU only, or 'sdpa'"
        )


def diffusion_block_spec(
    config: TransformerConfig,
    vp_stage: int | None = None,
    *,
    transformer_impl: str = "auto",
    attention_backend: str = "auto",
) -> TransformerBlockSubmodules:
    """Layers of this pipeline stage, dense or mixture of experts, whose attention follows a pattern of ``masks``.

    The last layer of the model computes nothing for the clean half of [x_t | x_0] beyond its keys and values; see
    :func:`_drop_clean_half`.

    Args:
        config: the model's configuration.
        vp_stage: virtual pipeline stage, as Megatron passes it.
        transformer_impl: whose linear layers and norms: ``transformer_engine``, ``local`` (Megatron's own with
            torch norms) or ``auto`` (Transformer Engine where installed).
        attention_backend: what computes attention where every token sees every real token, and elsewhere:
            ``sdpa`` (torch's fused kernels; elsewhere with a dense mask), ``te`` (Transformer Engine; elsewhere
            FlexAttention), ``flex`` (FlexAttention), ``eager`` (spelled out, for tests) or ``auto``: ``te`` with
            Transformer Engine's layers and without context parallelism, else ``sdpa``; elsewhere FlexAttention on a
            GPU, ``sdpa`` on a CPU. Generation with blocks or a cache has :func:`~ranked.ranked` on a GPU, else
            ``sdpa``, for all of them but ``eager``; and evaluation ``sdpa`` for ``te``.

    Raises:
        ValueError: for what these layers do not compute, naming the field.
    """
    check_layer_choice(transformer_impl, attention_backend)
    for field, plain in _PLAIN.items():
        if getattr(config, field) not in (plain, None):
            raise ValueError(
                f"{field}={getattr(config, field)!r} is not supported by bidirectional layers; set {field}={plain!r}"
            )
    if config.qk_layernorm and config.normalization != "RMSNorm":
        raise ValueError(
            f"qk_layernorm=True with normalization={config.normalization!r} is not supported; only RMSNorm is"
        )
    use_te = transformer_impl == "transformer_engine" or (transformer_impl == "auto" and have_transformer_engine())
    # Kernels of Transformer Engine.
    config.moe_permute_fusion = bool(config.num_moe_experts) and use_te and torch.cuda.is_available()
    attention_backend = _backend_of(attention_backend, config, use_te)
    experts = GroupedExperts if config.moe_grouped_gemm and can_group(config) else None
    # Megatron's own grouped experts, outside Transformer Engine, need a package, and name their weights otherwise.
    megatron_config = copy.copy(config)
    megatron_config.moe_grouped_gemm &= use_te and experts is None
    block = get_gpt_decoder_block_spec(
        megatron_config, use_transformer_engine=use_te, normalization=config.normalization, vp_stage=vp_stage
    )
    norm = None if use_te else LOCAL_NORMS[config.normalization]
    swap = partial(_swap, core_attention=_core_attention(attention_backend), norm=norm, experts=experts)
    layer_specs = [swap(spec) for spec in block.layer_specs]
    is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    if layer_specs and is_last_stage and not config.sequence_parallel:
        _drop_clean_half(layer_specs[-1])
    return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=norm or block.layer_norm)


def _backend_of(attention_backend: str, config: TransformerConfig, use_te: bool) -> str:
    """``te`` in place of ``auto`` where it can be; refuses what a backend does not compute."""
    contexts = config.context_parallel_size
    if attention_backend == "te" and contexts > 1:
        raise ValueError(
            f"attention_backend='te' is not supported with context_parallel_size={contexts}: a rank's queries meet "
            "the keys of all; use 'auto', which then takes torch's kernels, 'sdpa' or 'flex'"
        )
    if attention_backend == "flex":
        check_no_dropout(config.attention_dropout)
    return "te" if attention_backend == "auto" and use_te and contexts == 1 else attention_backend


def _core_attention(backend: str) -> ModuleSpec:
    if backend == "te":
        from nemo_dllm.collections.diffusion.attention.transformer_engine import TEPatternAttention

        return ModuleSpec(TEPatternAttention)
    bidirectional, patterned = {
        "sdpa": (sdpa, sdpa),
        "eager": (eager, eager),
        "flex": (flex, flex),
        "auto": (sdpa, flex if torch.cuda.is_available() else sdpa),
    }[backend]
    return ModuleSpec(PatternAttention, params={"bidirectional": bidirectional, "patterned": patterned})


def _drop_clean_half(layer: ModuleSpec) -> None:
    """Let a layer return only what is read of [x_t | x_0], see ``NoisyClean.output_length``: mostly the noised half.

    Attention then has the noised positions for queries, and its output the length that all after it has. Sequence
    parallelism cuts the sequence across both halves, and the two lengths would not match on a rank.
    """
    attention = layer.submodules.self_attention
    attention.params = {**attention.params, "drop_clean": True}


def _swap(layer: ModuleSpec, *, core_attention: ModuleSpec, norm: type | None, experts: type | None) -> ModuleSpec:
    """Copy a layer's spec with our fused modules, another core attention and, given them, other norms and experts."""
    layer = copy.deepcopy(layer)
    attention = layer.submodules.self_attention
    attention.module = FusedSelfAttention
    attention.params = {**attention.params, "attn_mask_type": AttnMaskType.no_mask}
    attention.submodules.core_attention = core_attention
    layer.submodules.self_attn_bda = layer.submodules.mlp_bda = get_bias_product_add
    if layer.submodules.mlp.module is MLP:
        layer.submodules.mlp.module = FusedMLP
    elif experts is not None:
        layer.submodules.mlp.submodules.experts.module = experts
    if norm is not None:
        for submodules, names in (
            (layer.submodules, ("input_layernorm", "pre_mlp_layernorm")),
            (attention.submodules, ("q_layernorm", "k_layernorm")),
        ):
            for name in names:
                if getattr(submodules, name) is not IdentityOp:
                    setattr(submodules, name, norm)
    return layer
