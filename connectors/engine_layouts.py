"""What serving engines load, as data: fields of config.json, tensors by name and shape, and the mask token they assume.

Read from the engines' sources: SGLang's srt/dllm/config.py and srt/models/{sdar,sdar_moe,llada2}.py, LMDeploy's
pytorch/configurations/{default,sdar}.py and pytorch/models/{sdar,sdar_moe}.py, vLLM's model registry.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LAYER = "model.layers.{layer}."


class TensorRow(NamedTuple):
    """Tensors of one kind."""

    name: str
    """With ``{layer}`` and ``{expert}`` where there are several."""
    shape: tuple[str, ...]
    """Names of sizes, see ``Layout.sizes``."""
    of: str = "layers"
    """Where it is: model, head (absent where tied), layers, dense or sparse ones, each expert, or their shared one."""


@dataclass(frozen=True)
class Layout:
    """What an engine reads of an architecture.

    Args:
        rows: its tensors.
        required: fields of config.json without which loading fails.
        silent: fields without which another model's value is taken.
        values: fields that must have one of some values.
        is_sparse: (config.json, layer) -> whether the engine looks for experts in that layer.
        mask_token_id: what it shows at holes, whatever config.json says.
        block_size: tokens per block where nothing else is said; None where it has to be said.
    """

    rows: tuple[TensorRow, ...]
    required: frozenset[str]
    silent: frozenset[str]
    mask_token_id: int
    block_size: int | None = None
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    is_sparse: Callable[[Mapping[str, Any], int], bool] = lambda config, layer: False

    @property
    def fields(self) -> frozenset[str]:
        """All fields that config.json has to have."""
        return self.required | self.silent

    def shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by name, for a config.json with all ``fields``."""
        sizes = _sizes(config)
        return {
            name: tuple(sizes[size] for size in row.shape) for row in self.rows for name in self._names(row, config)
        }

    def _names(self, row: TensorRow, config: Mapping[str, Any]) -> Iterator[str]:
        if row.of in ("model", "head"):
            yield from () if row.of == "head" and config["tie_word_embeddings"] else (row.name,)
            return
        for layer in range(config["num_hidden_layers"]):
            sparse = self.is_sparse(config, layer)
            here = {"layers": 1, "dense": not sparse, "sparse": sparse}
            here |= {"expert": sparse * (config.get("num_experts") or 0)}
            here |= {"shared": sparse and bool(config.get("num_shared_experts"))}
            yield from (row.name.format(layer=layer, expert=expert) for expert in range(here[row.of]))


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    heads, groups, head = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    expert = config.get("moe_intermediate_size") or 0
    return {
        "vocab": config["vocab_size"],
        "hidden": config["hidden_size"],
        "inner": config["intermediate_size"],
        "head": head,
        "queries": heads * head,
        "keys": groups * head,
        "queries_keys_values": (heads + 2 * groups) * head,
        "experts": config.get("num_experts") or 0,
        "expert": expert,
        "shared": (config.get("num_shared_experts") or 0) * expert,
    }


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _ends(embedding: str) -> tuple[TensorRow, ...]:
    return (
        TensorRow(f"model.{embedding}.weight", ("vocab", "hidden"), "model"),
        TensorRow("model.norm.weight", ("hidden",), "model"),
        TensorRow("lm_head.weight", ("vocab", "hidden"), "head"),
        TensorRow(f"{LAYER}input_layernorm.weight", ("hidden",)),
        TensorRow(f"{LAYER}post_attention_layernorm.weight", ("hidden",)),
    )


def _mlp(prefix: str, inner: str, of: str) -> tuple[TensorRow, ...]:
    return (
        TensorRow(f"{LAYER}{prefix}.gate_proj.weight", (inner, "hidden"), of),
        TensorRow(f"{LAYER}{prefix}.up_proj.weight", (inner, "hidden"), of),
        TensorRow(f"{LAYER}{prefix}.down_proj.weight", ("hidden", inner), of),
    )


