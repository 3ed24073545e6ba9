"""The layer specification of a diffusion model: Megatron's stock layers with another core attention."""

import copy
import importlib.util
from functools import partial

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_dllm.collections.diffusion.attention.core import PatternAttention, eager, sdpa
from nemo_dllm.collections.diffusion.attention.mlp import FusedMLP
from nemo_dllm.collections.diffusion.attention.norms import LOCAL_NORMS
from nemo_dllm.collections.diffusion.attention.self_attention import FusedSelfAttention

ATTENTION_BACKENDS = ("auto", "sdpa", "te", "eager")
TRANSFORMER_IMPLS = ("auto", "local", "transformer_engine")

# Fields of a config that ask for more than these layers do, and their plain values.
_PLAIN = {
    "context_parallel_size": 1,
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
        ValueError: for an unknown name, and where Transformer Engine is asked for and absent.
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


def diffusion_block_spec(
    config: TransformerConfig,
    vp_stage: int | None = None,
    *,
    transformer_impl: str = "auto",
    attention_backend: str = "auto",
) -> TransformerBlockSubmodules:
    """Layers of this pipeline stage, dense or mixture of experts, with bidirectional core attention.

    Args:
        config: the model's configuration.
        vp_stage: virtual pipeline stage, as Megatron passes it.
        transformer_impl: whose linear layers and norms: ``transformer_engine``, ``local`` (Megatron's own with
            torch norms) or ``auto`` (Transformer Engine where installed).
        attention_backend: ``te``, ``sdpa`` (torch's fused kernels), ``eager`` (spelled out, for tests) or ``auto``
            (``te`` with Transformer Engine's layers, else ``sdpa``).
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
    if not use_te:
        # Both are kernels of Transformer Engine; without it experts run one after another.
        config.moe_grouped_gemm = config.moe_permute_fusion = False
    if attention_backend == "auto":
        attention_backend = "te" if use_te else "sdpa"
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=use_te, normalization=config.normalization, vp_stage=vp_stage
    )
    norm = None if use_te else LOCAL_NORMS[config.normalization]
    swap = partial(_swap, core_attention=_core_attention(attention_backend), norm=norm)
    return TransformerBlockSubmodules(
        layer_specs=[swap(spec) for spec in block.layer_specs], layer_norm=norm or block.layer_norm
    )


def _core_attention(backend: str) -> ModuleSpec:
    if backend == "te":
        from nemo_dllm.collections.diffusion.attention.transformer_engine import TEPatternAttention

        return ModuleSpec(TEPatternAttention)
    kernel = {"sdpa": sdpa, "eager": eager}[backend]
    return ModuleSpec(PatternAttention, params={"bidirectional": kernel, "patterned": kernel})


def _swap(layer: ModuleSpec, *, core_attention: ModuleSpec, norm: type | None) -> ModuleSpec:
    """Copy a layer's spec with our fused modules, another core attention and, given one, another norm."""
    layer = copy.deepcopy(layer)
    attention = layer.submodules.self_attention
    attention.module = FusedSelfAttention
    attention.params = {**attention.params, "attn_mask_type": AttnMaskType.no_mask}
    attention.submodules.core_attention = core_attention
    if layer.submodules.mlp.module is MLP:
        layer.submodules.mlp.module = FusedMLP
    if norm is not None:
        for submodules, names in (
            (layer.submodules, ("input_layernorm", "pre_mlp_layernorm")),
            (attention.submodules, ("q_layernorm", "k_layernorm")),
        ):
            for name in names:
                if getattr(submodules, name) is not IdentityOp:
                    setattr(submodules, name, norm)
    return layer
