"""One table of configuration fields per family, read in both directions: config.json <-> NeMo's GPTConfig."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from nemo_dllm.connectors.rope import Rope

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


class Rule(Protocol):
    """Values that the two configurations hold in different forms."""

    def to_nemo(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments for the NeMo configuration, always under the same names.

        Raises:
            ValueError: for values that are absent or not supported.
        """

    def to_hf(self, config) -> dict[str, Any]:
        """Fields of config.json that describe a NeMo configuration."""


@dataclass(frozen=True)
class ConfigTable:
    """How a family's config.json and NeMo's configuration translate into each other.

    Args:
        fields: values held by both.
        fixed: values that a config.json must have where it names the field, because the NeMo model implies them.
        rules: values held in different forms; the rotary embedding is one of them.
    """

    fields: tuple[Field, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[Rule, ...] = (Rope(),)

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
        for rule in self.rules:
            values |= rule.to_nemo(hf)
        return values

    def to_hf(self, config) -> dict[str, Any]:
        """Fields of config.json that describe a NeMo configuration."""
        values = {f.hf: getattr(config, f.nemo) for f in self.fields} | dict(self.fixed)
        for rule in self.rules:
            values |= rule.to_hf(config)
        return values

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
        for rule in self.rules:
            if not differing.keys().isdisjoint(rule.to_nemo(hf)):
                changed |= rule.to_hf(config)
        return {**hf, **changed}


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
