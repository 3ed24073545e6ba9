"""What holds under any settings, of many drawn ones, on a small model. Shape letters: B rows, L positions of a pass."""

import random

import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import (
    KVCache,
    SamplerConfig,
    generate,
    generate_stream,
    generation_result,
)

VOCABULARY, M = 11, 10


class Small:
    """Two layers of attention with random weights, over the canvas or with any cache."""

    def __init__(self, seed, dtype, scale):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.embedding, self.turn = draw(VOCABULARY, 8), draw(64, 8)
        self.layers = [[draw(8, 8) / 3 for _ in range(3)] for _ in range(2)]
        self.dtype, self.scale = dtype, scale

    def __call__(self, tokens_BT, *, key_mask_BT=None):
        keys_BT = torch.ones_like(tokens_BT, dtype=torch.bool) if key_mask_BT is None else key_mask_BT
        positions_BT = (keys_BT.cumsum(dim=1) - 1).clamp_min(0)
        return self._forward(tokens_BT, positions_BT, keys_BT[:, None], lambda layer, keys, values: (keys, values))

    def new_cache(self, rows, positions):
        return KVCache(rows, positions)

    def denoise(self, tokens_BL, positions_BL, cache, *, key_mask_BL):
        return self._cached(tokens_BL, positions_BL, cache, cache.window(positions_BL, key_mask_BL))

    def commit(self, tokens_BL, positions_BL, cache, *, key_mask_BL, blocks_BL):
        window = cache.window(positions_BL, key_mask_BL, blocks_BL)
        logits_BLV = self._cached(tokens_BL, positions_BL, cache, window)
        cache.hold(window)
        return logits_BLV[torch.arange(len(tokens_BL)), (key_mask_BL.sum(dim=1) - 1).clamp_min(0)]

    def score_and_keep(self, tokens_BL, positions_BL, cache, rows_N, columns_N, *, key_mask_BL, kept_BL):
        window = cache.window(positions_BL, key_mask_BL)
        logits_BLV = self._cached(tokens_BL, positions_BL, cache, window)
        cache.hold(window, kept_BL)
        return logits_BLV[rows_N, columns_N]

    def _cached(self, tokens_BL, positions_BL, cache, window):
        return self._forward(tokens_BL, positions_BL, window.visible_BLS, lambda i, k, v: cache.write(i, window, k, v))

    def _forward(self, tokens_BL, positions_BL, visible_BLS, store):
        hidden_BLE = self.embedding[tokens_BL] + self.turn[positions_BL]
        for layer, (query, key, value) in enumerate(self.layers):
            keys, values = store(layer, (hidden_BLE @ key)[:, :, None], (hidden_BLE @ value)[:, :, None])
            scores_BLS = (hidden_BLE @ query) @ keys[:, :, 0].transpose(1, 2)
            weights_BLS = scores_BLS.masked_fill(~visible_BLS, -torch.inf).softmax(dim=-1)
            hidden_BLE = torch.tanh(hidden_BLE + weights_BLS @ values[:, :, 0])
        return (self.scale * hidden_BLE @ self.embedding.T).to(self.dtype)


CACHES = (None, None, "exact", "approximate_prefix", "approximate_dual", "approximate_delayed")
CHOICES = {
    "block_size": (None, 1, 2, 3, 4, 8, 40),
    "refresh_interval": (1, 2, 5),
    "threshold": (None, None, 0, 0.3, 0.9, 1.5, 1e9),
    "temperature": (0.0, 0.0, 1e-300, 1e-8, 0.1, 1.0, 5.0, 1e30),
    "top_k": (None, None, 1, 2, VOCABULARY, 10**12),
    "top_p": (None, None, 1e-300, 0.5, 1.0),
    "remasking": ("confidence", "margin", "entropy", "random"),
    "remasking_temperature": (0.0, 0.0, 0.0, 1e-300, 0.5),
    "tempered_confidence": (False, False, True),
    "cfg_scale": (0.0, 0.0, 0.5, 3.0),
    "right_shift": (False, False, True),
    "bos_token_id": (None, 0),
    "eos_token_id": (None, 0, 3),
    "eos_penalty": (0.0, 1.0, 1e30),
    "stop_token_ids": ((), (), (4, 5)),
    "suppress_token_ids": ((), (), (1, 2, 3), tuple(range(9))),
    "begin_suppress_token_ids": ((), (), (8, 7)),
    "editing_threshold": (None, None, 0, 0.3),
    "max_post_steps": (0, 1, 3),
    "max_length": (None, None, None, 12),
    "schedule": ("linear", "cosine", "even", "even_block"),
}


def drawn_settings(rng):
    fields = {name: rng.choice(values) for name, values in CHOICES.items()}
    fields |= {"max_new_tokens": rng.choice((1, 2, 3, 5, 8, 13)), "seed": rng.randint(-9, 9)}
    fields["min_new_tokens"] = rng.choice((0, 0, rng.randint(0, fields["max_new_tokens"])))
    cache = rng.choice(CACHES)
    if cache == "approximate_delayed" or fields["block_size"]:
        fields["cache"] = cache
    pace = rng.choice(("", "", "steps", "steps_per_block"))
    most = {"steps": fields["max_new_tokens"], "steps_per_block": fields["block_size"] or fields["max_new_tokens"]}
    if pace:
        fields[pace] = rng.randint(1, most[pace])
    if rng.random() < 0.2 and fields["eos_token_id"] is not None:
        fields["stop_strings"] = ("ab", "cj")
    return fields


def decode(ids):
    return "".join("abcdefghijk"[token] for token in ids)


def check(model, prompts, config):
    steps = list(generate_stream(model, prompts, config, mask_token_id=M, decode=decode))
    result = generation_result(steps[-1], prompts, config, decode)
    for prompt, row, completion in zip(prompts, result.sequences, result.completions, strict=True):
        given = prompt or ([] if config.bos_token_id is None else [config.bos_token_id])
        assert row.tolist() == given + completion.tolist()
        chosen = set(completion.tolist())
        assert M not in chosen and not chosen & set(config.suppress_token_ids)
        assert 1 <= len(completion) <= config.max_new_tokens
        assert completion[0].item() not in config.begin_suppress_token_ids
        assert not set(completion[: config.min_new_tokens].tolist()) & {config.eos_token_id, *config.stop_token_ids}
    assert not steps[-1].holes_BT.any()
    for row, prompt in enumerate(prompts):
        alone = generate(model, [prompt], config, mask_token_id=M, row_ids=[row], decode=decode)
        assert alone.sequences[0].tolist() == result.sequences[row].tolist()


@pytest.mark.parametrize("part", range(3))
def test_no_mask_leaves_prompts_stay_and_batches_do_not_matter(part):
    rng, done, refused = random.Random(part), 0, []
    while done < 25:
        dtype, scale = rng.choice([(torch.float64, 1.0), (torch.float64, 3.0), (torch.bfloat16, 200.0)])
        model = Small(rng.randint(0, 50), dtype, scale)
        prompts = [
            [rng.randrange(VOCABULARY) for _ in range(rng.choice((0, 1, 2, 9)))] for _ in range(rng.randint(1, 4))
        ]
        fields = drawn_settings(rng)
        try:
            check(model, prompts, SamplerConfig(**fields))
        except ValueError as error:
            refused.append(str(error))
            continue
        except AssertionError as error:
            raise AssertionError(f"{fields} {prompts} {dtype} {scale}") from error
        done += 1
    known = ("right_shift scores each token", "leaves no room", "leave a token to choose")
    assert all(any(part in text for part in known) for text in refused)
