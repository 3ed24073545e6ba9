"""The delayed cache against an oracle that writes its definition out. Shape letters: T positions, E hidden size."""

import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import SamplerConfig, generate, generate_stream, infill

M = 197
PROMPTS = [[12, 60, 4], [29, 12, 4, 0, 159, 33, 91, 8, 7], [5], [88, 7, 1, 8]]


def lists(rows):
    return [row.tolist() for row in rows]


def sample(model, prompts=PROMPTS, **fields):
    return generate(model, prompts, SamplerConfig(**{"max_new_tokens": 9, **fields}), mask_token_id=M)


class Attention:
    """One layer of attention whose keys and values may come from another time than its queries."""

    def __init__(self, vocab=30, size=16, seed=0):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.embedding, self.turn = draw(vocab, size), draw(64, size)
        self.first, self.query, self.key, self.value = (draw(size, size) / 4 for _ in range(4))
        self.head = draw(size, vocab)

    def project(self, tokens, positions):
        """Queries, keys and values of one token each, and what goes past the attention."""
        hidden_E = (self.embedding[tokens] + self.turn[positions]).tanh() @ self.first
        return hidden_E @ self.query, hidden_E @ self.key, hidden_E @ self.value, hidden_E

    def attend(self, query_E, keys_TE, values_TE):
        return (keys_TE @ query_E).softmax(dim=0) @ values_TE


class TwoLayers:
    """Two such layers, so that what is kept depends on the canvas of its time; a row at a time, by the definition.

    ``kept`` holds the keys and values of both layers by position, ``recomputed`` what each pass encoded.
    """

    def __init__(self, mask, interval):
        self.layer, self.mask, self.interval = Attention(), mask, interval
        self.kept, self.passes, self.before, self.recomputed = {}, 0, None, []

    def logits(self, tokens):
        fresh = self.passes % self.interval == 0
        new = set() if self.before is None else {i for i, t in enumerate(tokens) if t != self.before[i]}
        computed = [i for i, t in enumerate(tokens) if fresh or t == self.mask or i in new]
        states = {i: dict(self.kept[i]) for i in self.kept if i not in computed}
        hidden = {i: self.layer.embedding[tokens[i]] + self.layer.turn[i] for i in computed}
        for depth in range(2):
            projected = {i: hidden[i].tanh() @ self.layer.first for i in computed}
            for i in computed:
                states.setdefault(i, {})[depth] = (projected[i] @ self.layer.key, projected[i] @ self.layer.value)
            keys, values = (torch.stack([states[i][depth][part] for i in sorted(states)]) for part in (0, 1))
            for i in computed:
                hidden[i] = hidden[i] + self.layer.attend(projected[i] @ self.layer.query, keys, values)
        self.kept |= {i: states[i] for i in computed if tokens[i] != self.mask}
        self.passes, self.before = self.passes + 1, list(tokens)
        self.recomputed.append(computed)
        return {i: hidden[i] @ self.layer.head for i in computed}


class Cached:
    """The same two layers behind the protocol of the sampler."""

    def __init__(self):
        self.layer, self.given = Attention(), []

    def new_cache(self, rows, positions):
        from nemo_dllm.collections.diffusion.sampling import KVCache

        return KVCache(rows, positions)

    def score_and_keep(self, tokens_BL, positions_BL, cache, rows_N, columns_N, *, key_mask_BL, kept_BL):
        self.given.append([p[v].tolist() for p, v in zip(positions_BL, key_mask_BL, strict=True)])
        window = cache.window(positions_BL, key_mask_BL)
        hidden_BLE = self.layer.embedding[tokens_BL] + self.layer.turn[positions_BL]
        for depth in range(2):
            projected_BLE = hidden_BLE.tanh() @ self.layer.first
            keys, values = cache.write(
                depth, window, *((projected_BLE @ w)[:, :, None] for w in (self.layer.key, self.layer.value))
            )
            scores_BLS = (projected_BLE @ self.layer.query) @ keys[:, :, 0].transpose(1, 2)
            weights_BLS = scores_BLS.masked_fill(~window.visible_BLS, -torch.inf).softmax(dim=-1)
            hidden_BLE = hidden_BLE + weights_BLS @ values[:, :, 0]
        cache.hold(window, kept_BL)
        return (hidden_BLE @ self.layer.head)[rows_N, columns_N]


def oracle(prompt, length, interval, mask=29):
    """Greedy, one token per step, the surest first: the tokens, and what each pass encoded."""
    model, tokens = TwoLayers(mask, interval), [*prompt, *[mask] * length]
    while mask in tokens:
        logits = model.logits(tokens)
        best = None
        for position in [i for i, token in enumerate(tokens) if token == mask]:
            probabilities = logits[position].float()
            probabilities[mask] = -torch.inf
            probability, token = probabilities.softmax(dim=0).max(dim=0)
            if best is None or probability > best[0]:
                best = (probability, position, token.item())
        tokens[best[1]] = best[2]
    return tokens, model.recomputed


