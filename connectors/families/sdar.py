"""SDAR: Qwen3's weights as a block diffusion model."""

from collections.abc import Mapping
from typing import Any

from nemo_dllm.connectors.config_table import ConfigTable, Field
from nemo_dllm.connectors.config_values import COUNT
from nemo_dllm.connectors.decoder_fields import DECODER_FIELDS, one_per_head
from nemo_dllm.connectors.families.qwen3 import qwen3_key_table
from nemo_dllm.connectors.family import Family, HFClass
from nemo_dllm.connectors.rope import Rope


class NoSlidingWindow:
    """``sliding_window``, which the class does not use, and LMDeploy reads without a default."""

    def to_nemo(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`Rule`."""
        return {}

    def to_hf(self, config) -> dict[str, Any]:
        """See :class:`Rule`."""
        return {"sliding_window": None}


def _nemo_config() -> type:
    from nemo_dllm.collections.diffusion.models.sdar import SDARConfig

    return SDARConfig


SDAR = Family(
    name="sdar",
    hf_classes=(HFClass("sdar", "SDARForCausalLM", "block_causal"),),
    nemo_config=_nemo_config,
    config=ConfigTable(
        fields=(
            *DECODER_FIELDS,
            Field("num_key_value_heads", "num_query_groups", default=one_per_head, kind=COUNT),
            Field("head_dim", "kv_channels", default=128, kind=COUNT),
            Field("max_position_embeddings", "max_position_embeddings", binding=False, kind=COUNT),
        ),
        fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
        rules=(Rope(), NoSlidingWindow()),
    ),
    key_table=qwen3_key_table,
    right_shift=False,
    mask_token="<|MASK|>",
    # Published configurations are silent; the models named without a block size have blocks of 4.
    block_size=4,
)
