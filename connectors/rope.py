"""Rotary embeddings in config.json and in NeMo's configurations.

Both spellings are read and written: that of transformers 4 (``rope_theta``, ``rope_scaling``) and that of 5
(``rope_parameters``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_dllm.connectors.config_values import POSITIVE, misfits

# A scaling's numbers: the name in config.json to that of NeMo's configuration.
LINEAR = {"factor": "seq_len_interpolation_factor"}
LLAMA3 = {
    "factor": "scale_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "old_context_len",
}

# What rope_parameters hold beside the scaling.
_NOT_SCALING = ("rope_theta", "partial_rotary_factor")


@dataclass(frozen=True)
class Rope:
    """Base and scaling: a rule of a configuration table.

    Args:
        default_theta: base where config.json names none, the default of the published class; None refuses that.
        scalings: the scalings that NeMo's configuration class knows by their ``rope_type``, see ``LINEAR``.
    """

    default_theta: float | None = None
    scalings: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: {"linear": LINEAR})

    def to_nemo(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`Rule`."""
        theta, scaling = read_rope(hf, self.default_theta)
        known = {"default": {}, **self.scalings}
        if scaling["rope_type"] not in known:
            raise ValueError(f"rope_type={scaling['rope_type']!r} is not supported; known: {', '.join(known)}")
        numbers = known[scaling["rope_type"]]
        absent = [name for name in numbers if scaling.get(name) is None]
        if absent:
            raise ValueError(f"rope_scaling of rope_type={scaling['rope_type']!r} lacks {', '.join(absent)}")
        wrong = misfits({"rope_theta": theta, **scaling}, dict.fromkeys(("rope_theta", *numbers), POSITIVE))
        if wrong:
            raise ValueError(f"the rotary embedding of config.json has {'; '.join(wrong)}")
        unused = {name: None for fields in self.scalings.values() for name in fields.values()}
        return {"rotary_base": theta} | unused | {name: scaling[hf_name] for hf_name, name in numbers.items()}

    def to_hf(self, config) -> dict[str, Any]:
        """See :class:`Rule`.

        Raises:
            ValueError: for two scalings at once.
        """
        scalings = []
        for rope_type, numbers in self.scalings.items():
            values = {hf_name: getattr(config, name, None) for hf_name, name in numbers.items()}
            if None not in values.values():
                scalings.append({"rope_type": rope_type, **values})
        if len(scalings) > 1:
            raise ValueError(
                f"the configuration scales its rotary embedding twice ({scalings}), which config.json cannot tell; "
                "set seq_len_interpolation_factor=None"
            )
        return rope_fields(config.rotary_base, scalings[0] if scalings else {"rope_type": "default"})


def read_rope(hf: Mapping[str, Any], default_theta: float | None = None) -> tuple[float, dict[str, Any]]:
    """Base and scaling (``rope_type`` and its numbers) of the rotary embedding.

    Raises:
        ValueError: where config.json has no base, and there is no default, or a scaling without a type.
    """
    parameters = hf.get("rope_parameters") or {}
    named = (parameters.get("rope_theta"), hf.get("rope_theta"), default_theta)
    theta = next((base for base in named if base is not None), None)
    if theta is None:
        raise ValueError("config.json has neither rope_theta nor rope_parameters.rope_theta; add the base used")
    scaling = {name: value for name, value in parameters.items() if name not in _NOT_SCALING} or hf.get("rope_scaling")
    scaling = dict(scaling or {})
    rope_type = scaling.pop("type", scaling.get("rope_type"))
    if rope_type is None and scaling:
        raise ValueError(
            f"the rotary scaling {scaling} names no rope_type; add the one that the model was trained with"
        )
    scaling["rope_type"] = rope_type or "default"
    return theta, scaling


def partial_factor(default: float) -> Callable[[Mapping[str, Any]], float]:
    """Default of the field ``partial_rotary_factor``: transformers 5 has it among the ``rope_parameters``."""

    def find(hf: Mapping[str, Any]) -> float:
        factor = (hf.get("rope_parameters") or {}).get("partial_rotary_factor")
        return default if factor is None else factor

    return find


def rope_fields(theta: float, scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of config.json in both spellings."""
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling["rope_type"] == "default" else dict(scaling),
        "rope_parameters": {"rope_theta": theta, **scaling},
    }
