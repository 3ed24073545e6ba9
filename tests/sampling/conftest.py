"""Stub models whose output is known by hand, and golden checkpoints in plain torch.

Shape letters: B rows, T canvas positions, L positions of one pass, S cache slots, E hidden size, H heads, D head size,
V vocabulary.
"""

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from ..conftest import AttendingModel

MODELS = Path(__file__).parents[1] / "golden" / "models"


class TableModel:
    """Position -> {token: probability}; what is left goes evenly to the other tokens, the mask token gets nothing.

    Positions without an entry are uniform. ``seen`` keeps the tokens of every forward pass.
    """

    def __init__(self, table, vocab=10, mask_id=9, dtype=torch.float32):
        self.table, self.vocab, self.mask_id, self.dtype = table, vocab, mask_id, dtype
        self.seen = []

    def probabilities(self, position):
        given = self.table.get(position, {})
        others = [i for i in range(self.vocab) if i not in given and i != self.mask_id]
        probabilities_V = torch.zeros(self.vocab, dtype=torch.float64)
        probabilities_V[others] = (1 - sum(given.values())) / max(1, len(others))
        for token, probability in given.items():
            probabilities_V[token] = probability
        return probabilities_V

    def __call__(self, tokens_BT, *, key_mask_BT):
        self.seen.append(tokens_BT.clone())
        rows, positions = tokens_BT.shape
        logits_TV = torch.stack([self.probabilities(i) for i in range(positions)]).clamp_min(1e-30).log()
        return logits_TV.to(self.dtype).expand(rows, -1, -1).clone()


class ContextModel:
    """Random logits from every visible token and its distance; float64, so that batching changes nothing."""

    def __init__(self, vocab=23, seed=0, ignore_key_mask=False):
        generator = torch.Generator().manual_seed(seed)
        self.embedding_VV = torch.randn(vocab, vocab, generator=generator, dtype=torch.float64)
        self.ignore_key_mask = ignore_key_mask

    def __call__(self, tokens_BT, *, key_mask_BT):
        positions_T = torch.arange(tokens_BT.shape[1], dtype=torch.float64)
        weights_TT = torch.cos(1.7 * (positions_T[:, None] - positions_T)) + 0.3
        values_BTV = self.embedding_VV[tokens_BT]
        if key_mask_BT is not None and not self.ignore_key_mask:
            values_BTV = values_BTV * key_mask_BT[..., None]
        return weights_TT @ values_BTV


@pytest.fixture(autouse=True)
def passes_begin_ahead(monkeypatch):
    """As on a GPU: the order in which more can go wrong."""
    # The package has a function of the module's name.
    module = import_module("nemo_dllm.collections.diffusion.sampling.denoise")
    monkeypatch.setattr(module, "works_apart", lambda device: True)


@pytest.fixture
def table_model():
    return TableModel


@pytest.fixture
def context_model():
    return ContextModel


