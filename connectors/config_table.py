"""One table of configuration fields per family, read in both directions: config.json <-> NeMo's GPTConfig."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

REQUIRED = object()

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Field(NamedTuple):
    """A value that both configurations hold."""

    hf: str
    nemo: str
    default: Any = REQUIRED
    """Value where config.json is silent: the default of the published model class."""
    binding: bool = True
    """Whether another value is another model; False for settings of training."""


@dataclass(frozen=True)
class ConfigTable:
    """How a family's config.json and NeMo's configuration translate into each other.

    Rotary embeddings are handled for all families: base and linear scaling, in the spelling of transformers 4
    (``rope_theta``, ``rope_scaling``) and 5 (``rope_parameters``).

    Args:
        fields: values held by both.
        fixed: values that a config.json must have where it names the field, because the NeMo model implies them.
    """

    fields: tuple[Field, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def to_nemo(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments for the NeMo configuration.

        Raises:
            ValueError: naming all absent fields, or all unsupported values.
        """
        absent = [f.hf for f in self.fields if f.default is REQUIRED and hf.get(f.hf) is None]
        if absent:
            raise ValueError(f"config.json lacks {', '.join(absent)}")
        unsupported = [
            f"{name}={hf[name]!r} (supported: {value!r})"
            for name, value in self.fixed.items()
            if name in hf and hf[name] != value
        ]
        layer_types = set(hf.get("layer_types") or ()) - {"full_attention"}
        if layer_types:
            unsupported.append(f"layer_types with {', '.join(sorted(layer_types))} (supported: 'full_attention')")
        if hf.get("quantization_config"):
            unsupported.append("quantization_config (supported: unquantised weights)")
        if unsupported:
            raise ValueError(f"config.json of model_type={hf.get('model_type')!r} has {'; '.join(unsupported)}")
        values = {f.nemo: f.default if hf.get(f.hf) is None else hf[f.hf] for f in self.fields}
        return values | _rope_to_nemo(hf)

    def to_hf(self, config) -> dict[str, Any]:
        """Fields of config.json that describe a NeMo configuration, rotary embeddings in both spellings."""
        return {f.hf: getattr(config, f.nemo) for f in self.fields} | dict(self.fixed) | _rope_to_hf(config)

    def differences(self, config, hf: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Where a NeMo configuration describes another model than config.json: NeMo's name to (model's, file's)."""
        settings = {f.nemo for f in self.fields if not f.binding}
        if config.vocab_size is None:  # The tokenizer decides; the tensors' shapes tell whether it fits.
            settings.add("vocab_size")
        return {
            name: (getattr(config, name), value)
            for name, value in self.to_nemo(hf).items()
            if name not in settings and getattr(config, name) != value
        }

    def update(self, hf: Mapping[str, Any], config) -> dict[str, Any]:
        """A config.json that describes a NeMo configuration and is otherwise ``hf``, unchanged where that does too."""
        hf_names = {f.nemo: f.hf for f in self.fields}
        differing = self.differences(config, hf)
        changed = {hf_names[name]: value for name, (value, _) in differing.items() if name in hf_names}
        rope = _rope_to_hf(config) if differing.keys() - hf_names.keys() else {}
        return {**hf, **changed, **rope}


def both_rope_spellings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json whose rotary fields transformers 4 and 5 both find."""
    theta, scaling = _read_rope(hf)
    return {**hf, **_rope_fields(theta, scaling)}


def hf_dtype(hf: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that config.json names, as ``dtype`` or ``torch_dtype``; None where it names none.

    Raises:
        ValueError: for a dtype that models are not trained in.
    """
    name = hf.get("dtype") or hf.get("torch_dtype")
    if name is None:
        return None
    if name not in _DTYPES:
        raise ValueError(f"config.json has dtype {name!r}; known: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as config.json spells it."""
    return str(dtype).removeprefix("torch.")


def _read_rope(hf: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Base and scaling (``rope_type`` and its numbers) of the rotary embedding."""
    parameters = hf.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", hf.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json has neither rope_theta nor rope_parameters.rope_theta; add the base used")
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"} or hf.get("rope_scaling")
    scaling = dict(scaling or {})
    scaling["rope_type"] = scaling.pop("type", scaling.get("rope_type")) or "default"
    return theta, scaling


def _rope_to_nemo(hf: Mapping[str, Any]) -> dict[str, Any]:
    theta, scaling = _read_rope(hf)
    factors = {"default": lambda: None, "linear": lambda: scaling["factor"]}
    if scaling["rope_type"] not in factors:
        raise ValueError(f"rope_type={scaling['rope_type']!r} is not supported; known: {', '.join(factors)}")
    return {"rotary_base": theta, "seq_len_interpolation_factor": factors[scaling["rope_type"]]()}


def _rope_to_hf(config) -> dict[str, Any]:
    factor = config.seq_len_interpolation_factor
    scaling = {"rope_type": "default"} if factor is None else {"rope_type": "linear", "factor": factor}
    return _rope_fields(config.rotary_base, scaling)


def _rope_fields(theta: float, scaling: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling["rope_type"] == "default" else dict(scaling),
        "rope_parameters": {"rope_theta": theta, **scaling},
    }
