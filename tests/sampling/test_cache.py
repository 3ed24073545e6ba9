"""Keys and values kept between steps. Shape letters: B rows, L positions of one pass, S cache slots."""

import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import (
    CachedDenoiser,
    KVCache,
    SamplerConfig,
    generate,
    generate_stream,
    infill,
)
from nemo_dllm.collections.diffusion.sampling.denoise import denoise
from nemo_dllm.collections.diffusion.sampling.kv_cache import HIDDEN

M = 196
# The first blocks of these are encoded together.
LONG_PROMPTS = [[29, 12, 4, 0, 159, 33, 91, 8, 7], [3, 88, 1, 16, 33, 70, 25, 188, 118, 2, 67, 100, 40, 87]]
PROMPTS = [[12, 60, 4], [29, 12, 4, 0, 159, 33, 91, 8, 7], [5], [88, 7, 1, 8]]


def lists(rows):
    return [row.tolist() for row in rows]


@pytest.mark.parametrize("name", ["sdar", "llada2_moe"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"steps_per_block": 2},
        {"threshold": 0.06, "block_size": 8},
        {"temperature": 1.0, "top_k": 20, "seed": 3},
        {"right_shift": True},
        {"editing_threshold": 0.0, "max_post_steps": 2},
        {"cfg_scale": 1.0},
        {"block_size": 1},
        {"block_size": 1, "right_shift": True, "temperature": 1.0, "seed": 3},
        {"right_shift": True, "cfg_scale": 1.0, "steps_per_block": 2},
        {"block_size": 64},
        {"eos_token_id": 139, "temperature": 2.0, "seed": 5},
    ],
)
def test_committed_blocks_give_what_the_whole_canvas_gives(tiny_decoder, name, fields):
    """A block-causal model with a cache, and the same model seeing all of the canvas under its mask."""
    fields = {"block_size": 4, "max_new_tokens": 10, **fields}
    cached_model, model = tiny_decoder(name), tiny_decoder(name, block_size=fields["block_size"])
    mask = 197 if name == "llada2_moe" else M
    cached = generate(cached_model, PROMPTS, SamplerConfig(**fields, cache="exact"), mask_token_id=mask)
    whole = generate(model, PROMPTS, SamplerConfig(**fields, block_origin="sequence"), mask_token_id=mask)
    assert lists(cached.sequences) == lists(whole.sequences)
    assert mask not in torch.cat(cached.completions)


@pytest.mark.parametrize("fields", [{}, {"right_shift": True}, {"cfg_scale": 1.0, "steps_per_block": 2}])
def test_long_prompts_are_encoded_under_the_block_mask(tiny_decoder, fields):
    fields = {"block_size": 4, "max_new_tokens": 7, **fields}
    cached = generate(tiny_decoder("sdar"), LONG_PROMPTS, SamplerConfig(**fields, cache="exact"), mask_token_id=M)
    config = SamplerConfig(**fields, block_origin="sequence")
    whole = generate(tiny_decoder("sdar", 4), LONG_PROMPTS, config, mask_token_id=M)
    assert lists(cached.sequences) == lists(whole.sequences)


def test_the_equality_is_not_vacuous(tiny_decoder):
    """Another mask, other borders, or a prompt that sees itself in both directions: other tokens."""

    class Bidirectional(type(tiny_decoder("sdar"))):
        def commit(self, tokens_BL, positions_BL, cache, *, key_mask_BL, blocks_BL):
            blocks_BL = torch.zeros_like(blocks_BL)
            return super().commit(tokens_BL, positions_BL, cache, key_mask_BL=key_mask_BL, blocks_BL=blocks_BL)

    def sample(model, **fields):
        config = SamplerConfig(10, block_size=4, **fields)
        return lists(generate(model, LONG_PROMPTS, config, mask_token_id=M).sequences)

    right = sample(tiny_decoder("sdar", 4), block_origin="sequence")
    assert sample(tiny_decoder("sdar"), block_origin="sequence") != right
    assert sample(tiny_decoder("sdar"), cache="exact", block_origin="prompt") != right
    bidirectional = tiny_decoder("sdar")
    bidirectional.__class__ = Bidirectional
    assert sample(bidirectional, cache="exact") != right


