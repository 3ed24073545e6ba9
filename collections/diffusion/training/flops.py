"""Floating-point operations of a training step, for the model FLOPs utilisation (MFU)."""

from megatron.core.transformer.transformer_config import TransformerConfig

# Dense bf16 matrix products of 8,192 x 8,192 on one NVIDIA H200, measured on random data.
H200_BF16_FLOPS = 790e12


def train_flops_per_token(
    config: TransformerConfig, vocab_size: int, seq_length: int, block_size: int | None = None, views: int = 1
) -> float:
    """Forward and backward FLOPs per token of text, counted for all positions whatever is skipped.

    6 * (block + head weights) + 12 * layers * heads * head size * sequence length (Chowdhery et al., 2022, appendix
    B). Of a mixture of experts, the routed and shared experts that a token visits count. In block diffusion the
    blocks' weights meet each token twice, noised and clean, the head's once, and the two together attend to
    seq_length + block_size keys: those that the mask of [noised row | clean row] allows, for whole blocks.

    Args:
        config: of the model.
        vocab_size: tokens.
        seq_length: tokens of a sample.
        block_size: of block diffusion; None is masked diffusion.
        views: rows of the model's input per sample.
    """
    head_size = config.kv_channels
    queries = config.num_attention_heads * head_size
    attention = config.hidden_size * (2 * queries + 2 * config.num_query_groups * head_size)
    matrices = 3 if config.gated_linear_unit else 2
    dense = matrices * config.hidden_size * config.ffn_hidden_size
    if config.num_moe_experts:
        width = config.moe_router_topk * config.moe_ffn_hidden_size
        width += config.moe_shared_expert_intermediate_size or 0
        sparse = matrices * config.hidden_size * width + config.hidden_size * config.num_moe_experts
    else:
        sparse = dense
    num_sparse = _num_sparse_layers(config)
    block = config.num_layers * attention + num_sparse * sparse + (config.num_layers - num_sparse) * dense
    head = vocab_size * config.hidden_size
    copies, keys = (1, seq_length) if block_size is None else (2, seq_length + block_size)
    return views * (6.0 * (copies * block + head) + 12.0 * config.num_layers * queries * keys)


def _num_sparse_layers(config: TransformerConfig) -> int:
    if not config.num_moe_experts:
        return 0
    if isinstance(config.moe_layer_freq, int):
        return -(-config.num_layers // config.moe_layer_freq)
    return sum(config.moe_layer_freq)
