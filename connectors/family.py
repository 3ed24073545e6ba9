"""What a family of checkpoints is: its configuration table, its key table and its facts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from nemo_dllm.connectors.config_table import ConfigTable
from nemo_dllm.connectors.key_table import KeyTable


class ModelingCode(NamedTuple):
    """Python code with which transformers loads a class that it lacks; exports bring it along."""

    file: Path
    auto_map: Mapping[str, str]
    """Field of config.json: automatic class of transformers to ``MODULE.CLASS``."""


class HFClass(NamedTuple):
    """A published model class that has the family's keys."""

    model_type: str
    architecture: str
    attention: str
    """``causal``, ``bidirectional`` or ``block_causal``: how the class attends when given no mask of its own."""
    code: ModelingCode | None = None
    """Where exports of the class bring its code along."""
    exported_as: str | None = None
    """``model_type`` of exports, where files of the class are laid out in a way that is read but not written."""


@dataclass(frozen=True)
class Family:
    """Everything the connectors know of a family. A family is one file with one of these.

    Args:
        name: short name.
        hf_classes: the classes it reads; exports of diffusion models are of the first that is not causal.
        nemo_config: returns the NeMo configuration class (a function, so that listing families imports no NeMo).
            Its subclasses are of the family too, unless another one names them.
        config: configuration table.
        key_table: key table of a NeMo configuration.
        right_shift: whether the logits at position i - 1 predict token i, where config.json does not say.
        mask_token: text of the mask token where the tokenizer has none; added to it then.
        nemo_config_of: the subclass of ``nemo_config`` that a config.json asks for; None where all have the same.
        block_size: tokens per block of the published models, where config.json does not say; None for families that
            have no blocks.
        settings: fields of the NeMo configuration of an imported model that say how it trains, not what it is.
    """

    name: str
    hf_classes: tuple[HFClass, ...]
    nemo_config: Callable[[], type]
    config: ConfigTable
    key_table: Callable[[Any], KeyTable]
    right_shift: bool
    mask_token: str
    nemo_config_of: Callable[[Mapping[str, Any]], type] | None = None
    block_size: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def build_nemo_config(self, hf_config: Mapping[str, Any], **settings: Any):
        """The NeMo configuration of a config.json, with further fields set to ``settings``.

        Raises:
            ValueError: see :meth:`ConfigTable.to_nemo`.
        """
        values = self.config.to_nemo(hf_config)
        config_class = self.nemo_config() if self.nemo_config_of is None else self.nemo_config_of(hf_config)
        # Some classes of NeMo have a field of their own for the context.
        if "max_position_embeddings" in values:
            values.setdefault("seq_length", values["max_position_embeddings"])
        known = {f.name for f in fields(config_class)}
        values = {name: value for name, value in values.items() if name in known or value is not None}
        # The layers here rotate in a kernel of their own; Megatron's needs Transformer Engine to be configured at all.
        return config_class(**values, **{"apply_rope_fusion": False, **self.settings, **settings})

    def hf_class(self, hf_config: Mapping[str, Any]) -> HFClass:
        """The class that a config.json of this family names."""
        architectures = hf_config.get("architectures") or ()
        named = [c for c in self.hf_classes if c.model_type == hf_config.get("model_type")]
        return next((c for c in named if c.architecture in architectures), named[0])

    def vocab_size(self, hf_config: Mapping[str, Any]) -> int:
        """Rows of the embedding table that a config.json of this family tells."""
        return self.config.value("vocab_size", hf_config)

    @property
    def diffusion_class(self) -> HFClass:
        """The class of exported diffusion models."""
        return next(c for c in self.hf_classes if c.attention != "causal")
