"""Metrics from sums by hand, the logging interval, the clock, and the metrics of real runs."""

import math
from types import SimpleNamespace

import pytest
import torch

from .conftest import BATCH, INTERVAL, SEQ_LENGTH, STEPS

pytestmark = pytest.mark.nemo


def totals(loss_sum=0.0, nll_bound_sum=0.0, count=0, maskable=0, masked=0, buckets=()):
    """Sums of a batch; ``buckets`` are (index, sum, count)."""
    from nemo_dllm.collections.diffusion.models.loss import LossTotals

    sums_2K = torch.zeros(2, 11, dtype=torch.float64)
    for index, total, number in buckets:
        sums_2K[:, index] = torch.tensor([total, number])
    scalars = torch.tensor([loss_sum, nll_bound_sum, count, maskable, masked], dtype=torch.float64)
    return LossTotals(torch.cat([scalars, sums_2K.flatten()]))


FIRST = dict(loss_sum=6.0, nll_bound_sum=8.0, count=4, maskable=10, masked=5, buckets=[(0, 3.0, 2), (9, 4.0, 1)])
SECOND = dict(loss_sum=4.0, nll_bound_sum=40.0, count=2, maskable=6, masked=1, buckets=[(0, 1.0, 2)])


def test_likelihood_metrics_by_hand():
    from nemo_dllm.collections.diffusion.training.metrics import likelihood_metrics

    assert likelihood_metrics(totals(**FIRST), "train") == {
        "train/loss": 1.5,
        "train/nll_bound": 0.8,
        "train/perplexity_bound": pytest.approx(math.exp(0.8)),
        "train/mask_ratio": 0.5,
        "train/nll_at_t0.1": 1.5,
        "train/nll_at_t1.0": 4.0,
    }


def test_uniform_logits_have_the_vocabulary_as_perplexity():
    from nemo_dllm.collections.diffusion.training.metrics import likelihood_metrics

    metrics = likelihood_metrics(totals(nll_bound_sum=12 * math.log(50), maskable=12, count=12), "x")
    assert metrics["x/perplexity_bound"] == pytest.approx(50)


def test_nothing_maskable_and_a_bound_beyond_floats():
    from nemo_dllm.collections.diffusion.training.metrics import likelihood_metrics

    assert likelihood_metrics(totals(), "x") == {
        "x/loss": 0.0,
        "x/nll_bound": 0.0,
        "x/perplexity_bound": 1.0,
        "x/mask_ratio": 0.0,
    }
    assert math.isfinite(likelihood_metrics(totals(nll_bound_sum=1e6, maskable=1), "x")["x/perplexity_bound"])


class Clock:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


class Logger:
    def __init__(self):
        self.lines = []

    def log_metrics(self, metrics, step):
        self.lines.append((step, metrics))


@pytest.fixture
def session(single_process, monkeypatch):
    """The callback below a stand-in trainer: ``session.step(totals, seconds)`` is a training step."""
    from nemo_dllm.collections.diffusion.training import metrics

    clock, logger = Clock(), Logger()
    monkeypatch.setattr(metrics.time, "perf_counter", clock)
    callback = metrics.DiffusionMetrics(peak_flops=1e6)
    trainer = SimpleNamespace(
        global_step=0,
        log_every_n_steps=3,
        training=True,
        world_size=2,
        callback_metrics={"grad_norm": torch.tensor(0.25), "lr": torch.tensor(1e-3), "other": torch.tensor(7.0)},
        loggers=[logger],
        datamodule=SimpleNamespace(global_batch_size=8, seq_length=16),
    )
    logged = {}
    module = SimpleNamespace(log=lambda name, value, **options: logged.update({name: value.item()}))
    reduction = SimpleNamespace(totals=None)

    def reduce(batch):
        reduction.totals = totals(**batch)
        callback.on_megatron_reduce_microbatches_end(SimpleNamespace(trainer=trainer), reduction)

    def step(batch, seconds=1.0):
        callback.on_train_batch_start(trainer, module, None, 0)
        reduce(batch)
        clock.seconds += seconds
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, module, None, None, 0)

    def validate(*batches, seconds=1.0):
        trainer.training = False
        callback.on_validation_epoch_start(trainer, module)
        for batch in batches:
            reduce(batch)
        clock.seconds += seconds
        callback.on_validation_epoch_end(trainer, module)
        trainer.training = True

    callback.on_train_start(trainer, module)
    return SimpleNamespace(
        step=step, validate=validate, callback=callback, trainer=trainer, module=module, clock=clock,
        lines=logger.lines, logged=logged,
    )  # fmt: skip


