"""Training steps through the trainer: it learns, and a batch with nothing to learn is no harm."""

import pytest
import torch

pytestmark = pytest.mark.nemo


def rows_of(maskable):
    """One row of 24 equal tokens for each number of maskable ones, the last."""
    tokens_BL = (torch.arange(len(maskable)) % 8)[:, None].expand(-1, 24).clone()
    return {"tokens": tokens_BL, "loss_mask": torch.arange(24) >= 24 - torch.tensor(maskable)[:, None]}


@pytest.fixture(scope="module")
def train(run_job, model_fields):
    """Trains on rows of the given maskable counts; the losses and, with those before the first step, the weights."""

    def run(maskable, steps, ranks=1, micro_batch_size=2, distributed=False):
        folder = run_job(
            "train_rows",
            ranks,
            micro_batch_size=micro_batch_size,
            rows=rows_of(maskable),
            config=model_fields["dense"],
            steps=steps,
            distributed=distributed,
        )
        kept = [torch.load(folder / f"step{step}.0") for step in range(1, steps + 1)]
        weights = [torch.load(folder / "start.0"), *(step["weights"] for step in kept)]
        return [step["loss"].item() for step in kept], weights

    return run


@pytest.mark.parametrize(
    "layout",
    [{}, {"distributed": True}, {"ranks": 2, "distributed": True}],
    ids=["plain optimizer", "distributed optimizer", "two ranks"],
)
def test_a_batch_with_nothing_maskable_leaves_the_weights_alone(train, layout):
    """The first global batch has nothing maskable, the second has, but not in every micro-batch."""
    losses, (start, first, second) = train([0, 0, 0, 0, 0, 0, 24, 24], steps=2, **layout)
    assert losses[0] == 0.0
    assert all(torch.equal(start[name], first[name]) for name in start)
    assert 0 < losses[1] < 100
    assert all(weight.isfinite().all() for weight in second.values())
    assert any((first[name] != second[name]).any() for name in first)


def test_the_loss_falls(train):
    """Rows of one token each: what is masked follows from what is not."""
    losses, _ = train([24] * 8 * 40, steps=40)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
