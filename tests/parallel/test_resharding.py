"""A checkpoint belongs to no layout: a run goes on in another as if nothing had happened."""

import pytest
import torch

from .test_layouts import CONTEXT, DENSE, EXPERT, EXPERTS, FULLY_SHARDED, INTERLEAVED, PIPELINE, SEQUENCE

pytestmark = pytest.mark.nemo

SMALL = {"init_method_std": 0.2, "vocab_size": None}
# Two steps in each; then the run is stopped, and goes on in the next.
JOURNEYS = {
    "dense": [
        (DENSE, ("mdlm", {})),
        [(2, SEQUENCE), (2, PIPELINE), (2, CONTEXT), (1, {})],
    ],
    "blocks": [
        (DENSE, ("bd3lm", {"block_size": 4})),
        [(1, {}), (2, INTERLEAVED), (2, SEQUENCE), (2, {})],
    ],
    "experts": [
        (EXPERTS, ("mdlm", {})),
        [(2, SEQUENCE), (2, EXPERT), (2, PIPELINE), (1, {})],
    ],
}
SHARDED_JOURNEYS = {
    "dense": [(DENSE, ("bd3lm", {"block_size": 4})), [(2, FULLY_SHARDED), (1, {}), (2, FULLY_SHARDED), (2, PIPELINE)]],
    "experts": [(EXPERTS, ("mdlm", {})), [(2, FULLY_SHARDED), (2, EXPERT), (2, FULLY_SHARDED)]],
}


@pytest.fixture(scope="module")
def train(pools):
    def run(folder, model, ranks, layout, last_step, distributed):
        config, objective = model
        return pools(ranks).run(
            "train",
            folder=str(folder),
            config=config | SMALL,
            objective=objective,
            layout=layout,
            last_step=last_step,
            distributed=distributed,
        )

    return run


def inputs_of(results, step, layout):
    """The rows that all ranks together saw in a step; a virtual stage sees them again."""
    inputs = [rank[step][1] for rank in results]
    if layout == CONTEXT:
        return torch.cat(inputs, dim=1)
    return torch.cat(inputs) if layout in ({}, EXPERT, FULLY_SHARDED) else inputs[-1]


@pytest.mark.parametrize("distributed", [False, True], ids=["plain optimizer", "distributed optimizer"])
@pytest.mark.parametrize("journey", JOURNEYS)
def test_a_run_goes_on_in_another_layout(train, tmp_path, journey, distributed):
    travel(train, tmp_path, *JOURNEYS[journey], distributed)


@pytest.mark.parametrize("journey", SHARDED_JOURNEYS)
def test_a_fully_sharded_run_goes_on_in_another_layout_and_back(train, tmp_path, journey):
    travel(train, tmp_path, *SHARDED_JOURNEYS[journey], distributed=True)


def travel(train, folder, model, layouts, distributed):
    steps = 2 * len(layouts)
    (straight,) = train(folder / "straight", model, 1, {}, steps, distributed)
    assert len({loss for loss, _ in straight.values()}) == steps
    for stop, (ranks, layout) in enumerate(layouts, start=1):
        results = train(folder / "journey", model, ranks, layout, 2 * stop, distributed)
        assert list(results[-1]) == [2 * stop - 1, 2 * stop]
        for step, (loss, _) in results[-1].items():
            assert loss == pytest.approx(straight[step][0], rel=1e-4)
            assert torch.equal(inputs_of(results, step, layout).unique(dim=0), straight[step][1].unique(dim=0))
