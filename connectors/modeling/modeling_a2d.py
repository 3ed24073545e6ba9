"""Masked diffusion language models with the weights and keys of Qwen3 (dense or with experts), Qwen2 or Llama.

Their attention is bidirectional: every token attends to every real token, or to those that a 4-D mask allows. The
logits at a position are those of the token at that position, or of the next one where config.json has
``right_shift_logits: true``. They do not generate from left to right, so there is no ``generate``.

Needs transformers 4.57 or 5.
"""

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen2PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3MoeModel,
    Qwen3MoePreTrainedModel,
    Qwen3PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.utils import can_return_tuple


def attention_bias(attention_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The term that attention adds to its scores: 0 where a query may attend, -inf elsewhere.

    A query that may attend to nothing attends to everything: its output means nothing, but stays finite.

    Args:
        attention_mask: [batch, keys], nonzero for real tokens; or bool [batch, 1 or heads, queries, keys], True where a
            query may attend; or None, where all are real.
        dtype: of the scores.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() == 2:
        visible = attention_mask.bool()[:, None, None, :]
    elif attention_mask.dim() == 4 and attention_mask.dtype == torch.bool:
        visible = attention_mask
    else:
        raise ValueError(
            f"attention_mask has {attention_mask.dim()} dimensions and dtype {attention_mask.dtype}; give one of "
            "[batch, keys] with 1 for real tokens, or a bool one of [batch, heads, queries, keys]"
        )
    visible = visible | ~visible.any(dim=-1, keepdim=True)
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, float("-inf"))


class BothRopeSpellings:
    """A configuration that is saved with its rotary embedding spelled for transformers 4 and for 5."""

    def to_dict(self):
        """All fields; transformers 4 reads ``rope_theta`` and ``rope_scaling``, 5 ``rope_parameters``."""
        fields = super().to_dict()
        if "rope_theta" not in fields:
            scaling = dict(fields["rope_parameters"])
            fields["rope_theta"] = scaling.pop("rope_theta")
            fields["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
        return fields


class Bidirectional:
    """A decoder of transformers whose layers attend in both directions."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.self_attn.is_causal = False

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, output_hidden_states=False
    ):
        """Hidden states [batch, tokens, hidden] after the last norm; see :func:`attention_bias` for the mask."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        bias = attention_bias(attention_mask, hidden.dtype)
        rotary = self.rotary_emb(hidden, position_ids)
        inputs = []
        for layer in self.layers:
            inputs.append(hidden)
            hidden = layer(hidden, attention_mask=bias, position_ids=position_ids, position_embeddings=rotary)
        hidden = self.norm(hidden)
        return BaseModelOutput(hidden, hidden_states=(*inputs, hidden) if output_hidden_states else None)


class DiffusionLM:
    """A bidirectional decoder and its language model head."""

    # Neither takes the masks of bidirectional attention.
    _supports_flash_attn = False
    _supports_flex_attn = False

    def __init__(self, config):
        super().__init__(config)
        self.model = self.decoder_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        inputs_embeds=None,
        output_hidden_states=None,
        token_type_ids=None,
        use_cache=None,
        cache_position=None,
        labels=None,
        past_key_values=None,
        output_attentions=None,
    ):
        """Logits [batch, tokens, vocabulary]; see :func:`attention_bias` for the mask.

        Args:
            input_ids: [batch, tokens], with the mask token where a token is to be predicted.
            attention_mask: see :func:`attention_bias`.
            position_ids: [batch or 1, tokens]; 0, 1, 2, ... where None.
            inputs_embeds: [batch, tokens, hidden] instead of ``input_ids``.
            output_hidden_states: return the inputs of all layers too, and the output of the last norm; None is
                ``config.output_hidden_states``.
            token_type_ids, use_cache, cache_position: without effect, for tokenizers and callers that give them: all
                tokens are of one kind, and there is never a cache.
            labels, past_key_values, output_attentions: None or False; there is no loss, no cache and no such output.
        """
        for name, value in (("labels", labels), ("past_key_values", past_key_values)):
            if value is not None:
                raise TypeError(f"{name} must be None: the model has no loss of its own and no cache")
        if output_attentions:
            raise TypeError("output_attentions must be None or False: the layers keep no attention weights")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, output_hidden_states)
        return MaskedLMOutput(logits=self.lm_head(outputs.last_hidden_state), hidden_states=outputs.hidden_states)


class A2DQwen3Config(BothRopeSpellings, Qwen3Config):
    """Qwen3's configuration."""

    model_type = "a2d-qwen3"


class A2DQwen3Model(Bidirectional, Qwen3Model):
    """Qwen3's decoder."""

    config_class = A2DQwen3Config


class A2DQwen3LMHeadModel(DiffusionLM, Qwen3PreTrainedModel):
    """Qwen3 as a diffusion model."""

    config_class = A2DQwen3Config
    decoder_class = A2DQwen3Model
    _tied_weights_keys = Qwen3ForCausalLM._tied_weights_keys


class A2DQwen2Config(BothRopeSpellings, Qwen2Config):
    """Qwen2's configuration."""

    model_type = "a2d-qwen2"


class A2DQwen2Model(Bidirectional, Qwen2Model):
    """Qwen2's decoder."""

    config_class = A2DQwen2Config


class A2DQwen2LMHeadModel(DiffusionLM, Qwen2PreTrainedModel):
    """Qwen2 as a diffusion model."""

    config_class = A2DQwen2Config
    decoder_class = A2DQwen2Model
    _tied_weights_keys = Qwen2ForCausalLM._tied_weights_keys


class A2DLlamaConfig(BothRopeSpellings, LlamaConfig):
    """Llama's configuration."""

    model_type = "a2d-llama"


class A2DLlamaModel(Bidirectional, LlamaModel):
    """Llama's decoder."""

    config_class = A2DLlamaConfig


class A2DLlamaLMHeadModel(DiffusionLM, LlamaPreTrainedModel):
    """Llama as a diffusion model."""

    config_class = A2DLlamaConfig
    decoder_class = A2DLlamaModel
    _tied_weights_keys = LlamaForCausalLM._tied_weights_keys


class A2DQwen3MoeConfig(BothRopeSpellings, Qwen3MoeConfig):
    """Configuration of Qwen3 with experts."""

    model_type = "a2d-qwen3moe"

    def to_dict(self):
        """All fields, the number of experts also under the name that transformers 4 reads."""
        return {**super().to_dict(), "num_experts": self.num_experts}


class A2DQwen3MoeModel(Bidirectional, Qwen3MoeModel):
    """Decoder of Qwen3 with experts."""

    config_class = A2DQwen3MoeConfig


class A2DQwen3MoeLMHeadModel(DiffusionLM, Qwen3MoePreTrainedModel):
    """Qwen3 with experts as a diffusion model."""

    config_class = A2DQwen3MoeConfig
    decoder_class = A2DQwen3MoeModel
    _tied_weights_keys = Qwen3MoeForCausalLM._tied_weights_keys


def keep_keys_of_experts():
    """Transformers 5 stacks experts while it loads, by model type; files have one tensor per expert."""
    try:
        from transformers import conversion_mapping
    except ImportError:  # Transformers 4 has them as they are in the files.
        return
    mapping = conversion_mapping.get_checkpoint_conversion_mapping("qwen3_moe")
    conversion_mapping.register_checkpoint_conversion_mapping(A2DQwen3MoeConfig.model_type, mapping, overwrite=True)


keep_keys_of_experts()