def test_a_batch_with_a_cache_gives_what_its_rows_give_alone(tiny_decoder):
    config = SamplerConfig(9, cache="exact", block_size=4, temperature=0.8, remasking="random", seed=2)
    together = generate(tiny_decoder("sdar"), PROMPTS, config, mask_token_id=M)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(tiny_decoder("sdar"), [prompt], config, mask_token_id=M, row_ids=[row])
        assert alone.sequences[0].tolist() == together.sequences[row].tolist()


class TwoPasses:
    """A model that encodes blocks in passes of their own."""

    def __init__(self, model):
        self.new_cache, self.denoise, self.commit = model.new_cache, model.denoise, model.commit


@pytest.mark.parametrize(
    "apart, lengths",
    [
        # 8 tokens of the prompt; 3 holes behind its last one, in 2 steps; the block; 4 in 2; the block; 1 hole left.
        (TwoPasses, [8, 4, 4, 4, 4, 4, 4, 1]),
        # The block and the next one; its second step; the block and 1 hole.
        (lambda model: model, [8, 4, 4, 8, 4, 5]),
    ],
)
def test_a_block_is_encoded_once_and_each_step_sees_the_block_at_hand(tiny_decoder, apart, lengths):
    model = tiny_decoder("sdar")
    seen, forward = [], model._forward
    model._forward = lambda tokens_BL, *rest: (seen.append(tokens_BL.shape[1]), forward(tokens_BL, *rest))[1]
    config = SamplerConfig(8, cache="exact", block_size=4, steps_per_block=2)
    generate(apart(model), [[1] * 9], config, mask_token_id=M)
    assert seen == lengths


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"block_size": 3, "steps_per_block": 1},
        {"temperature": 1.0, "seed": 4},
        {"threshold": 0.05},
        {"cfg_scale": 1.0},
        {"editing_threshold": 0.0, "max_post_steps": 2},
        {"eos_token_id": 139, "temperature": 2.0, "seed": 5},
        {"block_origin": "prompt"},
    ],
    ids=str,
)
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1], LONG_PROMPTS, [[]]], ids=len)
def test_blocks_encoded_with_the_next_ones_give_what_they_give_apart(tiny_decoder, fields, prompts):
    config = SamplerConfig(14, **{"block_size": 4, "cache": "exact", **fields})
    models = tiny_decoder("sdar"), TwoPasses(tiny_decoder("sdar"))
    joint, apart = (list(generate_stream(model, prompts, config, mask_token_id=M)) for model in models)
    assert len(joint) == len(apart)
    for one, other in zip(joint, apart, strict=True):
        for name in ("tokens_BT", "holes_BT", "committed_BT", "settled_BT"):
            assert torch.equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("fields", [{}, {"block_size": 2}, {"threshold": 0.0}])
def test_infilled_blocks_encoded_with_the_next_ones_give_what_they_give_apart(tiny_decoder, fields):
    """Among them blocks without a hole."""
    tokens, holes = torch.arange(1, 31).expand(3, -1), torch.zeros(3, 30, dtype=torch.bool)
    holes[0, [3, 4, 5, 17, 18, 29]] = True
    holes[1, [0, 28]] = True
    holes[2, 8:13] = True
    config = SamplerConfig(6, **{"block_size": 4, "cache": "exact", **fields})
    models = tiny_decoder("sdar"), TwoPasses(tiny_decoder("sdar"))
    joint, apart = (infill(model, tokens, holes, config, mask_token_id=M) for model in models)
    assert lists(joint.sequences) == lists(apart.sequences) and joint.steps == apart.steps


def test_rows_of_unequal_prompts_fill_their_blocks_side_by_side(tiny_decoder):
    prompts = [[1] * 4, [2] * 40]
    result = generate(tiny_decoder("sdar"), prompts, SamplerConfig(8, cache="exact", block_size=4), mask_token_id=M)
    assert result.steps == 8


