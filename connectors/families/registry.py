"""The families that the connectors know. A new one is a file beside this one and an entry here."""

from collections.abc import Collection, Mapping
from typing import Any

from nemo_dllm.connectors.families.dream import DREAM
from nemo_dllm.connectors.families.llada import LLADA
from nemo_dllm.connectors.families.llada2 import LLADA2
from nemo_dllm.connectors.families.llada_moe import LLADA_MOE
from nemo_dllm.connectors.families.llama import LLAMA
from nemo_dllm.connectors.families.qwen2 import QWEN2
from nemo_dllm.connectors.families.qwen3 import QWEN3
from nemo_dllm.connectors.families.qwen3_moe import QWEN3_MOE
from nemo_dllm.connectors.families.sdar import SDAR
from nemo_dllm.connectors.families.sdar_moe import SDAR_MOE
from nemo_dllm.connectors.family import Family

FAMILIES: list[Family] = [QWEN3, QWEN2, LLAMA, SDAR, DREAM, LLADA, QWEN3_MOE, SDAR_MOE, LLADA_MOE, LLADA2]


def find_family(hf_config: Mapping[str, Any]) -> Family:
    """The family of a config.json, by its ``model_type``; where several publish that one, ``architectures`` decides.

    Raises:
        ValueError: where no family, or more than one, has them; lists those known.
    """
    model_type, architectures = hf_config.get("model_type"), hf_config.get("architectures") or ()
    if isinstance(architectures, str) or not isinstance(architectures, Collection):
        raise ValueError(f"architectures={architectures!r} in config.json is no list; write [{str(architectures)!r}]")
    found = [family for family in FAMILIES if any(c.model_type == model_type for c in family.hf_classes)]
    if len(found) > 1:
        found = [family for family in found if any(c.architecture in architectures for c in family.hf_classes)]
    if len(found) != 1:
        known = ", ".join(f"{c.model_type} ({c.architecture})" for family in FAMILIES for c in family.hf_classes)
        raise ValueError(
            f"model_type={model_type!r} with architectures={list(architectures)} belongs to no known family; "
            f"known: {known}"
        )
    return found[0]


def family_of(nemo_config) -> Family:
    """The family of a NeMo configuration, by its class or the nearest known ancestor of it.

    Raises:
        ValueError: where no family has its class, listing those known.
    """
    families = {family.nemo_config(): family for family in FAMILIES}
    for ancestor in type(nemo_config).__mro__:
        if ancestor in families:
            return families[ancestor]
    raise ValueError(
        f"no family has the configuration {type(nemo_config).__name__}; "
        f"known: {', '.join(f'{cls.__name__} ({family.name})' for cls, family in families.items())}"
    )
