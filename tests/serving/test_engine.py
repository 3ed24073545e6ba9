"""The queue, and the batches that the engine makes of it."""

import time

import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import SamplerConfig, generate, infill, span_between
from nemo_dllm.collections.diffusion.serving.engine import BatchingEngine, EngineClosedError, QueueFullError
from nemo_dllm.collections.diffusion.serving.limits import ServerLimits
from nemo_dllm.collections.diffusion.serving.metrics import ServerMetrics
from nemo_dllm.collections.diffusion.serving.rows import Row


@pytest.fixture
def engine_of(kit):
    """Starts engines, and closes them."""
    started = []

    def make(model, **limits):
        engine = BatchingEngine(
            model.denoiser,
            mask_token_id=kit.MASK,
            device="cpu",
            decode=model.decode,
            limits=ServerLimits(**limits),
            metrics=ServerMetrics(),
        )
        engine.start()
        started.append((engine, model))
        return engine

    yield make
    for engine, model in started:
        model.open.set()
        engine.close()


@pytest.fixture
def row_of(kit):
    """Rows that keep their updates in ``row.updates``."""

    def make(prompt=(65, 66), length=6, seed=1, row_id=0, suffix=(), streams=False, canvas=False, **settings):
        settings = {"temperature": 1.0, "eos_token_id": kit.EOS, "max_new_tokens": length} | settings
        updates = []
        fixed = (seed, row_id, updates.append, streams, canvas)
        row = Row(list(prompt), list(suffix), length, SamplerConfig(**settings), *fixed)
        row.updates = updates
        return row

    return make


OTHER = {"remasking": "margin"}


def hold(kit, model, engine, row):
    """Start a row and keep the model in its first pass, so that what is submitted next has to wait.

    Rows of other settings wait until it is finished, such as those of ``OTHER``.
    """
    model.open.clear()
    engine.submit([row])
    kit.until(lambda: model.batches)


def test_a_batch_gives_what_its_rows_give_alone(kit, engine_of, row_of):
    prompts = [[65], [66, 67, 68], [69] * 9, []]
    lengths, seeds = [3, 8, 5, 6], [1, 2, 3, 2]
    model = kit.ToyModel()
    engine = engine_of(model)
    hold(kit, model, engine, row_of(**OTHER))
    rows = [row_of(p, n, s, streams=True) for p, n, s in zip(prompts, lengths, seeds, strict=True)]
    engine.submit(rows)
    model.open.set()
    kit.until(lambda: all(row.done for row in rows))
    assert (4, 14) in model.batches
    for row, prompt, length, seed in zip(rows, prompts, lengths, seeds, strict=True):
        config = SamplerConfig(max_new_tokens=length, temperature=1.0, eos_token_id=kit.EOS)
        alone = generate(model.denoiser, [prompt], config, mask_token_id=kit.MASK, seeds=[seed])
        assert row.updates[-1].tokens == alone.completions[0].tolist()
        assert row.updates[-1].finish_reason == alone.finish_reasons[0]


def test_samples_differ_and_a_seed_repeats(kit, engine_of, row_of):
    engine = engine_of(kit.ToyModel())
    rows = [row_of(seed=5, row_id=0), row_of(seed=5, row_id=1), row_of(seed=6), row_of(seed=5)]
    engine.submit(rows)
    kit.until(lambda: all(row.done for row in rows))
    texts = [tuple(row.updates[-1].tokens) for row in rows]
    assert texts[0] == texts[3] and len(set(texts)) == 3


def test_holes_before_a_suffix_are_filled_as_infill_does(kit, engine_of, row_of):
    model = kit.ToyModel()
    engine = engine_of(model)
    row = row_of([65, 66], 4, seed=2, suffix=[70, 71], eos_token_id=None)
    engine.submit([row])
    kit.until(lambda: row.done)
    tokens, holes = span_between([65, 66], [70, 71], 4)
    config = SamplerConfig(temperature=1.0)
    alone = infill(model.denoiser, [tokens], [holes], config, mask_token_id=kit.MASK, seeds=[2])
    assert row.updates[-1].tokens == alone.completions[0].tolist()


def test_rows_are_batched_with_those_of_equal_settings(kit, engine_of, row_of):
    model = kit.ToyModel()
    engine = engine_of(model)
    hold(kit, model, engine, row_of(**OTHER))
    cold = [row_of(temperature=0.0, seed=seed) for seed in (1, 2)]
    warm = [row_of(length=length, seed=9) for length in (2, 4)]
    engine.submit([cold[0], warm[0], cold[1], warm[1]])
    model.open.set()
    kit.until(lambda: all(row.done for row in cold + warm))
    shapes = list(dict.fromkeys(model.batches))
    assert shapes == [(1, 8), (2, 8), (2, 6), (1, 6)]


