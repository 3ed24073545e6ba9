"""Rows that come and go between passes get what they get alone, bit for bit."""

import gc
import random
import weakref

import pytest

from nemo_dllm.collections.diffusion.sampling import KVCache, SamplerConfig, generate
from nemo_dllm.collections.diffusion.sampling.stopping import text_end
from nemo_dllm.collections.diffusion.serving.rolling import Denoising, RollingBatch
from nemo_dllm.collections.diffusion.serving.rows import Row


def decode(ids):
    return "".join(chr(id) for id in ids)


EXACT = {"cache": "exact", "block_size": 4, "block_origin": "sequence"}
SETTINGS = [
    {},
    {"block_size": 4, "threshold": 0.3},
    {"steps": 3, "remasking": "random", "block_size": 5},
    {"cfg_scale": 0.5, "block_size": 4, "right_shift": True, "bos_token_id": 1},
    {"stop_strings": ("A", "ef"), "block_size": 2, "stop_token_ids": (9,)},
    {"editing_threshold": 0.02, "max_post_steps": 3, "block_size": 4},
    EXACT,
    EXACT | {"threshold": 0.1, "stop_token_ids": (9, 30, 40, 50)},
    EXACT | {"right_shift": True, "bos_token_id": 1},
    EXACT | {"cfg_scale": 0.5},
    EXACT | {"editing_threshold": 0.02, "max_post_steps": 3, "steps_per_block": 2},
    {"cache": "approximate_prefix", "block_size": 4},
    {"cache": "approximate_dual", "block_size": 3, "right_shift": True, "bos_token_id": 1},
    {"cache": "approximate_dual", "block_size": 4, "cfg_scale": 1.0},
    {"cache": "approximate_delayed", "refresh_interval": 3, "block_size": 4},
]


class Schedule:
    """Steps a batch, lets rows in when it is open and out when they are finished, and keeps what each has got."""

    def __init__(self, denoising, rng):
        self.denoising, self.rng, self.batch = denoising, rng, None
        self.joined_running = self.left_early = self.in_place = 0
        self.live_alone = []

    def run(self, waiting):
        tokens = {}
        while waiting or self.batch is not None:
            self.let_in(waiting)
            self.live_alone.append(all(row.is_live for row in self.batch.rows))
            step = self.batch.step()
            self.collect(self.batch, step, tokens)
            if self.rng.random() < 0.05:
                self.rng.choice(self.batch.rows).abandoned = True
            if any(not row.is_live for row in self.batch.rows) and self.batch.is_open:
                self.left_early += any(row.is_live for row in self.batch.rows)
                self.batch = self.batch.with_live_rows_of()
        return tokens

    def let_in(self, waiting):
        coming = [waiting.pop() for _ in range(min(len(waiting), self.rng.randint(0, 2)))]
        if self.batch is None:
            self.batch = RollingBatch(self.denoising, coming or [waiting.pop()])
            self.batch.encode_prompts()
        elif coming and self.batch.is_open:
            newcomers = RollingBatch(self.denoising, coming)
            if newcomers.begins_with_all:
                newcomers.step()
            self.joined_running += 1
            places = dict(zip(self.batch.rows, range(len(self.batch.rows)), strict=True))
            self.batch = self.batch.with_live_rows_of(newcomers)
            self.batch.encode_prompts()
            stayed = [places.get(row, place) == place for place, row in enumerate(self.batch.rows)]
            self.in_place += all(stayed) and any(row in coming for row in self.batch.rows[: len(places)])
        else:
            waiting.extend(coming)

    @staticmethod
    def collect(batch, step, tokens):
        for index, row in enumerate(batch.rows):
            if row.is_live and step.settled_BT[index].sum() == row.hole_count:
                found = step.tokens_BT[index, row.holes].tolist()
                tokens[row] = found[: text_end(found, row.config, decode)]
                row.done = True


