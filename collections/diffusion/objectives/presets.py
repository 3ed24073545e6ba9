"""Settings of ``MaskedDiffusion`` that reproduce the losses of public training code and papers.

``MaskedDiffusion(mask_token_id=..., **preset("llada"))``. ``mask_token_id`` and ``right_shift`` belong to a
checkpoint, ``group_size`` and ``seed`` to a run; a preset fixes all the rest. Padding is up to the data.
"""

from typing import Any

from nemo_dllm.collections.diffusion.objectives.registry import look_up

PRESETS: dict[str, dict[str, Any]] = {
    # dllm's MDLM trainer with its default configuration; reproduced from its recorded draws in the tests.
    "dllm_mdlm": {
        "schedule": "linear",
        "time_sampling": "iid",
        "time_epsilon": 1e-3,
        "loss_weight": "scheduler",
        "weight_epsilon": 1e-6,
        "loss_norm": "token",
        "force_mask": False,
    },
    # Nie et al. 2025, "Large Language Diffusion Models", algorithms 1 (pretraining) and 2 (SFT): 1/(t L) per sequence,
    # L its (answer's) length, mean over sequences; the authors' guidelines keep t above 1e-3.
    "llada": {
        "schedule": "linear",
        "time_sampling": "iid",
        "time_epsilon": 1e-3,
        "loss_weight": "scheduler",
        "weight_epsilon": 0.0,
        "loss_norm": "sequence",
        "force_mask": False,
    },
    # Sahoo et al. 2024, "Simple and Effective Masked Diffusion Language Models": equation 10 per token, log-linear
    # noise (alpha = 1 - t) and low-discrepancy times.
    "mdlm": {
        "schedule": "linear",
        "time_sampling": "antithetic",
        "time_epsilon": 1e-3,
        "loss_weight": "scheduler",
        "weight_epsilon": 0.0,
        "loss_norm": "token",
        "force_mask": False,
    },
}


def preset(name: str) -> dict[str, Any]:
    """Return the keyword settings of that preset, a new dict; ``ValueError`` lists the known names."""
    return dict(look_up("preset", name, PRESETS))
