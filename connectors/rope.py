"""Rotary embeddings in config.json and in NeMo's configurations.

Both spellings are read and written: that of transformers 4 (``rope_theta``, ``rope_scaling``) and that of 5
(``rope_parameters``).
"""

from collections.abc import Mapping
from typing import Any


class Rope:
    """Base and linear scaling: a rule of a configuration table."""

    def to_nemo(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`Rule`."""
        theta, scaling = read_rope(hf)
        factors = {"default": lambda: None, "linear": lambda: scaling["factor"]}
        if scaling["rope_type"] not in factors:
            raise ValueError(f"rope_type={scaling['rope_type']!r} is not supported; known: {', '.join(factors)}")
        return {"rotary_base": theta, "seq_len_interpolation_factor": factors[scaling["rope_type"]]()}

    def to_hf(self, config) -> dict[str, Any]:
        """See :class:`Rule`."""
        factor = config.seq_len_interpolation_factor
        scaling = {"rope_type": "default"} if factor is None else {"rope_type": "linear", "factor": factor}
        return rope_fields(config.rotary_base, scaling)


def both_rope_spellings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json whose rotary fields transformers 4 and 5 both find."""
    return {**hf, **rope_fields(*read_rope(hf))}


def read_rope(hf: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Base and scaling (``rope_type`` and its numbers) of the rotary embedding.

    Raises:
        ValueError: where config.json has no base.
    """
    parameters = hf.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", hf.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json has neither rope_theta nor rope_parameters.rope_theta; add the base used")
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"} or hf.get("rope_scaling")
    scaling = dict(scaling or {})
    scaling["rope_type"] = scaling.pop("type", scaling.get("rope_type")) or "default"
    return theta, scaling


def rope_fields(theta: float, scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of config.json in both spellings."""
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling["rope_type"] == "default" else dict(scaling),
        "rope_parameters": {"rope_theta": theta, **scaling},
    }