class RoomyCache(KVCache):
    """Memory for a few rows and slots more, as of a pool."""

    @staticmethod
    def shape(rows, positions):
        return -(-rows // 4) * 4, -(-(positions + 1) // 16) * 16


@pytest.mark.parametrize("roomy", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda fields: "-".join(map(str, fields)) or "default")
def test_rows_that_join_and_leave_get_what_they_get_alone(kit, tiny_attention, settings, roomy):
    block_size = settings["block_size"] if settings.get("cache") == "exact" else None
    model = tiny_attention(kit.VOCABULARY, block_size)
    if roomy:
        model.new_cache, model.full_pass = RoomyCache, 6
    fields = {"temperature": 1.0, "eos_token_id": kit.EOS, "suppress_token_ids": tuple(range(128, kit.MASK))} | settings
    rng = random.Random(5)
    rows = []
    for seed in range(14):
        length = rng.randint(3, 14)
        prompt = [rng.randint(2, 120) for _ in range(rng.choice((1, 2, 5, 9, 17)))]
        rows.append(Row(prompt, [], length, SamplerConfig(**fields, max_new_tokens=length), seed, 0, lambda _: None))
    schedule = Schedule(Denoising(model, kit.MASK, "cpu", decode), rng)
    tokens = schedule.run(rows.copy())
    assert schedule.joined_running >= 2 and schedule.left_early >= 2
    # Without a cache, rows that have ended are never kept along.
    assert schedule.in_place >= 1 if "cache" in settings else all(schedule.live_alone)
    assert len(tokens) + sum(row.abandoned for row in rows) >= len(rows) and len(tokens) >= 8
    for row, found in tokens.items():
        config = SamplerConfig(**fields, max_new_tokens=row.hole_count)
        alone = generate(model, [row.prefix], config, mask_token_id=kit.MASK, seeds=[row.seed], decode=decode)
        assert found == alone.completions[0].tolist()


def test_a_prompt_is_encoded_once_and_without_those_that_run(kit, tiny_attention):
    model = tiny_attention(kit.VOCABULARY, 4)
    config = SamplerConfig(**EXACT)
    denoising = Denoising(model, kit.MASK, "cpu", decode)
    first, second = (Row([65] * 40, [], 8, config, seed, 0, lambda _: None) for seed in (1, 2))
    batch = RollingBatch(denoising, [first])
    batch.step()
    assert not batch.is_open
    for _ in range(3):
        batch.step()
    assert batch.is_open
    batch = batch.with_live_rows_of(RollingBatch(denoising, [second]))
    batch.encode_prompts()
    passes = 0
    while not first.done:
        Schedule.collect(batch, batch.step(), {})
        passes += 1
    # It waits for none of the blocks that the other one has still to find.
    assert passes == 4
    # The prompt and a block at a time; then both blocks side by side, with the finished one of the first row.
    assert model.passes == [(1, 40), *[(1, 4)] * 4, (1, 40), (2, 8), *[(2, 4)] * 3]


@pytest.mark.parametrize("fields", [fields for fields in SETTINGS if "cache" in fields], ids=str)
def test_a_batch_is_gone_with_its_cache_when_another_takes_its_rows(kit, tiny_attention, fields):
    """At once: caches that wait for the collector of garbage are more memory than a GPU has."""
    caches = weakref.WeakSet()

    class Tracked(tiny_attention):
        def new_cache(self, rows, positions):
            cache = super().new_cache(rows, positions)
            caches.add(cache)
            return cache

    denoising = Denoising(Tracked(kit.VOCABULARY, 4), kit.MASK, "cpu", decode)
    rows = [Row([65] * 5, [], 8, SamplerConfig(**fields), seed, 0, lambda _: None) for seed in range(4)]

    def alive():
        # Some objects of NeMo raise where they are asked what they are an instance of.
        return sum(type(kept) is KVCache for kept in gc.get_objects())

    gc.collect()
    gc.disable()
    others = alive()
    try:
        batch = RollingBatch(denoising, rows[:1])
        for row in rows[1:]:
            batch.step()
            while not batch.is_open:
                batch.step()
            batch = batch.with_live_rows_of(RollingBatch(denoising, [row]))
            batch.encode_prompts()
            # With guidance a run has two. Those of joined rows were not made by the model.
            assert len(caches) == 0
        for row in rows:
            row.abandoned = True
        del batch
        assert alive() == others
    finally:
        gc.enable()


def test_rows_in_a_cache_of_another_kind_stay_together(kit, tiny_attention):
    class OwnCache(tiny_attention):
        def new_cache(self, rows, positions):
            cache = super().new_cache(rows, positions)
            return type("Own", (), {name: getattr(cache, name) for name in ("window", "write", "hold")})()

    row = Row([65], [], 4, SamplerConfig(**EXACT), 1, 0, lambda _: None)
    batch = RollingBatch(Denoising(OwnCache(kit.VOCABULARY, 4), kit.MASK, "cpu", decode), [row])
    assert not batch.is_elastic and not batch.is_open
    batch.step()
    row.abandoned = True
    # The pass that has begun meanwhile, and no other.
    assert batch.step().step == 2 and batch.step() is None
