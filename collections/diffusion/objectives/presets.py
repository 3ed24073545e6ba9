"""Settings that reproduce the losses of public training code and papers.

``MaskedDiffusion(mask_token_id=..., **preset("llada"))``; presets with a ``block_size`` are for ``BlockDiffusion``.
``mask_token_id`` and ``right_shift`` belong to a checkpoint, ``group_size`` and ``seed`` to a run; a preset fixes all
the rest. Padding is up to the data.
"""

from typing import Any

from nemo_dllm.collections.diffusion.objectives.registry import look_up

# The NELBO per token with independent times, 1/t of each masked token over the maskable ones.
_IID = {
    "schedule": "linear",
    "time_sampling": "iid",
    "time_epsilon": 1e-3,
    "time_range": None,
    "loss_weight": "scheduler",
    "weight_epsilon": 0.0,
    "loss_norm": "token",
    "force_mask": False,
    "complementary": False,
}
_BLOCK = {**_IID, "block_size": 32, "block_start": "reference", "ar_loss_weight": 0.0}

PRESETS: dict[str, dict[str, Any]] = {
    # dllm's MDLM trainer with its default configuration; reproduced from its recorded draws in the tests.
    "dllm_mdlm": {**_IID, "weight_epsilon": 1e-6},
    # Nie et al. 2025, "Large Language Diffusion Models", algorithms 1 (pretraining) and 2 (SFT): 1/(t L) per sequence,
    # L its (answer's) length, mean over sequences; the authors' guidelines keep t above 1e-3.
    "llada": {**_IID, "loss_norm": "sequence"},
    # Sahoo et al. 2024, "Simple and Effective Masked Diffusion Language Models": equation 10 per token, log-linear
    # noise (alpha = 1 - t) and low-discrepancy times.
    "mdlm": {**_IID, "time_sampling": "antithetic"},
    # dllm's BD3LM trainer with its default configuration: one time for all blocks of a sequence; as dllm_mdlm.
    "dllm_bd3lm": {**_BLOCK, "time_sampling": "per_sequence", "weight_epsilon": 1e-6},
    # Arriola et al. 2025, "Block Diffusion": times stratified over all blocks of a batch. Their final models also clip
    # the times to a time_range that is searched for each block size.
    "bd3lm": {**_BLOCK, "time_sampling": "antithetic_per_block", "block_size": 16},
    # The training code released with SDAR (Cheng et al. 2025): a time per document, 1/t over the answer's tokens; rows
    # drawn without a mask are drawn again there, here they get their likeliest one.
    "sdar": {**_BLOCK, "time_sampling": "per_sequence", "block_size": 4, "force_mask": True},
    # Wu et al. 2025, "Fast-dLLM v2": complementary masks and cross-entropy that counts every token once, without a
    # weight; its checkpoints are shifted, so set right_shift=True.
    "fast_dllm_v2": {**_BLOCK, "time_sampling": "per_sequence", "loss_weight": "uniform", "complementary": True},
}


def preset(name: str) -> dict[str, Any]:
    """Return the keyword settings of that preset, a new dict; ``ValueError`` lists the known names."""
    return dict(look_up("preset", name, PRESETS))
