"""One global batch has one gradient, however it is split into micro-batches and data-parallel ranks."""

import pytest
import torch

pytestmark = pytest.mark.nemo

# Rows with 24, 6, 13 and 1 maskable tokens, of 24, 10, 18 and 4 real ones.
ROWS = {
    "tokens": torch.randint(0, 199, (4, 24), generator=torch.Generator().manual_seed(0)),
    "loss_mask": torch.arange(24) < torch.tensor([[24], [6], [13], [1]]),
    "key_mask": torch.arange(24) < torch.tensor([[24], [10], [18], [4]]),
}
STEPS = [(norm, "DiffusionLossReduction") for norm in ("token", "sequence", "batch")]
TWINS = [("token", "DividedPerMicroBatch"), ("sequence", "DividedPerMicroBatch")]
# Ranks and rows per micro-batch.
LAYOUTS = {
    "one micro-batch": (1, 4),
    "two micro-batches of two": (1, 2),
    "four micro-batches of one": (1, 1),
    "two ranks, two micro-batches of one": (2, 1),
    "two ranks, one micro-batch of two": (2, 2),
}


@pytest.fixture(scope="module", params=["dense", "mixture of experts"])
def gradients(request, run_job, model_fields):
    """For each layout the gradients and the loss of each step, as the optimizer gets them; equal on all ranks."""

    def run(ranks, micro_batch_size):
        folder = run_job(
            "gradients",
            ranks,
            micro_batch_size=micro_batch_size,
            rows=ROWS,
            config=model_fields[request.param],
            steps=STEPS + TWINS,
        )
        first, *others = [torch.load(folder / f"gradients{rank}") for rank in range(ranks)]
        for other in others:
            for a, b in zip(first, other, strict=True):
                assert all(torch.equal(a[name], b[name]) for name in a)
        return first

    return {layout: run(*sizes) for layout, sizes in LAYOUTS.items()}


def largest_difference(expected, actual):
    """The largest of max|difference| / max|gradient| over all tensors; where the gradient is 0, so is the other."""
    assert expected.keys() == actual.keys()
    ratios = []
    for name in expected:
        difference, scale = (actual[name] - expected[name]).abs().max(), expected[name].abs().max()
        assert scale > 0 or difference == 0, name
        ratios.append((difference / scale).item() if scale else 0.0)
    return max(ratios)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one micro-batch"])
@pytest.mark.parametrize("step", range(len(STEPS)), ids=[norm for norm, _ in STEPS])
def test_every_split_has_the_same_gradient(gradients, layout, step):
    expected = gradients["one micro-batch"][step]
    assert largest_difference(expected, gradients[layout][step]) <= 1e-6


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one micro-batch"])
def test_dividing_each_micro_batch_by_its_own_count_would_be_noticed(gradients, layout):
    """The mutated twin; per sequence, equal micro-batches have equal counts, and a mean of means is right."""
    token, sequence = len(STEPS), len(STEPS) + 1
    assert largest_difference(gradients["one micro-batch"][token], gradients[layout][token]) > 0.1
    assert largest_difference(gradients["one micro-batch"][sequence], gradients[layout][sequence]) < 1e-5


def test_the_norms_have_different_gradients(gradients):
    token, sequence, batch = gradients["one micro-batch"][: len(STEPS)]
    assert largest_difference(token, sequence) > 0.1
    assert largest_difference(sequence, batch) > 0.1
