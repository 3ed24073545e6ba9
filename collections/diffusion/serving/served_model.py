"""A loaded model, with what endpoints ask of it."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch

from nemo_dllm.collections.diffusion.chat_prompts import ChatTemplate
from nemo_dllm.collections.diffusion.sampling import PRESETS, CachedDenoiser, DenoiserFn, SamplerConfig
from nemo_dllm.collections.diffusion.sampling.config import DELAYED
from nemo_dllm.collections.diffusion.sampling.token_choice import check_token_ids
from nemo_dllm.collections.diffusion.serving.errors import RequestError, naming_the_field

TOKEN_ID_FIELDS = ("stop_token_ids", "suppress_token_ids", "begin_suppress_token_ids", "cfg_keep_token_ids")


class TextModel(Protocol):
    """What serving needs of ``inference.LoadedModel``, whose documentation says what each is."""

    tokenizer: Any
    denoiser: DenoiserFn | CachedDenoiser
    mask_token_id: int
    seq_length: int
    device: torch.device

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...

    def sampler_config(self, preset: str | None = None, **settings: Any) -> SamplerConfig: ...


class ServedModel:
    """A model under a name, with the server's defaults.

    Args:
        loaded: the model. It scores one token here, which tells the size of its vocabulary and that it runs.
        name: what clients call it.
        preset: how it is sampled where a request says nothing; None is the checkpoint's own way.
        settings: further fields of ``SamplerConfig``, which win over the preset's.
        chat_template: Jinja text in place of the tokenizer's.

    Attributes:
        default_config: how requests are sampled that say nothing.
        max_length: of prompt, completion and suffix together, in tokens: that of the settings, or else of the training
            samples.
        vocab_size: ids that the model scores.

    Raises:
        ValueError: the checkpoint has no tokenizer, the settings do not fit it, or the template is broken.
    """

    def __init__(
        self,
        loaded: TextModel,
        name: str,
        *,
        preset: str | None = None,
        settings: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ):
        if loaded.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer, so there is no text to serve; add its tokenizer files")
        self.loaded, self.name = loaded, name
        self._preset, self._settings, self._template = preset, dict(settings or {}), chat_template
        probe_BT = torch.full((1, 1), loaded.mask_token_id, device=loaded.device)
        self.vocab_size = loaded.denoiser(probe_BT, key_mask_BT=None).shape[-1]
        self.default_config = loaded.sampler_config(preset, **self._settings)
        check_token_ids(self.default_config, loaded.mask_token_id, self.vocab_size)
        self.max_length = self.default_config.max_length or loaded.seq_length
        if chat_template is not None:
            self.chat_template.prompt([{"role": "user", "content": "?"}], {})

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The template of conversations.

        Raises:
            ValueError: there is none.
        """
        return ChatTemplate(self._tokenizer, self._template)

    def sampler_config(self, preset: str | None, settings: Mapping[str, Any]) -> SamplerConfig:
        """What a request is sampled with.

        Args:
            preset: stands in place of the server's preset and settings; None keeps them.
            settings: the request's own; forbidden tokens join those that the checkpoint forbids.

        Raises:
            RequestError: names the field that is unknown, or does not fit the others.
        """
        if preset is not None and preset not in PRESETS:
            message = f"preset={preset!r} is unknown; known: {', '.join(sorted(PRESETS))}"
            raise RequestError(422, message, "preset", "invalid_value")
        for field in TOKEN_ID_FIELDS:
            self.check_token_ids(settings.get(field, ()), field)
        server = (self._preset, self._settings) if preset is None else (preset, {})
        with naming_the_field():
            base = self.loaded.sampler_config(server[0], **server[1])
            suppressed = (*base.suppress_token_ids, *settings.get("suppress_token_ids", ()))
            own = {**server[1], **settings, "suppress_token_ids": suppressed}
            return self.loaded.sampler_config(server[0], **own)

    def check_config(self, config: SamplerConfig) -> None:
        """Refuse what the model cannot do, which the engine would only find out while others wait.

        Raises:
            RequestError: names the field.
        """
        with naming_the_field():
            check_token_ids(config, self.loaded.mask_token_id, self.vocab_size)
        needed = "score_and_keep" if config.cache == DELAYED else "commit"
        if config.cache is not None and not hasattr(self.loaded.denoiser, needed):
            message = f"cache={config.cache!r} is not available for this model; leave it out"
            raise RequestError(422, message, "cache", "invalid_value")

    def check_token_ids(self, ids: Sequence[int], field: str) -> None:
        """Refuse ids outside the vocabulary, which would end the process on a GPU.

        Raises:
            RequestError: names the field.
        """
        wrong = next((id for id in ids if not 0 <= id < self.vocab_size), None)
        if wrong is not None:
            message = f"{field} holds {wrong}, which is no id of a vocabulary of {self.vocab_size}"
            raise RequestError(422, message, field, "invalid_value")

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Tokens that decoded texts do not show, by their names."""
        return {str(token): id for id, token in self._tokenizer.added_tokens_decoder.items() if token.special}

    @property
    def _tokenizer(self) -> Any:
        """Hugging Face's, which NeMo's wraps."""
        return getattr(self.loaded.tokenizer, "tokenizer", self.loaded.tokenizer)
