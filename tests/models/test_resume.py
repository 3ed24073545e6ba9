"""A run that was killed and goes on is the run that was not: losses, masks, learning rates and weights, bit for bit."""

import signal

import pytest
import torch

pytestmark = pytest.mark.nemo

# Killed during the eighth step; the checkpoint is that of the fifth.
KILLED_AFTER, CHECKPOINT, STEPS = 7, 5, 10
RUNS = {
    "plain optimizer": {},
    "distributed optimizer": {"distributed": True},
    "distributed optimizer on two ranks": {"distributed": True, "ranks": 2},
    "plain optimizer, with validation": {"validation": True},
}


@pytest.fixture(scope="module")
def train(run_job, model_fields):
    def run(run_folder, exit_code=0, **settings):
        return run_job("train", exit_code=exit_code, run_folder=run_folder, config=model_fields["dense"], **settings)

    return run


@pytest.fixture(scope="module")
def straight(train, tmp_path_factory):
    """Folders of the uninterrupted runs, by name."""
    return {name: train(tmp_path_factory.mktemp("run"), **settings) for name, settings in RUNS.items()}


@pytest.fixture(scope="module")
def killed(train, tmp_path_factory):
    """Kills a run and returns its folder, in which it can go on."""

    def run(**settings):
        run_folder = tmp_path_factory.mktemp("run")
        folder = train(run_folder, exit_code=-signal.SIGKILL, killed_after=KILLED_AFTER, **settings)
        assert (folder / f"step{KILLED_AFTER}.0").exists()
        assert not (folder / f"step{KILLED_AFTER + 1}.0").exists()
        return run_folder

    return run


def step_of(folder, step, rank=0):
    return torch.load(folder / f"step{step}.{rank}")


def assert_same(actual, expected):
    assert torch.equal(actual["loss"], expected["loss"])
    assert torch.equal(actual["inputs"], expected["inputs"])
    assert actual["learning_rate"] == expected["learning_rate"]
    for name, weight in expected["weights"].items():
        assert torch.equal(actual["weights"][name], weight), name


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(train, straight, killed, name):
    settings = RUNS[name]
    resumed = train(killed(**settings), **settings)
    assert not (resumed / f"step{CHECKPOINT}.0").exists()
    for rank in range(settings.get("ranks", 1)):
        for step in range(CHECKPOINT + 1, STEPS + 1):
            assert_same(step_of(resumed, step, rank), step_of(straight[name], step, rank))


def test_a_run_that_saves_has_no_process_to_leave_behind(train, tmp_path):
    """Such a process keeps a killed run's output open, and whoever reads it waits."""
    folder = train(tmp_path, exit_code=-signal.SIGKILL, killed_after=KILLED_AFTER)
    assert (folder / "children.0").read_text().split() == []


def test_the_comparison_would_notice_a_fresh_optimizer_or_other_data(straight):
    """The mutated twin: no step of the run is like another, and the rate and the weights move at each."""
    for step in range(1, STEPS):
        a, b = (step_of(straight["plain optimizer"], s) for s in (step, step + 1))
        assert not torch.equal(a["inputs"], b["inputs"])
        assert a["learning_rate"] != b["learning_rate"]
        assert a["loss"] != b["loss"]


def test_validation_leaves_training_alone(straight):
    for step in range(1, STEPS + 1):
        with_it = step_of(straight["plain optimizer, with validation"], step)
        assert_same(with_it, step_of(straight["plain optimizer"], step))


@pytest.mark.parametrize(
    "before, after",
    [
        ({"micro_batch_size": 2}, {"micro_batch_size": 1}),
        ({"distributed": True, "ranks": 2}, {"distributed": True, "ranks": 1}),
        ({"distributed": True, "ranks": 1}, {"distributed": True, "ranks": 2}),
    ],
    ids=["smaller micro-batches", "two ranks, then one", "one rank, then two"],
)
def test_another_layout_goes_on_with_the_same_samples_masks_and_state(train, straight, killed, before, after):
    resumed = train(killed(**before), **after)
    for step in range(CHECKPOINT + 1, STEPS + 1):
        expected = step_of(straight["plain optimizer"], step)
        parts = [step_of(resumed, step, rank) for rank in range(after.get("ranks", 1))]
        assert torch.equal(torch.cat([part["inputs"] for part in parts]), expected["inputs"])
        for part in parts:
            torch.testing.assert_close(part["loss"], expected["loss"], rtol=1e-4, atol=0)


def test_a_resumed_run_keeps_the_noise_it_began_with(train, straight, killed):
    """Whatever seed the recipe names now, and with twice the global batch: samples keep their masks."""
    resumed = train(killed(), seed=7, global_batch_size=8)
    before = [step_of(straight["plain optimizer"], step)["inputs"] for step in range(CHECKPOINT + 1, STEPS + 1)]
    for step in (6, 7):
        twice = torch.cat(before[2 * (step - 6) : 2 * (step - 6) + 2])
        assert torch.equal(step_of(resumed, step)["inputs"], twice)


def test_another_seed_would_be_noticed(train, straight, tmp_path_factory):
    """The mutated twin."""
    other = train(tmp_path_factory.mktemp("run"), seed=7)
    assert not torch.equal(step_of(other, 1)["inputs"], step_of(straight["plain optimizer"], 1)["inputs"])