def test_batches_have_a_size(kit, engine_of, row_of):
    model = kit.ToyModel()
    engine = engine_of(model, max_batch_rows=3, max_batch_tokens=40)
    hold(kit, model, engine, row_of(**OTHER))
    small, large = [row_of() for _ in range(5)], [row_of([65] * 30, 20), row_of([65] * 30, 20)]
    engine.submit([*large, *small])
    model.open.set()
    kit.until(lambda: all(row.done for row in small + large))
    shapes = list(dict.fromkeys(model.batches))
    # A row that is larger than the limit runs alone; the others are three at most.
    assert shapes == [(1, 8), (1, 50), (3, 8), (2, 8)]


def test_updates_only_ever_add(kit, engine_of, row_of):
    engine = engine_of(kit.ToyModel())
    row = row_of(length=24, streams=True, block_size=4)
    engine.submit([row])
    kit.until(lambda: row.done)
    tokens = [update.tokens for update in row.updates]
    assert len(tokens) > 4 and all(
        later[: len(first)] == first for first, later in zip(tokens, tokens[1:], strict=False)
    )
    assert [update.finish_reason for update in row.updates[:-1]] == [None] * (len(tokens) - 1)


def test_a_canvas_per_pass(kit, engine_of, row_of):
    engine = engine_of(kit.ToyModel())
    row = row_of(length=5, canvas=True)
    engine.submit([row])
    kit.until(lambda: row.done)
    views = [update.canvas for update in row.updates]
    assert [sum(view.holes) for view in views] == [4, 3, 2, 1, 0]
    assert all(sum(view.new) == 1 for view in views)
    assert views[-1].tokens == row.updates[-1].tokens


def test_finished_rows_do_not_wait_for_longer_ones(kit, engine_of, row_of):
    model = kit.ToyModel()
    engine = engine_of(model)
    short, long = row_of(length=1), row_of(length=40)
    passes = []
    short.deliver = long.deliver = lambda update: passes.append(len(model.batches))
    engine.submit([short, long])
    kit.until(lambda: long.done)
    assert passes == [1, 40] and model.batches == [(2, 42)] + [(1, 42)] * 39


def test_rows_join_those_that_run(kit, engine_of, row_of):
    model = kit.ToyModel()
    engine = engine_of(model)
    first, second = row_of(length=30, seed=1), row_of([65] * 3, length=3, seed=2, streams=True)
    hold(kit, model, engine, first)
    engine.submit([second])
    model.open.set()
    kit.until(lambda: second.done)
    kit.until(lambda: first.done)
    assert len(model.batches) == 30 and (2, 32) in model.batches
    for row, length in ((first, 30), (second, 3)):
        config = SamplerConfig(max_new_tokens=length, temperature=1.0, eos_token_id=kit.EOS)
        alone = generate(model.denoiser, [row.prefix], config, mask_token_id=kit.MASK, seeds=[row.seed])
        assert row.updates[-1].tokens == alone.completions[0].tolist()


def test_a_row_of_other_settings_is_overtaken_by_one_batch_at_most(kit, engine_of, row_of):
    model = kit.ToyModel()
    engine = engine_of(model, max_batch_rows=2)
    order = []

    def noting(name, **fields):
        row = row_of(**fields)
        row.deliver = lambda update: order.append(name)
        return row

    hold(kit, model, engine, noting("a", length=2))
    engine.submit([noting("other", length=2, **OTHER), *(noting(name, length=2) for name in "bcdef")])
    model.open.set()
    kit.until(lambda: len(order) == 7)
    assert order[:3] == list("abc") and order[3] == "other"


def test_the_place_of_a_cancelled_row_is_taken_at_once(kit, engine_of, row_of):
    model = kit.ToyModel()
    engine = engine_of(model, max_batch_rows=2)
    rows = [row_of(length=200, seed=1), row_of(length=200, seed=2)]
    waiting = row_of(length=2, seed=3)
    model.open.clear()
    engine.submit(rows)
    kit.until(lambda: model.batches)
    engine.submit([waiting])
    engine.cancel(rows[:1])
    model.open.set()
    kit.until(lambda: waiting.done)
    assert model.batches[:3] == [(2, 202)] * 3 and not rows[1].done
    engine.cancel(rows)


def test_the_queue_has_an_end(kit, engine_of, row_of):
    model = kit.ToyModel()
    engine = engine_of(model, max_waiting_rows=3)
    hold(kit, model, engine, row_of(**OTHER))
    waiting = [row_of(), row_of()]
    engine.submit(waiting)
    with pytest.raises(QueueFullError, match="2 of 3 places in the queue are taken, and the request needs 2"):
        engine.submit([row_of(), row_of()])
    assert engine.waiting == 2
    engine.cancel(waiting[:1])
    engine.submit([row_of(), row_of()])
    assert engine.waiting == 3