@pytest.mark.parametrize("fields", [{}, {"editing_threshold": 0.05}, {"steps_per_block": 2, "schedule": "even"}])
def test_infilling_with_committed_blocks(tiny_decoder, fields):
    rows = [[7, M, M, 9, M, 3, 4, 5, M, 6], [1, 2, 3, 4, 5, M, 7]]
    holes = [[token == M for token in row] for row in rows]
    fields = {"block_size": 4, **fields}
    cached = infill(tiny_decoder("sdar"), rows, holes, SamplerConfig(**fields, cache="exact"), mask_token_id=M)
    config = SamplerConfig(**fields, block_origin="sequence")
    whole = infill(tiny_decoder("sdar", 4), rows, holes, config, mask_token_id=M)
    assert lists(cached.sequences) == lists(whole.sequences)
    for row, given, filled in zip(rows, holes, cached.sequences, strict=True):
        kept = [(token, new) for token, hole, new in zip(row, given, filled.tolist(), strict=True) if not hole]
        assert all(token == new for token, new in kept) and M not in filled


@pytest.mark.parametrize("prompts, passes", [([[5, 9], [7]], [(2, 2), (2, 1), (2, 1)]), ([[]], [(1, 1)] * 3)])
def test_shifted_blocks_of_one_token_take_one_pass_each(tiny_decoder, prompts, passes):
    """The commit of a token scores the next one; only position 0, which has no left neighbour, takes a pass itself."""
    model, seen = tiny_decoder("sdar"), []
    forward = model._forward
    model._forward = lambda tokens_BL, *rest: (seen.append(tuple(tokens_BL.shape)), forward(tokens_BL, *rest))[1]
    config = SamplerConfig(3, cache="exact", block_size=1, right_shift=True)
    canvas_BT = torch.full((len(prompts), max(map(len, prompts)) + 3), M)
    holes_BT = torch.zeros_like(canvas_BT, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        canvas_BT[row, : len(prompt)] = torch.tensor(prompt)
        holes_BT[row, len(prompt) : len(prompt) + 3] = True
    key_mask_BT = torch.arange(canvas_BT.shape[1]) < torch.tensor([[len(prompt) + 3] for prompt in prompts])
    steps = list(denoise(model, canvas_BT, holes_BT, M, config, key_mask_BT))
    assert len(steps) == 3 and seen == passes


@pytest.mark.parametrize("cache", ["approximate_prefix", "approximate_dual"])
@pytest.mark.parametrize("fields", [{}, {"right_shift": True}, {"cfg_scale": 0.5}])
def test_approximate_caches_are_exact_where_a_block_takes_one_step(tiny_decoder, cache, fields):
    # Each step then begins a block, with keys and values of this very canvas.
    fields = {"max_new_tokens": 8, "block_size": 4, "steps_per_block": 1, **fields}
    approximate = generate(tiny_decoder("llada"), PROMPTS, SamplerConfig(**fields, cache=cache), mask_token_id=197)
    exact = generate(tiny_decoder("llada"), PROMPTS, SamplerConfig(**fields), mask_token_id=197)
    assert lists(approximate.sequences) == lists(exact.sequences)


@pytest.mark.parametrize("cache", ["approximate_prefix", "approximate_dual"])
def test_approximate_caches_by_hand(tiny_decoder, cache):
    """The second step of a block attends to keys of the first canvas outside its window."""
    model = tiny_decoder("llada")
    prompt, config = [5, 9, 3], SamplerConfig(6, block_size=3, cache=cache)
    first, second = list(_steps(model, prompt, config))[:2]
    before = torch.tensor([prompt + [197] * 6])
    positions = torch.arange(9)[None]
    cache_of_all = KVCache(1, 9)
    whole = dict(key_mask_BL=torch.ones(1, 9, dtype=torch.bool))
    model.commit(before, positions, cache_of_all, **whole, blocks_BL=torch.zeros(1, 9, dtype=torch.int64))
    end = 6 if cache == "approximate_dual" else 9
    logits = model.denoise(
        first.tokens_BT[:, 3:end], positions[:, 3:end], cache_of_all, key_mask_BL=whole["key_mask_BL"][:, 3:end]
    )
    logits[..., 197] = -torch.inf
    probability, token = logits[0, :3].softmax(dim=-1).max(dim=-1)
    best = probability.masked_fill(~first.holes_BT[0, 3:6], -1).argmax()
    assert second.committed_BT[0].nonzero().tolist() == [[3 + best]]
    assert second.tokens_BT[0, 3 + best] == token[best]


def _steps(model, prompt, config):
    canvas_BT = torch.tensor([prompt + [197] * config.max_new_tokens])
    return denoise(model, canvas_BT, torch.arange(canvas_BT.shape[1])[None] >= len(prompt), 197, config)


@pytest.mark.parametrize("cache", ["approximate_prefix", "approximate_dual"])
def test_approximate_caches_do_not_depend_on_the_batch(tiny_decoder, cache):
    config = SamplerConfig(9, cache=cache, block_size=3, threshold=0.08)
    together = generate(tiny_decoder("llada"), PROMPTS, config, mask_token_id=197)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(tiny_decoder("llada"), [prompt], config, mask_token_id=197)
        assert alone.sequences[0].tolist() == together.sequences[row].tolist()
    assert 197 not in torch.cat(together.completions)


def test_a_plain_function_has_no_cache(table_model):
    with pytest.raises(ValueError, match="cache='exact' needs a model with new_cache, denoise and commit.*TableModel"):
        generate(table_model({}), [[1]], SamplerConfig(4, cache="exact", block_size=4), mask_token_id=9)


def test_the_tiny_decoder_has_what_the_protocol_asks_for(tiny_decoder):
    methods = [name for name in vars(CachedDenoiser) if not name.startswith("_")]
    assert methods == ["new_cache", "denoise", "commit", "score_and_keep"]
    assert all(callable(getattr(tiny_decoder("sdar"), name)) for name in methods)


def test_cache_windows_by_hand():
    cache = KVCache(2, 5)
    valid = torch.tensor([[True, True, True], [True, False, False]])
    positions = torch.tensor([[0, 1, 2], [0, 0, 0]])
    blocks = torch.tensor([[0, 0, 1], [0, 0, 0]])
    prefix = cache.window(positions, valid, blocks)
    yes, no = True, False
    assert prefix.slots_BL.tolist() == [[0, 1, 2], [0, 5, 5]]
    assert prefix.visible_BLS[0].tolist() == [[yes, yes, no, no, no, no]] * 2 + [[yes, yes, yes, no, no, no]]
    assert prefix.visible_BLS[1, 0].tolist() == [yes, no, no, no, no, no]
    assert not cache.held_BS.any()
    cache.hold(prefix)
    assert cache.held_BS.tolist() == [[yes, yes, yes, no, no, no], [yes, no, no, no, no, no]]
    block = cache.window(torch.tensor([[3], [0]]), torch.tensor([[True], [False]]))
    # Row 1 is idle, and still sees what it holds; what a pass writes is not kept by itself.
    assert block.visible_BLS.tolist() == [[[yes, yes, yes, yes, no, no]], [[yes, no, no, no, no, no]]]
    assert cache.window(positions, valid).visible_BLS[0].tolist() == [[yes, yes, yes, no, no, no]]


def test_a_position_sees_slots_of_at_most_its_rank():
    cache = KVCache(1, 5)
    cache.hold(cache.window(torch.tensor([[0, 1]]), torch.tensor([[True, True]])))
    window = cache.window(torch.tensor([[1, 2, 3]]), torch.tensor([[True, True, False]]), torch.tensor([[-1, 7, 9]]))
    # Slot 1 is written anew, slot 3 is padding here.
    assert window.ranks_BL.tolist() == [[-1, 7, 9]]
    assert window.slot_ranks_BS.tolist() == [[-(2**31), -1, 7, HIDDEN, HIDDEN, HIDDEN]]
    assert window.places_N.tolist() == [1, 2, 5]
    cache.hold(window, torch.tensor([[True, False, True]]))
    assert cache.held_BS[0].tolist() == [True, True, False, False, False, False]


def test_padding_without_anything_to_see_sees_the_padding_slot():
    window = KVCache(1, 2).window(torch.tensor([[0]]), torch.tensor([[False]]))
    assert window.visible_BLS.tolist() == [[[False, False, True]]]


def test_keys_are_written_to_the_slots_of_their_positions():
    cache = KVCache(1, 3)
    window = cache.window(torch.tensor([[2, 0]]), torch.tensor([[True, True]]))
    new_BLHD = torch.tensor([[[[5.0]], [[7.0]]]])
    keys, values = cache.write(0, window, new_BLHD, -new_BLHD)
    assert keys.flatten().tolist() == [7, 0, 5, 0] and values.flatten().tolist() == [-7, 0, -5, 0]
