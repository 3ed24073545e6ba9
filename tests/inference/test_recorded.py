"""Passes that are replayed over memory of gone caches, with a stand-in for graphs on a CPU.

What a graph would do is run again: over the inputs and the memory that it was recorded with, and over nothing of the
cache that had the memory then. See ``test_recorded_cuda`` for real ones.
"""

import gc
import random
import weakref
from functools import partial
from pathlib import Path
from types import CellType, FunctionType

import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import CacheMemory, KVCache, SamplerConfig, generate
from nemo_dllm.collections.diffusion.sampling.joining import Picked

pytestmark = pytest.mark.nemo

MODELS = Path(__file__).parents[1] / "golden" / "models"
PROMPTS = [[12, 60, 4], [29, 12, 4, 0, 159, 33, 91, 8, 7], [5], [88, 7, 1, 8]]
LONG_PROMPTS = [[29, 12, 4, 0, 159, 33, 91, 8, 7], [3, 88, 1, 16, 33, 70, 25, 188, 118, 2, 67, 100, 40, 87]]


class Rerun:
    """A pass that is run again, as a graph would: into the same output each time."""

    def __init__(self, of, run, inputs):
        self.of, self.run, self.inputs, self.output = of, run, inputs, None

    def replay(self, inputs):
        self.of.replayed += 1
        for kept, given in zip(self.inputs, inputs, strict=True):
            kept.copy_(given)
        output = self.run(*self.inputs)
        if self.output is None:
            self.output = output.clone()
        return self.output.copy_(output).clone()


class Reruns:
    """Takes the place of ``Recorder``."""

    def __init__(self):
        self.works, self.seen = True, {}
        self.recorded = self.replayed = 0

    def record(self, run, inputs):
        self.recorded += 1
        return Rerun(self, over_memory(run), [tensor.clone() for tensor in inputs])


def over_memory(run):
    """The pass over the memory as it is now: a graph keeps addresses, and no cache alive."""
    if isinstance(run, partial):
        return partial(over_memory(run.func), *run.args)

    def kept(value):
        if not isinstance(value, KVCache):
            return value
        cache = KVCache(0, 0)
        cache.memory = CacheMemory(value.held_BS, dict(value.memory.layers))
        return cache

    cells = tuple(CellType(kept(cell.cell_contents)) for cell in run.__closure__)
    return FunctionType(run.__code__, run.__globals__, run.__name__, run.__defaults__, cells)


@pytest.fixture(scope="module")
def loaded(single_process):
    from nemo_dllm.collections.diffusion.inference import load_checkpoint

    return load_checkpoint(MODELS / "sdar")


@pytest.fixture
def both(loaded, monkeypatch):
    """The denoiser that records up to 40 tokens, above 6 of a row over a multiple of 6, and the one that does not."""
    from nemo_dllm.collections.diffusion.inference import cache_pool, cached

    class Recording(cached.MegatronDenoiser):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            self.reruns = Reruns()
            pool = cache_pool.CachePool(self.reruns, torch.device("cpu"), most_bytes=1 << 26)
            self._recorded = cached.Recorded(cached.RecordedPasses(self.reruns), pool)

        def new_cache(self, rows, positions):
            return self._recorded.caches.new_cache(rows, positions)

        def _is_recorded(self, device, tokens):
            return tokens <= cached.RECORDED_AT_ONCE

    monkeypatch.setattr(cache_pool, "RECORDED_LENGTHS", 6)
    monkeypatch.setattr(cached, "RECORDED_AT_ONCE", 40)
    return Recording(loaded.core, 4), cached.MegatronDenoiser(loaded.core, 4, record=False)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"cfg_scale": 1.0, "temperature": 1.0, "seed": 3},
        {"right_shift": True, "steps_per_block": 2},
        {"block_size": 8, "threshold": 0.06},
        {"cache": None},
        {"cache": "approximate_dual"},
        {"cache": "approximate_delayed", "right_shift": True},
    ],
    ids=str,
)
def test_the_sampler_writes_the_same(both, loaded, fields):
    config = SamplerConfig(**{"max_new_tokens": 16, "block_size": 4, "cache": "exact", **fields})
    for model in both:
        model.block_size = config.block_size
    for prompts in (PROMPTS, LONG_PROMPTS, PROMPTS[:1], PROMPTS[:3], PROMPTS):
        recorded, plain = (
            [row.tolist() for row in generate(model, prompts, config, mask_token_id=loaded.mask_token_id).completions]
            for model in both
        )
        assert recorded == plain
    assert both[0].reruns.recorded


def draw_pass(rng, held):
    """Some positions of each row behind those that it holds, as passes get them; in one row at least there are."""
    lengths = [rng.choice((0, 1, 3, 4, 9)) for _ in held]
    lengths[rng.randrange(len(held))] = 4
    real_BL = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    positions_BL = (torch.tensor(held)[:, None] + torch.arange(max(lengths))) * real_BL
    tokens_BL = torch.tensor([[rng.randrange(190) for _ in row] for row in real_BL])
    return {"tokens_BL": tokens_BL, "positions_BL": positions_BL, "key_mask_BL": real_BL}, lengths


