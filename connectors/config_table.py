"""One table of configuration fields per family, read in both directions: config.json <-> NeMo's GPTConfig."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from nemo_dllm.connectors.config_values import ANYTHING, NAMES, OF_ALL_FAMILIES, Kind, misfits
from nemo_dllm.connectors.rope import Rope

REQUIRED = object()


class Field(NamedTuple):
    """A value that both configurations hold."""

    hf: str
    nemo: str
    default: Any = REQUIRED
    """Value where config.json is silent, as the published model class has it; a function gets it from the others."""
    binding: bool = True
    """Whether another value is another model; False for settings of training."""
    kind: Kind = ANYTHING
    """What the value in config.json must be."""


class Rule(Protocol):
    """Values that the two configurations hold in different forms."""

    def to_nemo(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments for the NeMo configuration, always under the same names.

        Where the family's configuration class depends on config.json, a name that the chosen class lacks gets None.

        Raises:
            ValueError: for values that are absent or not supported.
        """

    def to_hf(self, config) -> dict[str, Any]:
        """Fields of config.json that describe a NeMo configuration."""


# Of NeMo's fields, where both are numbers: what two of them cannot be together.
_RELATIONS = (
    ("num_attention_heads", "num_query_groups", lambda left, right: left % right, "no multiple of"),
    ("num_moe_experts", "moe_router_num_groups", lambda left, right: left % right, "no multiple of"),
    ("num_moe_experts", "moe_router_topk", lambda left, right: left < right, "less than"),
)
# What config.json calls those of them that rules read.
_SPELLINGS = {"num_moe_experts": ("num_experts", "num_local_experts"), "moe_router_num_groups": ("n_group",)}


@dataclass(frozen=True)
class ConfigTable:
    """How a family's config.json and NeMo's configuration translate into each other.

    Args:
        fields: values held by both. Of several with one NeMo name the last counts; all are written.
        fixed: values that a config.json must have where it names the field, because the NeMo model implies them.
        rules: values held in different forms; the rotary embedding is one of them.
        kinds: what the values of further fields must be: those that rules and defaults read.
    """

    fields: tuple[Field, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[Rule, ...] = (Rope(),)
    kinds: Mapping[str, Kind] = field(default_factory=dict)

    def check(self, hf: Mapping[str, Any]) -> None:
        """Check that a config.json has all fields, and values that are supported.

        Raises:
            ValueError: naming all absent fields, or all values that are no such values or not supported.
        """
        hf = _said(hf)
        absent = [f.hf for f in self.fields if f.default is REQUIRED and f.hf not in hf]
        if absent:
            raise ValueError(f"config.json lacks {', '.join(absent)}")
        unsupported = misfits(hf, {**OF_ALL_FAMILIES, **self.kinds, **{f.hf: f.kind for f in self.fields}})
        unsupported += [
            f"{name}={hf[name]!r} (supported: {value!r})"
            for name, value in self.fixed.items()
            if name in hf and hf[name] != value
        ]
        layer_types = hf.get("layer_types", ())
        layer_types = set(layer_types) - {"full_attention"} if NAMES.fits(layer_types) else ()
        if layer_types:
            unsupported.append(f"layer_types with {', '.join(sorted(layer_types))} (supported: 'full_attention')")
        if hf.get("quantization_config"):
            unsupported.append("quantization_config (supported: unquantised weights)")
        if unsupported:
            raise ValueError(f"config.json of model_type={hf.get('model_type')!r} has {'; '.join(unsupported)}")

    def to_nemo(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments for the NeMo configuration.

        Raises:
            ValueError: see :meth:`check`, and for values that contradict each other.
        """
        self.check(hf)
        hf = _said(hf)
        values = {f.nemo: _value(f, hf) for f in self.fields}
        for rule in self.rules:
            values |= rule.to_nemo(hf)
        self._check_together(values, hf)
        return values

    def _check_together(self, values: Mapping[str, Any], hf: Mapping[str, Any]) -> None:
        names = {name: next(filter(hf.__contains__, known), known[0]) for name, known in _SPELLINGS.items()}
        names |= {f.nemo: f.hf for f in self.fields}
        for larger, smaller, contradict, relation in _RELATIONS:
            left, right = values.get(larger), values.get(smaller)
            if left is not None and right is not None and contradict(left, right):
                raise ValueError(
                    f"config.json has {names.get(larger, larger)}={left}, which is {relation} "
                    f"{names.get(smaller, smaller)}={right}; correct the one that is wrong"
                )

    def to_hf(self, config) -> dict[str, Any]:
        """Fields of config.json that describe a NeMo configuration."""
        fields = {f.hf: getattr(config, f.nemo) for f in self.fields}
        return fields | dict(self.fixed) | self.rule_fields(config)

    def rule_fields(self, config) -> dict[str, Any]:
        """Those fields of config.json that rules write; rotary embeddings in both spellings."""
        return {name: value for rule in self.rules for name, value in rule.to_hf(config).items()}

    def value(self, nemo: str, hf: Mapping[str, Any]) -> Any:
        """What a config.json means by a field of NeMo's configuration that ``fields`` have."""
        return _value(next(f for f in reversed(self.fields) if f.nemo == nemo), hf)

    def hf_name(self, nemo: str) -> str:
        """The field of config.json that decides a field of NeMo's configuration that ``fields`` have."""
        return next(f.hf for f in reversed(self.fields) if f.nemo == nemo)

    def differences(self, config, hf: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Where a NeMo configuration describes another model than config.json: NeMo's name to (model's, file's)."""
        settings = {f.nemo for f in self.fields if not f.binding}
        if config.vocab_size is None:  # The tokenizer decides; the tensors' shapes tell whether it fits.
            settings.add("vocab_size")
        return {
            name: (getattr(config, name, None), value)
            for name, value in self.to_nemo(hf).items()
            if name not in settings and getattr(config, name, None) != value
        }

    def update(self, hf: Mapping[str, Any], config) -> dict[str, Any]:
        """A config.json that describes a NeMo configuration and is otherwise ``hf``, unchanged where that does too."""
        differing = self.differences(config, hf)
        changed = {f.hf: differing[f.nemo][0] for f in self.fields if f.nemo in differing}
        for rule in self.rules:
            if not differing.keys().isdisjoint(rule.to_nemo(_said(hf))):
                changed |= rule.to_hf(config)
        return {**hf, **changed}


@dataclass(frozen=True)
class HiddenPerHead:
    """Heads share the hidden units: the default of a field, or a rule where config.json has no field for their size."""

    hidden_size: str = "hidden_size"
    heads: str = "num_attention_heads"

    def __call__(self, hf: Mapping[str, Any]) -> int:
        """Units of a head."""
        return hf[self.hidden_size] // hf[self.heads]

    def to_nemo(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`Rule`."""
        return {"kv_channels": self(hf)}

    def to_hf(self, config) -> dict[str, Any]:
        """See :class:`Rule`."""
        if config.kv_channels * config.num_attention_heads != config.hidden_size:
            raise ValueError(
                f"kv_channels={config.kv_channels} cannot be told in config.json, where heads have {self.hidden_size} "
                f"// {self.heads} = {config.hidden_size // config.num_attention_heads} units; set it to that"
            )
        return {}


def _said(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls, which transformers writes for fields that say nothing."""
    return {name: value for name, value in hf.items() if value is not None}


def _value(f: Field, hf: Mapping[str, Any]) -> Any:
    if hf.get(f.hf) is not None:
        return hf[f.hf]
    return f.default(hf) if callable(f.default) else f.default


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as config.json spells it."""
    return str(dtype).removeprefix("torch.")
