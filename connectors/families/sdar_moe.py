"""SDAR with experts: Qwen3-MoE's keys and configuration, block-causal attention."""

from dataclasses import replace

from nemo_dllm.connectors.families.qwen3_moe import CONFIG_TABLE, key_table
from nemo_dllm.connectors.families.sdar import NoSlidingWindow
from nemo_dllm.connectors.family import Family, HFClass


def _nemo_config() -> type:
    from nemo_dllm.collections.diffusion.models.sdar_moe import SDARMoEConfig

    return SDARMoEConfig


SDAR_MOE = Family(
    name="sdar_moe",
    hf_classes=(HFClass("sdar_moe", "SDARMoeForCausalLM", "block_causal"),),
    nemo_config=_nemo_config,
    config=replace(CONFIG_TABLE, rules=(*CONFIG_TABLE.rules, NoSlidingWindow())),
    key_table=key_table,
    right_shift=False,
    mask_token="<|MASK|>",
    block_size=4,
)