def test_cancelled_rows_are_not_run(kit, engine_of, row_of):
    model = kit.ToyModel()
    engine = engine_of(model)
    running, waiting, kept = row_of(length=200), row_of(length=50), row_of(length=3)
    hold(kit, model, engine, running)
    engine.submit([waiting])
    engine.cancel([running, waiting])
    assert (engine.waiting, engine.running) == (0, 0)
    model.open.set()
    engine.submit([kept])
    kit.until(lambda: kept.done)
    assert not running.updates and not waiting.updates
    assert model.batches == [(1, 202)] + [(1, 5)] * 3


def test_a_row_that_fails_does_not_take_others_along(kit, engine_of, row_of, caplog):
    model = kit.ToyModel()
    model.fail_on = 90
    engine = engine_of(model)
    rows = [row_of([65], seed=1), row_of([90], seed=2), row_of([66], seed=3)]
    engine.submit(rows)
    kit.until(lambda: all(row.done for row in rows))
    assert [row.updates[-1].finish_reason for row in rows] == ["length", None, "length"]
    assert str(rows[1].updates[-1].error) == "the model broke" and "a row failed" in caplog.text
    model.fail_on = None
    again = row_of([90], seed=2)
    engine.submit([again])
    kit.until(lambda: again.done)
    assert again.updates[-1].finish_reason


def test_who_cannot_be_told_does_not_stop_the_engine(kit, engine_of, row_of, caplog):
    def hangs_up(update):
        raise RuntimeError("nobody there")

    engine = engine_of(kit.ToyModel())
    gone, stays = row_of(seed=1), row_of(seed=2)
    gone.deliver = hangs_up
    engine.submit([gone, stays])
    kit.until(lambda: gone.done and stays.done)
    assert stays.updates[-1].finish_reason == "length" and "cannot be told so" in caplog.text
    again = row_of(seed=2)
    engine.submit([again])
    kit.until(lambda: again.done)
    assert again.updates[-1].tokens == stays.updates[-1].tokens and engine.is_alive


def test_a_kernel_that_a_device_refuses_is_the_fault_of_a_row(kit, engine_of, row_of):
    model = kit.ToyModel()
    model.fail_on, model.error = 90, torch.AcceleratorError("CUDA error: invalid configuration argument")
    engine = engine_of(model)
    rows = [row_of([65], seed=1), row_of([90], seed=2)]
    engine.submit(rows)
    kit.until(lambda: all(row.done for row in rows))
    assert rows[0].updates[-1].finish_reason == "length" and rows[1].updates[-1].error is model.error
    assert engine.is_alive


def test_a_device_that_fails_ends_the_engine(kit, engine_of, row_of, caplog, monkeypatch):
    model = kit.ToyModel()
    engine = engine_of(model)
    running, waiting = row_of(length=400), row_of()
    hold(kit, model, engine, running)
    engine.submit([waiting])
    model.fail_on = kit.MASK
    model.error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    # Only a process whose device has failed can tell.
    monkeypatch.setattr(engine, "_device_works", lambda: False)
    model.open.set()
    kit.until(lambda: running.done and waiting.done and not engine.is_alive)
    for row in (running, waiting):
        assert row.updates[-1].error.code == "device_failed"
    assert "illegal memory access" in caplog.text
    refused = []
    for _ in range(3):
        with pytest.raises(EngineClosedError, match="restart the server") as refusal:
            engine.submit([row_of()])
        refused.append(len(refusal.traceback))
    assert len(set(refused)) == 1


def test_closing_ends_what_is_left(kit, engine_of, row_of):
    model = kit.ToyModel()
    engine = engine_of(model)
    running, waiting = row_of(length=400), row_of()
    hold(kit, model, engine, running)
    engine.submit([waiting])
    model.open.set()
    start = time.monotonic()
    engine.close()
    assert time.monotonic() - start < 200 and not engine.is_alive
    for row in (running, waiting):
        assert isinstance(row.updates[-1].error, EngineClosedError)
    with pytest.raises(EngineClosedError):
        engine.submit([row_of()])


def test_limits_are_at_least_1():
    with pytest.raises(ValueError, match="max_batch_rows=0 must be at least 1"):
        ServerLimits(max_batch_rows=0)
    with pytest.raises(ValueError, match="timeout_seconds=nan must be at least 1"):
        ServerLimits(timeout_seconds=float("nan"))