def test_training_metrics_at_the_logging_interval(session):
    for _ in range(5):
        session.step(SECOND)
    session.step(FIRST)
    assert [step for step, _ in session.lines] == [3, 6]
    metrics = session.lines[1][1]
    # Those of the step itself, not of the interval.
    assert metrics["train/loss"] == 1.5
    assert metrics["train/gradient_norm"] == 0.25
    assert metrics["train/learning_rate"] == pytest.approx(1e-3)
    assert "train/other" not in metrics
    assert session.callback.latest == session.lines[0][1] | metrics


def test_speed_is_that_of_the_interval(session):
    for seconds in (1.0, 2.0, 3.0, 0.5, 0.5, 0.5):
        session.step(FIRST, seconds)
    (_, first), (_, second) = session.lines
    assert first["train/step_seconds"] == pytest.approx(2.0)
    assert first["train/tokens_per_second"] == pytest.approx(8 * 16 / 2.0)
    assert second["train/step_seconds"] == pytest.approx(0.5)


def test_the_clock_stands_still_for_validations_and_checkpoints(session):
    session.step(FIRST)
    session.validate(FIRST, seconds=50.0)
    session.callback.on_save_checkpoint(session.trainer, session.module, {})
    session.clock.seconds += 30.0
    session.step(FIRST)
    session.callback.on_save_checkpoint(session.trainer, session.module, {})
    session.clock.seconds += 20.0
    session.step(FIRST)
    assert session.lines[-1][1]["train/step_seconds"] == pytest.approx(1.0)


def test_a_resumed_run_counts_its_own_steps(session):
    session.trainer.global_step = 100
    session.callback.on_train_start(session.trainer, session.module)
    for _ in range(2):
        session.step(FIRST, 4.0)
    assert session.lines[0][0] == 102
    assert session.lines[0][1]["train/step_seconds"] == pytest.approx(4.0)


def test_model_flops_utilisation(session, monkeypatch):
    from nemo_dllm.collections.diffusion.training import metrics

    session.module.config, session.module.logical_vocab_size = "config", 50
    session.module.objective = SimpleNamespace(block_size=4, views=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3_000_000_000)
    flops = {("config", 50, 16, 4, 2): 250.0}
    monkeypatch.setattr(metrics, "train_flops_per_token", lambda *arguments: flops[arguments])
    for _ in range(3):
        session.step(FIRST, 0.5)
    # 256 tokens a second of 250 FLOPs each, of two devices of a million FLOP/s.
    assert session.lines[0][1]["train/mfu"] == pytest.approx(256 * 250 / 2e6)
    assert session.lines[0][1]["train/peak_memory_gb"] == pytest.approx(3.0)


def test_validation_adds_sums_and_starts_anew(session):
    session.validate(FIRST, SECOND)
    session.validate(SECOND)
    session.step(FIRST)
    (_, both), (_, second) = session.lines
    assert both["validation/loss"] == pytest.approx(10 / 6)
    assert both["validation/nll_bound"] == pytest.approx(48 / 16)  # not the mean of 0.8 and 6.67
    assert both["validation/nll_at_t0.1"] == pytest.approx(4 / 4)
    assert both["validation/nll_at_t1.0"] == 4.0
    assert second["validation/nll_bound"] == pytest.approx(40 / 6)
    assert "validation/bits_per_byte" not in both
    assert session.callback.train_totals.loss == 1.5


def test_bits_per_byte(session):
    session.trainer.datamodule.num_validation_bytes = 100
    session.trainer.datamodule.unigram_bits_per_byte = lambda: 4.5
    session.validate(FIRST, SECOND)
    metrics = session.lines[0][1]
    assert metrics["validation/bits_per_byte"] == pytest.approx(48 / math.log(2) / 100)
    assert metrics["validation/unigram_bits_per_byte"] == 4.5


def test_checkpoints_are_ranked_by_the_loss_over_all_rows(session):
    session.validate(FIRST, SECOND, SECOND)
    assert session.logged == {"val_loss": pytest.approx(14 / 8)}


