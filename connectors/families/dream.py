"""Dream: Qwen2's weights as a diffusion model whose logits stay those of the next token."""

from nemo_dllm.connectors.config_table import ConfigTable, Field, HiddenPerHead
from nemo_dllm.connectors.config_values import COUNT
from nemo_dllm.connectors.decoder_fields import DECODER_FIELDS, one_per_head
from nemo_dllm.connectors.families.qwen2 import qwen2_key_table
from nemo_dllm.connectors.family import Family, HFClass
from nemo_dllm.connectors.rope import Rope


def _nemo_config() -> type:
    from nemo_dllm.collections.diffusion.models.dream import DreamConfig

    return DreamConfig


DREAM = Family(
    name="dream",
    hf_classes=(HFClass("Dream", "DreamModel", "bidirectional"),),
    nemo_config=_nemo_config,
    config=ConfigTable(
        fields=(
            *DECODER_FIELDS,
            Field("num_key_value_heads", "num_query_groups", default=one_per_head, kind=COUNT),
            Field("max_position_embeddings", "seq_length", binding=False, kind=COUNT),
        ),
        fixed={"hidden_act": "silu", "use_sliding_window": False},
        rules=(Rope(), HiddenPerHead()),
    ),
    key_table=qwen2_key_table,
    right_shift=True,
    mask_token="<|mask|>",
)
