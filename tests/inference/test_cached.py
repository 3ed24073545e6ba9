"""Megatron models with a cache of keys and values.

Shape letters: B rows, T canvas positions, L positions of one pass.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_dllm.collections.diffusion.sampling import SamplerConfig, generate, infill

pytestmark = pytest.mark.nemo

TESTS = Path(__file__).parents[1]
MODELS = TESTS / "golden" / "models"
LONG_PROMPTS = [[29, 12, 4, 0, 159, 33, 91, 8, 7], [3, 88, 1, 16, 33, 70, 25, 188, 118, 2, 67, 100, 40, 87]]
PROMPTS = [[12, 60, 4], [29, 12, 4, 0, 159, 33, 91, 8, 7], [5], [88, 7, 1, 8]]


def lists(rows):
    return [row.tolist() for row in rows]


@pytest.fixture(scope="module")
def denoiser(single_process):
    """Name of a golden checkpoint and a block size (None: its own) -> its MegatronDenoiser."""
    from nemo_dllm.collections.diffusion.inference import MegatronDenoiser, load_checkpoint

    models = {}

    def of(name, block_size=None, **fields):
        if name not in models:
            models[name] = load_checkpoint(MODELS / name)
        model = models[name]
        return MegatronDenoiser(model.core, block_size or model.block_size, **fields), model.mask_token_id

    return of


def sample(denoiser_and_mask, prompts, **fields):
    model, mask = denoiser_and_mask
    config = SamplerConfig(**{"max_new_tokens": 10, "block_size": 4, **fields})
    device = next(model.core.parameters()).device
    return generate(model, prompts, config, mask_token_id=mask, device=device)


@pytest.mark.parametrize("name", ["sdar", "llada2_moe", "a2d_qwen3", "a2d_llama"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"threshold": 0.06, "block_size": 8},
        {"temperature": 1.0, "top_k": 20, "seed": 3},
        {"right_shift": True, "steps_per_block": 2},
        {"cfg_scale": 1.0, "steps_per_block": 2},
        {"block_size": 1, "max_new_tokens": 4},
        {"block_size": 64},
    ],
)
def test_the_cache_changes_no_token(denoiser, name, fields):
    """Unequal prompts: cached blocks against the whole canvas under the block-causal mask."""
    model = denoiser(name, fields.get("block_size", 4))
    for prompts in (PROMPTS, LONG_PROMPTS):
        cached = sample(model, prompts, **fields, cache="exact")
        whole = sample(model, prompts, **fields, block_origin="sequence")
        assert lists(cached.sequences) == lists(whole.sequences)


@pytest.mark.parametrize("name", ["sdar", "llada2_moe", "a2d_qwen3"])
def test_cached_logits_are_those_of_the_whole_canvas(denoiser, name):
    model, _ = denoiser(name, 4)
    device = next(model.core.parameters()).device
    tokens_BT = torch.randint(0, 190, (2, 12), generator=torch.Generator().manual_seed(0)).to(device)
    positions_BT = torch.arange(12, device=device).expand(2, -1)
    # Row 0 has committed two blocks, row 1 one; then each scores its next block.
    lengths_B1 = torch.tensor([[8], [4]], device=device)
    cache = model.new_cache(2, 12)
    last_BV = model.commit(
        tokens_BT[:, :8],
        positions_BT[:, :8],
        cache,
        key_mask_BL=positions_BT[:, :8] < lengths_B1,
        blocks_BL=positions_BT[:, :8] // 4,
    )
    positions_BL = lengths_B1 + torch.arange(4, device=device)
    block_BL = tokens_BT.gather(1, positions_BL)
    scored_BLV = model.denoise(block_BL, positions_BL, cache, key_mask_BL=torch.ones_like(block_BL, dtype=torch.bool))
    whole_BTV = model(tokens_BT)
    tolerance = {"rtol": 0, "atol": 1e-4 if device.type == "cuda" else 2e-5}
    torch.testing.assert_close(last_BV, torch.stack([whole_BTV[0, 7], whole_BTV[1, 3]]), **tolerance)
    torch.testing.assert_close(scored_BLV, torch.stack([whole_BTV[0, 8:12], whole_BTV[1, 4:8]]), **tolerance)
    # Not so without the blocks' mask.
    model, _ = denoiser(name, 12)
    assert (model(tokens_BT)[0, 8:12] - scored_BLV[0]).abs().max() > 1e-2


@pytest.mark.parametrize("kernel", ["eager", "flex"])
def test_every_backend_attends_to_a_cache(denoiser, monkeypatch, kernel):
    from nemo_dllm.collections.diffusion.attention import core

    model, mask = denoiser("sdar")
    right = lists(sample((model, mask), LONG_PROMPTS, cache="exact").sequences)
    for layer in model.core.decoder.layers:
        monkeypatch.setattr(layer.self_attention.core_attention, "patterned", getattr(core, kernel))
    assert lists(sample((model, mask), LONG_PROMPTS, cache="exact").sequences) == right


@pytest.mark.parametrize("name", ["sdar", "llada"])
def test_a_few_entries_of_the_canvas_are_scored_as_all_are(denoiser, name):
    model, _ = denoiser(name)
    device = next(model.core.parameters()).device
    tokens_BT = torch.randint(0, 190, (3, 10), generator=torch.Generator().manual_seed(0)).to(device)
    key_mask_BT = torch.arange(10, device=device) < torch.tensor([[10], [7], [8]], device=device)
    rows_N, positions_N = torch.tensor([[0, 1, 2, 2], [9, 3, 0, 7]], device=device)
    logits_NV = model.score_positions(tokens_BT, rows_N, positions_N, key_mask_BT=key_mask_BT)
    whole_BTV = model(tokens_BT, key_mask_BT=key_mask_BT)
    torch.testing.assert_close(logits_NV, whole_BTV[rows_N, positions_N], rtol=0, atol=1e-4)


def test_the_equality_is_not_vacuous(denoiser):
    right = lists(sample(denoiser("sdar", 4), LONG_PROMPTS, cache="exact").sequences)
    assert lists(sample(denoiser("sdar", 4), LONG_PROMPTS, cache="exact", block_origin="prompt").sequences) != right
    assert lists(sample(denoiser("sdar", 64), LONG_PROMPTS, block_origin="sequence").sequences) != right
    causal = denoiser("sdar", 4, causal_commits=True)
    assert lists(sample(causal, LONG_PROMPTS, cache="exact").sequences) != right


def test_a_batch_gives_what_its_rows_give_alone(denoiser):
    fields = {"cache": "exact", "temperature": 0.8, "remasking": "random", "seed": 2}
    together = sample(denoiser("sdar"), PROMPTS, **fields)
    model, mask = denoiser("sdar")
    for row, prompt in enumerate(PROMPTS):
        config = SamplerConfig(max_new_tokens=10, block_size=4, **fields)
        alone = generate(
            model,
            [prompt],
            config,
            mask_token_id=mask,
            row_ids=[row],
            device=next(model.core.parameters()).device,
        )
        assert lists(alone.sequences) == lists(together.sequences[row : row + 1])


def test_blocks_run_alone_through_the_layers(denoiser, monkeypatch):
    model, mask = denoiser("sdar")
    lengths = []
    encode = model.core.encode

    def counted(input_ids, *rest, **named):
        lengths.append(input_ids.size(1))
        return encode(input_ids, *rest, **named)

    monkeypatch.setattr(model.core, "encode", counted)
    sample((model, mask), [[1] * 9], max_new_tokens=8, steps_per_block=2, cache="exact")
    # A finished block goes along with the next one.
    assert lengths == [8, 4, 4, 8, 4, 5]


@pytest.mark.parametrize("block_origin, lengths", [("sequence", [4, 4, 4, 4, 4]), ("prompt", [10, 4, 4])])
def test_long_prompts_are_committed_in_parts_of_whole_blocks(denoiser, monkeypatch, block_origin, lengths):
    """Cut where all rows begin a block: counted from the ends of unequal prompts, not before one of them is over."""
    from nemo_dllm.collections.diffusion.inference import cached

    model, mask = denoiser("sdar")
    fields = {"cache": "exact", "right_shift": True, "block_origin": block_origin, "max_new_tokens": 8}
    at_once = sample((model, mask), LONG_PROMPTS, **fields)
    committed = []
    window = cached.KVCache.window

    def counted(cache, positions_BL, key_mask_BL, blocks_BL=None):
        if blocks_BL is not None:
            committed.append(positions_BL.size(1))
        return window(cache, positions_BL, key_mask_BL, blocks_BL)

    monkeypatch.setattr(cached.KVCache, "window", counted)
    monkeypatch.setattr(cached, "COMMITTED_AT_ONCE", 10)
    in_parts = sample((model, mask), LONG_PROMPTS, **fields)
    assert lists(in_parts.sequences) == lists(at_once.sequences)
    assert committed[: len(lengths)] == lengths


@pytest.mark.parametrize(
    "longest, parts", [(3, [2, 4, 3]), (4, [2, 4, 3]), (6, [6, 3]), (7, [6, 3]), (8, [6, 3]), (9, [9])]
)
def test_parts_of_whole_blocks(single_process, longest, parts):
    from nemo_dllm.collections.diffusion.inference.cached import _whole_blocks

    # Blocks begin together at 2 and 6; row 1 ends after 7.
    blocks_BL = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2, 2], [3, 3, 4, 4, 5, 5, 6, 0, 0]])
    real_BL = torch.arange(9) < torch.tensor([[9], [7]])
    cut = _whole_blocks(blocks_BL, real_BL, longest)
    assert [part.stop - part.start for part in cut] == parts
    assert [part.start for part in cut] == [0, *(part.stop for part in cut[:-1])]


def test_committed_tokens_may_attend_causally(denoiser):
    """What a model trained with a next-token loss reads: the prefix causally, the block at hand in both directions."""
    model, mask = denoiser("sdar", 4, causal_commits=True)
    device = next(model.core.parameters()).device
    tokens_BT = torch.tensor([LONG_PROMPTS[0][:8]], device=device)
    positions_BT = torch.arange(8, device=device)[None]
    cache = model.new_cache(1, 8)
    everywhere = torch.ones(1, 8, dtype=torch.bool, device=device)
    blocks_BT = positions_BT // 4
    last_BV = model.commit(tokens_BT, positions_BT, cache, key_mask_BL=everywhere, blocks_BL=blocks_BT)
    torch.testing.assert_close(last_BV, denoiser("sdar", 1)[0](tokens_BT)[:, -1], rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="cache=None cannot be used with this model.*set cache='exact'"):
        sample((model, mask), LONG_PROMPTS, block_origin="sequence")


@pytest.mark.parametrize("causal_commits", [False, True])
@pytest.mark.parametrize("name", ["sdar", "llada2_moe", "a2d_qwen3"])
def test_a_block_is_encoded_in_the_pass_that_scores_the_next_one(denoiser, name, causal_commits):
    model, mask = denoiser(name, 4, causal_commits=causal_commits)

    class TwoPasses:
        new_cache, denoise, commit = model.new_cache, model.denoise, model.commit

    counted = []
    encode = model.core.encode
    model.core.encode = lambda tokens_BL, *rest: (counted.append(tokens_BL.shape[1]), encode(tokens_BL, *rest))[1]
    try:
        texts = []
        for one in (model, TwoPasses):
            counted.append(0)
            config = SamplerConfig(14, block_size=4, cache="exact", steps_per_block=1)
            device = next(model.core.parameters()).device
            texts.append(lists(generate(one, PROMPTS, config, mask_token_id=mask, device=device).sequences))
        assert texts[0] == texts[1]
        assert len(counted[: counted.index(0, 1)]) < len(counted[counted.index(0, 1) :])
    finally:
        del model.core.encode


@pytest.mark.parametrize("cache", ["approximate_prefix", "approximate_dual"])
@pytest.mark.parametrize("name", ["a2d_qwen3", "llada", "dream"])
def test_approximate_caches_of_bidirectional_models(denoiser, name, cache):
    model, mask = denoiser(name)
    fields = {"cache": cache, "right_shift": name == "dream"}
    result = sample((model, mask), PROMPTS, **fields)
    assert mask not in torch.cat(result.completions) and all(len(row) == 10 for row in result.completions)
    # The first step of a block reuses what is fresh.
    one_step = sample((model, mask), PROMPTS, right_shift=name == "dream", steps_per_block=1)
    assert lists(sample((model, mask), PROMPTS, **fields, steps_per_block=1).sequences) == lists(one_step.sequences)


@pytest.mark.parametrize("name", ["a2d_qwen3", "llada", "dream"])
def test_the_delayed_cache_of_bidirectional_models(denoiser, name):
    fields = {"right_shift": name == "dream", "block_size": None}
    delayed, whole = (
        sample(denoiser(name), PROMPTS, **fields, **cache)
        for cache in ({"cache": "approximate_delayed", "refresh_interval": 1}, {})
    )
    assert lists(delayed.sequences) == lists(whole.sequences)
    late = sample(denoiser(name), PROMPTS, **fields, cache="approximate_delayed", refresh_interval=4)
    alone = [sample(denoiser(name), [p], **fields, cache="approximate_delayed", refresh_interval=4) for p in PROMPTS]
    assert lists(late.sequences) == [one.sequences[0].tolist() for one in alone]
    assert denoiser(name)[1] not in torch.cat(late.completions) and late.steps == 10


def test_infilling_with_a_cache(denoiser):
    model, mask = denoiser("sdar")
    rows = [[7, mask, mask, 9, mask, 3, 4, 5, mask, 6], [1, 2, 3, 4, 5, mask, 7]]
    holes = [[token == mask for token in row] for row in rows]
    device = next(model.core.parameters()).device
    cached, whole = (
        infill(model, rows, holes, SamplerConfig(block_size=4, **fields), mask_token_id=mask, device=device)
        for fields in ({"cache": "exact"}, {"block_origin": "sequence"})
    )
    assert lists(cached.sequences) == lists(whole.sequences)


@pytest.fixture(scope="module")
def traces():
    """The test that repeats dllm's recorded canvases, for its reading of them."""
    spec = importlib.util.spec_from_file_location("traces", TESTS / "sampling" / "test_golden_traces.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TRACES = {
    "mdlm_a2d_qwen3": ["basic", "blocks", "batch_unequal_cosine", "cfg_batch_keep", "right_shift", "infill_batch"],
    "mdlm_llada": ["basic", "batch_unequal", "cfg"],
    "bd3lm_a2d_qwen3": ["basic", "batch_unequal", "cfg"],
    "bd3lm_sdar": [
        "basic",
        "prompt_not_multiple",
        "batch_unequal",
        "ragged_last_block",
        "cfg",
        "right_shift",
        "gumbel",
    ],
    "llada2_llada2_moe": ["basic", "two_steps", "batch_threshold", "steps3"],
    "dream_dream": ["maskgit", "entropy", "margin", "batch_left_pad", "cfg"],
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="recorded on a CPU: near ties fall otherwise on a GPU")
@pytest.mark.parametrize("file, name", [(file, name) for file, names in TRACES.items() for name in names])
def test_recorded_canvases(denoiser, traces, file, name):
    """dllm's canvases, step by step, from the Megatron models."""
    case, kind = traces.TRACES[f"{file}.safetensors"][name], file.split("_")[0]
    config = traces.settings(case, kind)
    model, mask = denoiser(case["model"])
    assert mask == case["token_ids"]["mask_token_id"]
    steps = list(traces.our_steps(model, case, config))
    history_SBT = load_file(traces.GOLDEN / f"{file}.safetensors")[f"{name}.history"]
    traces.assert_recorded(steps, case, kind, config, history_SBT)