_EXPERTS = (
    TensorRow(f"{LAYER}mlp.gate.weight", ("experts", "hidden"), "sparse"),
    *_mlp("mlp.experts.{expert}", "expert", "expert"),
)
_SDAR = (
    *_ends("embed_tokens"),
    TensorRow(f"{LAYER}self_attn.q_proj.weight", ("queries", "hidden")),
    TensorRow(f"{LAYER}self_attn.k_proj.weight", ("keys", "hidden")),
    TensorRow(f"{LAYER}self_attn.v_proj.weight", ("keys", "hidden")),
    TensorRow(f"{LAYER}self_attn.o_proj.weight", ("hidden", "queries")),
    TensorRow(f"{LAYER}self_attn.q_norm.weight", ("head",)),
    TensorRow(f"{LAYER}self_attn.k_norm.weight", ("head",)),
    *_mlp("mlp", "inner", "dense"),
)
_SDAR_MOE = (*_SDAR, *_EXPERTS)
_LLADA2 = (
    *_ends("word_embeddings"),
    TensorRow(f"{LAYER}attention.query_key_value.weight", ("queries_keys_values", "hidden")),
    TensorRow(f"{LAYER}attention.dense.weight", ("hidden", "queries")),
    TensorRow(f"{LAYER}attention.query_layernorm.weight", ("head",)),
    TensorRow(f"{LAYER}attention.key_layernorm.weight", ("head",)),
    *_mlp("mlp", "inner", "dense"),
    *_EXPERTS,
    TensorRow(f"{LAYER}mlp.gate.expert_bias", ("experts",), "sparse"),
    *_mlp("mlp.shared_experts", "shared", "shared"),
)

_DECODER = _names(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size rms_norm_eps "
    "tie_word_embeddings"
)
_ROTARY = _names("head_dim rope_theta rope_scaling max_position_embeddings")
_ROUTED = _names("num_experts num_experts_per_tok norm_topk_prob moe_intermediate_size")
_SPECIAL_IDS = _names("bos_token_id eos_token_id pad_token_id")


def _all_sparse(config: Mapping[str, Any], layer: int) -> bool:
    return True


def _sparse_by_step(config: Mapping[str, Any], layer: int) -> bool:
    return layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0


def _sparse_behind_dense(config: Mapping[str, Any], layer: int) -> bool:
    return layer >= config["first_k_dense_replace"]


_SDAR_MASK, _LLADA2_MASK = 151669, 156895

SGLANG = {
    "SDARForCausalLM": Layout(_SDAR, _DECODER, _ROTARY | {"attention_bias"}, _SDAR_MASK, 4),
    "SDARMoeForCausalLM": Layout(
        _SDAR_MOE, _DECODER | _ROUTED, _ROTARY | {"attention_bias"}, _SDAR_MASK, 4, is_sparse=_all_sparse
    ),
    "LLaDA2MoeModelLM": Layout(
        _LLADA2,
        _DECODER
        | _ROUTED
        | _names(
            "use_bias use_qkv_bias hidden_act num_shared_experts head_dim first_k_dense_replace embedding_dropout "
            "max_position_embeddings"
        ),
        _names(
            "rope_theta rope_scaling partial_rotary_factor n_group topk_group routed_scaling_factor score_function "
            "moe_router_enable_expert_bias"
        ),
        _LLADA2_MASK,
        32,
        values={
            "hidden_act": ("silu",),
            "score_function": ("sigmoid",),
            "moe_router_enable_expert_bias": (True,),
        },
        is_sparse=_sparse_behind_dense,
    ),
}

LMDEPLOY = {
    "SDARForCausalLM": Layout(
        _SDAR, _DECODER | _SPECIAL_IDS | {"attention_bias", "sliding_window"}, _ROTARY, _SDAR_MASK
    ),
    "SDARMoeForCausalLM": Layout(
        _SDAR_MOE,
        _DECODER
        | _ROUTED
        | _SPECIAL_IDS
        | {"attention_bias", "sliding_window", "mlp_only_layers", "decoder_sparse_step"},
        _ROTARY,
        _SDAR_MASK,
        is_sparse=_sparse_by_step,
    ),
}
