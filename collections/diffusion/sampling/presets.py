"""Settings that belong together: how released models are sampled, and how a reference sampler is repeated.

``PRESETS`` are ours: each starts from what the model's authors recommend and has none of their samplers' faults.
``REFERENCE_PRESETS`` repeat dllm's samplers token for token, faults included. Both are fields of ``SamplerConfig``.
"""

from typing import Any

from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.quirks import ReferenceQuirks

_LLADA2 = {"cache": "exact", "block_size": 32, "threshold": 0.95}

PRESETS: dict[str, dict[str, Any]] = {
    # Nie et al. 2025. Blocks shorter than the answer, or end tokens, which are the surest, take the canvas over.
    "llada": {"max_new_tokens": 128, "block_size": 32, "schedule": "even"},
    # Ye et al. 2025. The release has no blocks; 32 keeps end tokens from taking over, as for LLaDA.
    "dream": {"right_shift": True, "block_size": 32, "remasking": "entropy", "temperature": 0.2, "top_p": 0.95},
    # Cheng et al. 2025, the dynamic decoding of the release.
    "sdar": {"cache": "exact", "block_size": 4, "threshold": 0.85},
    # Ant group 2025, LLaDA2.0.
    "llada2": _LLADA2,
    # LLaDA2.1 also edits what it has written.
    "llada2_1": {**_LLADA2, "editing_threshold": 0.9, "max_post_steps": 16},
    # Wu et al. 2025, for LLaDA and Dream; its cache is approximate.
    "fast_dllm": {"block_size": 32, "threshold": 0.9, "cache": "approximate_dual"},
}

_SHARED_QUIRKS = {"mask_token_allowed": True, "global_noise": True, "lockstep": True}

REFERENCE_PRESETS: dict[str, dict[str, Any]] = {
    "dllm_mdlm": {
        "stop_at_eos": False,
        "quirks": ReferenceQuirks(
            **_SHARED_QUIRKS, stray_masks_compete=True, begin_suppress_by_confidence=True, topk_ties=True
        ),
    },
    "dllm_bd3lm": {
        "cache": "exact",
        "block_origin": "prompt",
        "stop_at_eos": False,
        "quirks": ReferenceQuirks(**_SHARED_QUIRKS, pad_ids_are_padding=True, stop_after_block=True),
    },
    "dllm_llada2": {
        "cache": "exact",
        "schedule": "even_block",
        "threshold": 0.95,
        "stop_at_eos": False,
        "quirks": ReferenceQuirks(**_SHARED_QUIRKS),
    },
    "dllm_dream": {"right_shift": True, "stop_at_eos": False, "quirks": ReferenceQuirks(**_SHARED_QUIRKS)},
}


def preset_fields(name: str) -> dict[str, Any]:
    """The fields of ``SamplerConfig`` that a preset sets.

    Args:
        name: of ``PRESETS`` or ``REFERENCE_PRESETS``.

    Raises:
        ValueError: there is no such preset.
    """
    known = PRESETS | REFERENCE_PRESETS
    if name not in known:
        raise ValueError(f"preset={name!r} is unknown; known: {', '.join(sorted(known))}")
    return dict(known[name])


def preset(name: str, **fields: Any) -> SamplerConfig:
    """The settings of a preset, with further or other fields.

    Args:
        name: see ``preset_fields``.
        fields: of ``SamplerConfig``; they win over the preset's.

    Raises:
        ValueError: there is no such preset, or the fields do not fit together.
    """
    return SamplerConfig(**(preset_fields(name) | fields))