def run_pass(model, cache, batch, deed, kept_BL):
    """The logits that are read."""
    real_BL = batch["key_mask_BL"]
    if deed == "look":
        return model.denoise(cache=cache, **batch)[real_BL]
    if deed == "commit":
        return model.commit(cache=cache, blocks_BL=batch["positions_BL"] // 4, **batch)[real_BL.any(dim=1)]
    rows_N, columns_N = real_BL.nonzero().unbind(dim=1)
    return model.score_and_keep(cache=cache, rows_N=rows_N, columns_N=columns_N, kept_BL=kept_BL, **batch)


def join_first_row(rng, ours, theirs):
    """Our rows behind the first of theirs, in caches of any size; both are gone then."""
    positions = rng.choice((120, 200))
    (pair, held), (their_pair, their_held) = ours, theirs
    picked = [[Picked(they, [0]), Picked(we, range(len(held)))] for we, they in zip(pair, their_pair, strict=True)]
    return [type(rows[0].part).join_rows(rows, positions) for rows in picked], [their_held[0], *held]


@pytest.mark.parametrize("seed", range(3))
def test_caches_that_come_and_go_and_join_in_any_order(both, seed):
    """Passes of any shapes over caches side by side, whose memory others have had before."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    caches, memories, made, in_place = [], set(), 0, 0
    for _ in range(200):
        while len(caches) < 3:
            rows, positions = rng.choice((2, 3)), rng.choice((120, 200))
            caches.append(([model.new_cache(rows, positions) for model in both], [0] * rows))
            made += 1
        pair, held = caches.pop(rng.randrange(len(caches)))
        memories.add(pair[0].memory)
        deed = rng.choice(("look", "look", "look", "commit", "keep", "end", "join"))
        if deed == "end" or max(held) > 100 or len(held) > 5:
            continue
        if deed == "join":
            theirs = caches.pop(rng.randrange(len(caches)))
            before = [cache.memory for cache in (pair[0], theirs[0][0])]
            pair, held = join_first_row(rng, (pair, held), theirs)
            made += pair[0].memory not in before
            in_place += pair[0].memory in before
        else:
            batch, lengths = draw_pass(rng, held)
            kept_BL = batch["key_mask_BL"] & (torch.rand(batch["key_mask_BL"].shape, generator=generator) < 0.7)
            logits = [run_pass(model, cache, batch, deed, kept_BL) for model, cache in zip(both, pair, strict=True)]
            torch.testing.assert_close(*logits, atol=2e-5, rtol=0)
            if deed != "look":
                held = [start + length for start, length in zip(held, lengths, strict=True)]
        caches.append((pair, held))
    assert len(memories) <= made - 5 and both[0].reruns.replayed > 20 and in_place


def test_passes_that_come_once_in_a_text_are_not_recorded(both, loaded, monkeypatch):
    """Each pass of a delayed cache is shorter than the one before; only some lengths come more than once."""
    monkeypatch.setattr("nemo_dllm.collections.diffusion.inference.cache_pool.RECORDED_LENGTHS", 64)
    model, config = both[0], SamplerConfig(max_new_tokens=30, block_size=30, cache="approximate_delayed")
    for _ in range(4):
        before = model.reruns.recorded
        generate(model, PROMPTS[:1], config, mask_token_id=loaded.mask_token_id)
    assert model.reruns.recorded == before and len(model.reruns.seen) > 20


def test_shapes_that_came_long_ago_are_not_counted_for_ever(monkeypatch):
    from nemo_dllm.collections.diffusion.inference import recorded

    monkeypatch.setattr(recorded, "COUNTED", 3)
    recorder = Reruns()
    passes = recorded.RecordedPasses(recorder)
    for length in (1, 2, 3, 1, 4):
        passes("double", lambda tensor: 2 * tensor, lambda tensor: 2 * tensor, torch.ones(length))
    assert [(key[1][0], count) for key, count in recorder.seen.items()] == [((3,), 1), ((1,), 2), ((4,), 1)]


def test_a_cache_whose_first_pass_failed(both, loaded):
    """Memory of the layers that it did not get to is made by the next pass, not by one that is replayed."""
    batch, _ = draw_pass(random.Random(0), [0, 0])
    model = both[0]
    whole, cache = model.new_cache(2, 50), model.new_cache(2, 50)
    for _ in range(4):
        logits = run_pass(model, whole, batch, "look", None)
    hook = loaded.core.decoder.layers[-1].self_attention.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_pass(model, cache, batch, "look", None)
    hook.remove()
    before = model.reruns.recorded
    assert before == 1 and 0 < len(cache.memory.layers) < len(loaded.core.decoder.layers)
    torch.testing.assert_close(run_pass(model, cache, batch, "look", None), logits, atol=2e-5, rtol=0)
    assert model.reruns.recorded == before and len(cache.memory.layers) == len(loaded.core.decoder.layers)


def test_what_was_recorded_over_a_cache_does_not_keep_it(both):
    batch, _ = draw_pass(random.Random(0), [0, 0])
    cache = both[0].new_cache(2, 50)
    for _ in range(4):
        run_pass(both[0], cache, batch, "commit", None)
    kept, memory = weakref.ref(cache), cache.memory
    assert cache.passes.names
    del cache
    assert kept() is None and both[0].new_cache(2, 50).memory is memory


@pytest.mark.parametrize("breaks", ["commit", "denoise", "canvas", "joining"])
def test_where_memory_is_short_what_waits_for_a_cache_goes(both, loaded, monkeypatch, breaks):
    """And the pass is done again, from the start; without anything that waits, the error is told."""
    model, plain = both
    config = SamplerConfig(max_new_tokens=16, block_size=4, cache=None if breaks == "canvas" else "exact")
    expected = generate(plain, PROMPTS, config, mask_token_id=loaded.mask_token_id).sequences
    # Of one row, which is not what those below take.
    generate(model, PROMPTS[:1], SamplerConfig(16, block_size=4, cache="exact"), mask_token_id=loaded.mask_token_id)
    assert model._recorded.caches._idle
    left = [1]

    def short(work):
        def run(*arguments, **named):
            result = work(*arguments, **named)
            if left.pop() if left else 0:
                raise torch.OutOfMemoryError("short of memory")
            return result

        return run

    if breaks == "joining":
        cache = model.new_cache(3, 30)
        tokens_BL = torch.tensor([[5, 6, 7, 8]] * 3)
        given = {"positions_BL": torch.arange(4).expand(3, -1), "key_mask_BL": torch.ones(3, 4, dtype=torch.bool)}
        model.commit(tokens_BL, cache=cache, blocks_BL=torch.zeros_like(tokens_BL), **given)
        monkeypatch.setattr(type(cache), "another", short(type(cache).another))
        joined = type(cache).join_rows([Picked(cache, [2, 0])], 40)
        assert joined.held_BS.sum() == 8 and not model._recorded.caches._idle
        return
    target = model.core if breaks == "canvas" else KVCache
    method = {"commit": "hold", "denoise": "window", "canvas": "encode"}[breaks]
    monkeypatch.setattr(target, method, short(getattr(target, method)))
    written = generate(model, PROMPTS, config, mask_token_id=loaded.mask_token_id).sequences
    assert not left and [row.tolist() for row in written] == [row.tolist() for row in expected]
    left.extend([1, 1])
    with pytest.raises(torch.OutOfMemoryError):
        model._recorded.caches._idle = ()
        generate(model, PROMPTS, config, mask_token_id=loaded.mask_token_id)


def test_no_garbage_is_collected_while_a_pass_is_recorded():
    from nemo_dllm.collections.diffusion.inference.recorded import _uncollected

    for collects in (True, False):
        (gc.enable if collects else gc.disable)()
        try:
            with pytest.raises(KeyError), _uncollected():
                assert not gc.isenabled()
                raise KeyError
            assert gc.isenabled() == collects
        finally:
            gc.enable()


def test_lengths_that_passes_are_recorded_over():
    from nemo_dllm.collections.diffusion.inference.cache_pool import recorded_length

    lengths = partial(recorded_length, varies=True)
    # Those of blocks are their own.
    assert [lengths(length) for length in (1, 2, 3, 4, 8, 16, 32)] == [1, 2, 3, 4, 8, 16, 32]
    assert sorted({lengths(length) for length in range(17, 513)}) == [24, 32, 48, *range(64, 513, 64)]
    assert sorted({lengths(length) for length in range(513, 4097)}) == [
        *(640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)
    ]
    assert all(length <= lengths(length) < 1.5 * length for length in range(5, 65))
    as_it_is = partial(recorded_length, varies=False)
    assert [as_it_is(length) for length in (1, 5, 17, 63, 64, 65, 130)] == [1, 5, 17, 63, 64, 128, 192]


class Sum:
    """In the place of a CUDA graph: adds up the memory that it was recorded over."""

    def __init__(self, inputs, output):
        self.inputs, self.output = inputs, output

    def replay(self):
        self.output.copy_(sum(self.inputs))


@pytest.mark.parametrize("inference", [False, True])
def test_a_replay_sees_what_was_written_to_its_inputs_since_the_last_one(inference):
    from nemo_dllm.collections.diffusion.inference.recorded import Graph

    inputs, output = [torch.zeros(3), torch.zeros(3)], torch.zeros(3)
    graph = Graph(Sum(inputs, output), inputs, output)
    with torch.inference_mode(inference):
        one, other = torch.ones(3), torch.full((3,), 10.0)
        assert graph.replay((one, other)).tolist() == graph.replay((one, other)).tolist() == [11.0] * 3
        one[1] = 5
        assert graph.replay((one, other)).tolist() == [11.0, 15.0, 11.0]
        one.view(3)[2:] = 7  # Through a view.
        assert graph.replay((one, other)).tolist() == [11.0, 15.0, 17.0]
        assert graph.replay((one.clone(), one)).tolist() == [2.0, 10.0, 14.0]
        assert graph.replay((one, other)).tolist() == [11.0, 15.0, 17.0]
