"""Fields of configurations that recipes of several families with experts share."""

# Keeps the input of each layer only.
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

# Routing is computed in fp32. The layers switch the permutation kernels of Transformer Engine on where it is installed.
SOFTMAX_ROUTER = {"moe_router_dtype": "fp32", "moe_permute_fusion": False, "moe_aux_loss_coeff": 0.0}

# Balance over the global batch, not in each sequence, leaves experts free to specialise (Qiu et al., 2025).
SOFTMAX_PRETRAINING = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1e-3}

# Balance without an auxiliary loss (Wang et al., 2024): each step moves every expert's bias by so much.
BIAS_PRETRAINING = {"moe_router_bias_update_rate": 1e-3}
