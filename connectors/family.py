"""What a family of checkpoints is: its configuration table, its key table and its facts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Family:
    """Everything the connectors know of a family. A family is one file with one of these.

    Args:
        name: short name.
        hf_classes: the classes it reads; exports of diffusion models are of the first that is not causal.
        nemo_config: returns the NeMo configuration class (a function, so that listing families imports no NeMo).
        config: configuration table.
        key_table: key table of a NeMo configuration.
        right_shift: whether the logits at position i - 1 predict token i, where config.json does not say.
        mask_token: text of the mask token where the tokenizer has none; added to it then.
    """

    name: str
    hf_classes: tuple[HFClass, ...]
    nemo_config: Callable[[], type]
    config: ConfigTable
    key_table: Callable[[Any], KeyTable]
    right_shift: bool
    mask_token: str

    def hf_class(self, hf_config: Mapping[str, Any]) -> HFClass:
        """The class that a config.json of this family names."""
        architectures = hf_config.get("architectures") or ()
        named = [c for c in self.hf_classes if c.model_type == hf_config.get("model_type")]
        return next((c for c in named if c.architecture in architectures), named[0])

    @property
    def diffusion_class(self) -> HFClass:
        """The class of exported diffusion models."""
        return next(c for c in self.hf_classes if c.attention != "causal")