@pytest.mark.parametrize("interval", [1, 2, 3, 5, 50])
@pytest.mark.parametrize("prompt", [[3, 1, 4], [15, 9, 2, 6, 5], [7]])
def test_it_is_what_its_definition_says(interval, prompt):
    model = Cached()
    config = SamplerConfig(7, cache="approximate_delayed", refresh_interval=interval)
    result = generate(model, [prompt], config, mask_token_id=29)
    tokens, encoded = oracle(prompt, 7, interval)
    assert result.sequences[0].tolist() == tokens
    assert [given[0] for given in model.given] == encoded


def test_what_a_pass_encodes():
    """Everything at first; then the holes, and the token that the pass before has chosen."""
    model = Cached()
    config = SamplerConfig(4, cache="approximate_delayed", refresh_interval=3)
    steps = list(generate_stream(model, [[3, 1]], config, mask_token_id=29))
    chosen = [step.committed_BT[0].nonzero().flatten().tolist() for step in steps]
    holes = [{2, 3, 4, 5}]
    for positions in chosen:
        holes.append(holes[-1] - set(positions))
    everything = set(range(6))
    wanted = [everything, holes[1] | set(chosen[0]), holes[2] | set(chosen[1]), everything]
    assert [set(given[0]) for given in model.given] == wanted


def test_the_oracle_knows_the_difference():
    """Late refreshes give other tokens than no cache on these prompts, or equality above would show nothing."""
    prompts = [[3, 1, 4], [15, 9, 2, 6, 5], [7], [11, 12], [20, 3]]
    assert any(oracle(prompt, 7, 50)[0] != oracle(prompt, 7, 1)[0] for prompt in prompts)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"block_size": 3},
        {"steps": 3, "block_size": 4},
        {"threshold": 0.06},
        {"temperature": 1.0, "top_k": 20, "seed": 3},
        {"right_shift": True},
        {"right_shift": True, "block_size": 3, "steps_per_block": 2},
        {"cfg_scale": 1.0},
        {"editing_threshold": 0.0, "max_post_steps": 2, "block_size": 4},
        {"eos_token_id": 139, "temperature": 2.0, "seed": 5},
    ],
)
def test_with_an_interval_of_1_it_is_exact(tiny_decoder, fields):
    delayed = sample(tiny_decoder("llada"), cache="approximate_delayed", refresh_interval=1, **fields)
    whole = sample(tiny_decoder("llada"), **fields)
    assert lists(delayed.sequences) == lists(whole.sequences) and delayed.steps == whole.steps
    assert M not in torch.cat(delayed.completions)


@pytest.mark.parametrize("interval", [2, 4, 100])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"threshold": 0.08, "block_size": 3},
        {"temperature": 0.8, "remasking": "random", "seed": 2},
        {"right_shift": True},
        {"cfg_scale": 0.5, "block_size": 4},
        {"editing_threshold": 0.03, "max_post_steps": 2, "block_size": 4},
    ],
)
def test_a_batch_gives_what_its_rows_give_alone(tiny_decoder, interval, fields):
    fields = {**fields, "cache": "approximate_delayed", "refresh_interval": interval}
    together = sample(tiny_decoder("llada"), **fields)
    assert lists(together.sequences) == lists(sample(tiny_decoder("llada"), **fields).sequences)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(tiny_decoder("llada"), [prompt], SamplerConfig(9, **fields), mask_token_id=M, row_ids=[row])
        assert alone.sequences[0].tolist() == together.sequences[row].tolist()
    assert M not in torch.cat(together.completions)


def test_infilling_and_masks_in_the_text(tiny_decoder):
    rows = [[7, M, M, 9, M, 3, 4], [1, M, 3]]
    holes = [[False, True, False, False, True, False, False], [False, True, False]]
    for interval in (1, 2):
        config = SamplerConfig(cache="approximate_delayed", refresh_interval=interval)
        filled = lists(infill(tiny_decoder("llada"), rows, holes, config, mask_token_id=M).sequences)
        kept = [[t for t, h in zip(row, hole, strict=True) if not h] for row, hole in zip(filled, holes, strict=True)]
        assert kept == [[7, M, 9, 3, 4], [1, 3]] and M not in (filled[0][1], filled[0][4], filled[1][1])
    exact = infill(tiny_decoder("llada"), rows, holes, SamplerConfig(), mask_token_id=M)
    config = SamplerConfig(cache="approximate_delayed", refresh_interval=1)
    assert lists(infill(tiny_decoder("llada"), rows, holes, config, mask_token_id=M).sequences) == lists(
        exact.sequences
    )


def test_it_needs_a_model_that_keeps_some():
    class OnlyBlocks:
        def new_cache(self, rows, positions): ...

        def denoise(self): ...

        def commit(self): ...

    with pytest.raises(ValueError, match="cache='approximate_delayed' needs a model with new_cache and score_and_keep"):
        sample(OnlyBlocks(), cache="approximate_delayed")
