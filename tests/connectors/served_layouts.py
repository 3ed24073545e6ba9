"""What the loaders of SGLang and LMDeploy read, per architecture: fields of config.json, and tensors by name and shape.

Read from their sources: sglang/srt/dllm/config.py and srt/models/{sdar,sdar_moe,llada2}.py, lmdeploy's
pytorch/configurations/{default,sdar}.py and pytorch/models/{sdar,sdar_moe}.py. docs/engines.md is the same in words.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

Shapes = dict[str, tuple[int, ...]]


class Layout(NamedTuple):
    """What engines read of an architecture."""

    required: frozenset[str]
    """Loading fails without these, where no configuration class of the checkpoint brings a default."""
    silent: frozenset[str]
    """Without these a default is taken that is another model's."""
    shapes: Callable[[Mapping], Shapes]


def _fields(names: str) -> frozenset[str]:
    return frozenset(names.split())


_DECODER = _fields(
    "hidden_size intermediate_size num_attention_heads num_key_value_heads num_hidden_layers vocab_size rms_norm_eps "
    "tie_word_embeddings attention_bias"
)
_SILENT = _fields("head_dim rope_theta rope_scaling max_position_embeddings")
_EXPERTS = _fields("num_experts num_experts_per_tok norm_topk_prob moe_intermediate_size")


def _mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _ends(c: Mapping, embedding: str) -> Shapes:
    table = (c["vocab_size"], c["hidden_size"])
    head = {} if c["tie_word_embeddings"] else {"lm_head.weight": table}
    return {f"model.{embedding}.weight": table, "model.norm.weight": (c["hidden_size"],), **head}


def _norms(prefix: str, c: Mapping) -> Shapes:
    return {f"{prefix}.{name}.weight": (c["hidden_size"],) for name in ("input_layernorm", "post_attention_layernorm")}


def _sdar_attention(prefix: str, c: Mapping) -> Shapes:
    hidden, head = c["hidden_size"], c["head_dim"]
    queries, keys = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    return {
        f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
        f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
        f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
        f"{prefix}.self_attn.q_norm.weight": (head,),
        f"{prefix}.self_attn.k_norm.weight": (head,),
    }


def _experts(prefix: str, c: Mapping) -> Shapes:
    shapes = {f"{prefix}.mlp.gate.weight": (c["num_experts"], c["hidden_size"])}
    for expert in range(c["num_experts"]):
        shapes |= _mlp(f"{prefix}.mlp.experts.{expert}", c["hidden_size"], c["moe_intermediate_size"])
    return shapes


def _sdar(c: Mapping) -> Shapes:
    shapes = _ends(c, "embed_tokens")
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= _norms(prefix, c) | _sdar_attention(prefix, c)
        shapes |= _mlp(f"{prefix}.mlp", c["hidden_size"], c["intermediate_size"])
    return shapes


def _sdar_moe(c: Mapping) -> Shapes:
    shapes = _ends(c, "embed_tokens")
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= _norms(prefix, c) | _sdar_attention(prefix, c) | _experts(prefix, c)
    return shapes


def _llada2(c: Mapping) -> Shapes:
    hidden, head = c["hidden_size"], c["head_dim"]
    queries, keys = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    shapes = _ends(c, "word_embeddings")
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= _norms(prefix, c) | {
            f"{prefix}.attention.query_key_value.weight": (queries + 2 * keys, hidden),
            f"{prefix}.attention.dense.weight": (hidden, queries),
            f"{prefix}.attention.query_layernorm.weight": (head,),
            f"{prefix}.attention.key_layernorm.weight": (head,),
        }
        if layer < c["first_k_dense_replace"]:
            shapes |= _mlp(f"{prefix}.mlp", hidden, c["intermediate_size"])
            continue
        shapes |= _experts(prefix, c) | {f"{prefix}.mlp.gate.expert_bias": (c["num_experts"],)}
        shapes |= _mlp(f"{prefix}.mlp.shared_experts", hidden, c["num_shared_experts"] * c["moe_intermediate_size"])
    return shapes


LAYOUTS = {
    "SDARForCausalLM": Layout(_DECODER | _fields("sliding_window"), _SILENT, _sdar),
    "SDARMoeForCausalLM": Layout(
        _DECODER | _EXPERTS | _fields("sliding_window mlp_only_layers decoder_sparse_step"), _SILENT, _sdar_moe
    ),
    "LLaDA2MoeModelLM": Layout(
        (_DECODER - {"attention_bias"})
        | _EXPERTS
        | _fields(
            "use_bias use_qkv_bias hidden_act num_shared_experts head_dim first_k_dense_replace embedding_dropout "
            "max_position_embeddings"
        ),
        _fields(
            "rope_theta rope_scaling partial_rotary_factor n_group topk_group routed_scaling_factor score_function "
            "moe_router_enable_expert_bias"
        ),
        _llada2,
    ),
}