def test_a_run_logs_what_it_trains_on(straight):
    logged = {step: metrics for step, metrics in straight["train"] if step % 2 == 0}
    assert list(logged) == list(range(2, STEPS + 1, 2))
    for step, metrics in logged.items():
        assert metrics["train/loss"] == pytest.approx(straight["losses"][str(step)], rel=1e-5)
        assert metrics["train/learning_rate"] == pytest.approx(straight["rates"][str(step - 1)], rel=1e-5)
        assert metrics["train/gradient_norm"] > 0
        speed = metrics["train/tokens_per_second"]
        assert speed == pytest.approx(BATCH * SEQ_LENGTH / metrics["train/step_seconds"])
        assert "train/mfu" not in metrics


def test_a_run_validates_all_rows_at_its_interval(straight):
    validations = dict(straight["validations"])
    assert list(validations) == list(range(INTERVAL, STEPS + 1, INTERVAL))
    bounds = [metrics["validation/nll_bound"] for metrics in validations.values()]
    assert bounds == sorted(bounds, reverse=True)
    for metrics in validations.values():
        bits = metrics["validation/nll_bound"] * straight["validation_tokens"] / math.log(2)
        assert metrics["validation/bits_per_byte"] == pytest.approx(bits / straight["validation_bytes"])


def test_two_validations_of_one_model_give_one_number(run_recipe, tmp_path):
    record = run_recipe(tmp_path, optim__config__lr=0.0, optim__lr_scheduler__min_lr=0.0, trainer__max_steps=6)
    (_, first), (_, second) = record["validations"]
    assert first == second
    assert len(set(record["losses"].values())) == 6


def steps_and_metrics(record):
    """Steps, and all metrics but those of time, of training and validation."""
    return [
        (step, {name: value for name, value in metrics.items() if "second" not in name})
        for step, metrics in record["train"] + record["validations"]
    ]


def test_every_rank_knows_the_metrics_of_the_whole_batch(run_recipe, straight, tmp_path):
    """Two ranks that read different samples."""
    records = run_recipe(tmp_path, ranks=2, data__micro_batch_size=1)
    for record in records:
        for (step, metrics), (expected_step, expected) in zip(
            steps_and_metrics(record), steps_and_metrics(straight), strict=True
        ):
            assert step == expected_step
            assert metrics == pytest.approx(expected, rel=1e-4)
    first, last = (record["console"] for record in records)
    assert "validation NLL bound" in first
    assert "validation NLL bound" not in last


def test_every_pipeline_stage_knows_the_metrics_of_the_last(run_recipe, straight, tmp_path):
    """The second stage starts from other random weights than in one stage; the masks are the same."""
    first, last = run_recipe(tmp_path, ranks=2, trainer__strategy__pipeline_model_parallel_size=2)
    assert steps_and_metrics(first) == steps_and_metrics(last)
    for (step, metrics), (expected_step, expected) in zip(
        steps_and_metrics(first), steps_and_metrics(straight), strict=True
    ):
        assert step == expected_step
        assert metrics.keys() == expected.keys()
        for name in metrics:
            exact = name.endswith(("mask_ratio", "learning_rate", "unigram_bits_per_byte"))
            if exact or name.endswith("nll_bound"):
                assert metrics[name] == pytest.approx(expected[name], rel=0 if exact else 0.05), name


def test_a_block_diffusion_run(run_recipe, tmp_path):
    """Of all that there is: documents of a row, a next-token loss, pairs. Tokens per second count text."""
    record = run_recipe(
        tmp_path,
        factory="bd3lm_tiny",
        data__document_boundaries=True,
        model__objective__ar_loss_weight=0.5,
        model__objective__complementary=True,
    )
    bounds = [metrics["validation/nll_bound"] for _, metrics in record["validations"]]
    assert bounds == sorted(bounds, reverse=True)
    for metrics in [metrics for step, metrics in record["train"] if step % 2 == 0]:
        assert metrics["train/tokens_per_second"] * metrics["train/step_seconds"] == pytest.approx(BATCH * SEQ_LENGTH)
        assert metrics["train/mask_ratio"] == pytest.approx(0.5)
        assert 0 < metrics["train/next_token_nll"] < 10
        # The diffusion loss and half of the other, of which the first token of each document has none.
        share = (metrics["train/loss"] - metrics["train/nll_bound"]) / (0.5 * metrics["train/next_token_nll"])
        assert 0.8 < share < 1