class TinyDecoder(AttendingModel):
    """A transformer of a golden checkpoint in plain torch, as a function and as an object with a cache.

    Weights go by the names of Hugging Face's Qwen; ``ALIASES`` holds how other families call them.
    """

    ALIASES = {
        "model.transformer.": "model.",
        "blocks.": "layers.",
        "wte.": "embed_tokens.",
        "word_embeddings.": "embed_tokens.",
        "model.ff_out.": "lm_head.",
        "ln_f.": "norm.",
        "attn_norm.": "input_layernorm.",
        "ff_norm.": "post_attention_layernorm.",
        "attn_out.": "self_attn.o_proj.",
        ".attention.dense.": ".self_attn.o_proj.",
        ".attention.query_layernorm.": ".self_attn.q_norm.",
        ".attention.key_layernorm.": ".self_attn.k_norm.",
        ".attention.": ".self_attn.",
        ".ff_proj.": ".mlp.gate_proj.",
        ".up_proj.": ".mlp.up_proj.",
        ".mlp.mlp.": ".mlp.",
        ".ff_out.": ".mlp.down_proj.",
    }

    def __init__(self, folder, block_size=None):
        config = json.loads((folder / "config.json").read_text())
        get = lambda *names: next(config[name] for name in names if name in config)  # noqa: E731
        self.config, self.block_size = config, block_size
        self.layers, self.heads = get("num_hidden_layers", "n_layers"), get("num_attention_heads", "n_heads")
        self.kv_heads = get("num_key_value_heads", "n_kv_heads")
        self.head_dim = config.get("head_dim", get("hidden_size", "d_model") // self.heads)
        self.rotary_dim = config.get("rotary_dim", self.head_dim)
        self.weights = {self._rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        self.weights.setdefault("lm_head.weight", self.weights["model.embed_tokens.weight"])
        self.passes = 0

    def _rename(self, name):
        for theirs, ours in self.ALIASES.items():
            if ".experts." not in name and ".shared_experts." not in name:
                name = name.replace(theirs, ours)
        for projection in ("q_proj", "k_proj", "v_proj"):
            if ".self_attn." not in name:
                name = name.replace(projection, f"self_attn.{projection}")
        return name

    def _forward(self, tokens_BL, positions_BL, visible_BLS, store):
        self.passes += 1
        hidden_BLE = self.weights["model.embed_tokens.weight"][tokens_BL]
        for layer in range(self.layers):
            name = f"model.layers.{layer}"
            normed_BLE = self._norm(hidden_BLE, f"{name}.input_layernorm")
            hidden_BLE = hidden_BLE + self._attend(layer, normed_BLE, positions_BL, visible_BLS, store)
            normed_BLE = self._norm(hidden_BLE, f"{name}.post_attention_layernorm")
            is_moe = f"{name}.mlp.gate.weight" in self.weights
            hidden_BLE = hidden_BLE + (self._moe if is_moe else self._mlp)(normed_BLE, f"{name}.mlp")
        return self._norm(hidden_BLE, "model.norm") @ self.weights["lm_head.weight"].T

    def _norm(self, x, name):
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def _linear(self, x, name):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _attend(self, layer, x_BLE, positions_BL, visible_BLS, store):
        name = f"model.layers.{layer}.self_attn"
        sizes = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        if f"{name}.query_key_value.weight" in self.weights:
            projected = self._linear(x_BLE, f"{name}.query_key_value").split(sizes, dim=-1)
        else:
            projected = [self._linear(x_BLE, f"{name}.{part}_proj") for part in "qkv"]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in projected)
        if f"{name}.q_norm.weight" in self.weights:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        keys, values = store(layer, self._rotate(k, positions_BL), v)
        heads = (part.transpose(1, 2) for part in (self._rotate(q, positions_BL), keys, values))
        out = F.scaled_dot_product_attention(*heads, attn_mask=visible_BLS[:, None], enable_gqa=True)
        return self._linear(out.transpose(1, 2).flatten(-2), f"{name}.o_proj")

    def _rotate(self, x_BLHD, positions_BL):
        exponents = torch.arange(0, self.rotary_dim, 2) / self.rotary_dim
        angles = positions_BL[..., None, None] / self.config["rope_theta"] ** exponents
        cos, sin = (torch.cat([f(angles)] * 2, dim=-1) for f in (torch.cos, torch.sin))
        turned, rest = x_BLHD.split([self.rotary_dim, self.head_dim - self.rotary_dim], dim=-1)
        first, second = turned.chunk(2, dim=-1)
        return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)

    def _mlp(self, x, name):
        gated = F.silu(self._linear(x, f"{name}.gate_proj")) * self._linear(x, f"{name}.up_proj")
        return self._linear(gated, f"{name}.down_proj")

    def _moe(self, x, name):
        """Sigmoid router that chooses groups by their two best experts, then experts, with a bias for choosing only."""
        groups, experts = self.config["n_group"], self.config["num_experts"]
        scores = self._linear(x, f"{name}.gate").sigmoid()
        biased = (scores + self.weights[f"{name}.gate.expert_bias"]).unflatten(-1, (groups, experts // groups))
        best = biased.topk(2, dim=-1).values.sum(dim=-1).topk(self.config["topk_group"], dim=-1).indices
        allowed = torch.zeros(*x.shape[:-1], groups, dtype=torch.bool).scatter(-1, best, True)
        chosen = biased.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
        chosen = chosen.topk(self.config["num_experts_per_tok"], dim=-1).indices
        weights = scores.gather(-1, chosen)
        weights = self.config["routed_scaling_factor"] * weights / weights.sum(dim=-1, keepdim=True)
        per_expert = torch.zeros_like(scores).scatter(-1, chosen, weights)
        outputs = torch.stack([self._mlp(x, f"{name}.experts.{expert}") for expert in range(experts)], dim=-1)
        return (outputs * per_expert[..., None, :]).sum(dim=-1) + self._mlp(x, f"{name}.shared_experts")


@pytest.fixture(scope="session")
def tiny_decoder():
    """Name of a golden checkpoint, and optionally the block size of its attention -> a TinyDecoder."""
    return lambda name, block_size=None: TinyDecoder(MODELS / name, block_size)
