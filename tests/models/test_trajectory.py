"""Ten optimizer steps of a public trainer, reproduced from its recorded draws by what recipes train with.

Model, data step, head, loss reduction, gradient scaling and optimizer are the real ones; only times and uniforms are
given. Tolerances are those of the recording, which was checked in float64.
"""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_dllm.collections.diffusion.objectives import preset

pytestmark = pytest.mark.nemo

GOLDEN = Path(__file__).parents[1] / "golden"
CHECKPOINT = GOLDEN / "models" / "a2d_qwen3"
(FACTS,) = json.loads((GOLDEN / "training" / "index.json").read_text())
RECORDED = load_file(GOLDEN / "training" / FACTS["file"])
STEPS, ROWS = RECORDED["t"].shape
# Two data-parallel ranks share the distributed optimizer's state.
RUNS = {
    "plain optimizer": {"ranks": 1, "micro_batch_size": 4},
    "plain optimizer, two micro-batches": {"ranks": 1, "micro_batch_size": 2},
    "distributed optimizer": {"ranks": 1, "micro_batch_size": 4, "distributed": True},
    "distributed optimizer on two ranks": {"ranks": 2, "micro_batch_size": 2, "distributed": True},
    "tensor parallel": {"ranks": 2, "micro_batch_size": 4, "layout": {"tensor_model_parallel_size": 2}},
    "tensor and sequence parallel": {
        "ranks": 2,
        "micro_batch_size": 2,
        "layout": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    },
}
TWINS = {
    "logits of the left neighbour": {"right_shift": True},
    "weight 1": {"loss_weight": "uniform"},
    "mean over sequences": {"loss_norm": "sequence"},
    "pads attended": {"pads_attended": True},
}


@pytest.fixture(scope="module")
def train(run_job):
    """Runs the ten steps and returns the folder of results; ``changes`` are fields of the objective."""

    def run(ranks=1, layout=None, micro_batch_size=4, distributed=False, pads_attended=False, beta1=0.9, **changes):
        rows = {
            "tokens": RECORDED["input_ids"].flatten(0, 1),
            "loss_mask": RECORDED["labels"].flatten(0, 1) != -100,
            "key_mask": RECORDED["attention_mask"].flatten(0, 1),
        }
        if pads_attended:
            del rows["key_mask"]
        return run_job(
            "trajectory",
            ranks,
            layout=layout,
            micro_batch_size=micro_batch_size,
            hf_path=CHECKPOINT,
            rows=rows,
            noise={"time": RECORDED["t"].flatten(), "uniforms": RECORDED["u"].flatten(0, 1)},
            objective={"mask_token_id": FACTS["special_ids"]["mask_token_id"], **preset("dllm_mdlm"), **changes},
            optimizer={
                "lr": 1e-3,
                "adam_beta1": beta1,
                "adam_beta2": 0.999,
                "adam_eps": 1e-8,
                "weight_decay": 0.0,
                "distributed": distributed,
            },
            steps=STEPS,
        )

    return run


def results_of(folder, rank=0):
    return torch.load(folder / f"trajectory{rank}")


@pytest.fixture(scope="module")
def folder_of(train):
    """The folder of one of ``RUNS``, which runs at the first call."""
    return functools.cache(lambda name: train(**RUNS[name]))


@pytest.fixture(params=RUNS)
def run(request, folder_of):
    """One of ``RUNS`` and its results on the first rank."""
    return RUNS[request.param], results_of(folder_of(request.param))


@pytest.fixture(scope="module")
def twin(train):
    """Results of the twins, by name."""
    return {name: results_of(train(**changes)) for name, changes in TWINS.items()}


def largest_loss_error(results, steps=STEPS):
    losses = torch.stack(results["losses"])[:steps]
    return ((losses - RECORDED["loss"][:steps]) / RECORDED["loss"][:steps]).abs().max().item()


def test_the_model_sees_the_recorded_inputs(run):
    (settings, results), expected = run, RECORDED["model_input_ids"].flatten(0, 1)
    size = settings["micro_batch_size"]
    data_ranks = 1 if "layout" in settings else settings["ranks"]
    # With several data-parallel ranks, the first one's micro-batches.
    rows = [expected[start : start + size] for start in range(0, len(expected), size * data_ranks)]
    assert torch.equal(torch.cat(results["inputs"]), torch.cat(rows))


def test_losses(run):
    _, results = run
    assert len(results["losses"]) == STEPS
    assert largest_loss_error(results) < 1e-4
    # These differ from a run whose optimizer does not step.
    assert (RECORDED["loss"] / RECORDED["loss_at_initial_weights"] - 1).abs()[1:].min() > 1e-3


def test_gradients(run):
    """Those of step 1, and the norm over all of them at each step."""
    settings, results = run
    if settings.get("distributed") and settings["ranks"] > 1:
        pytest.skip("a rank of the distributed optimizer holds a share of the gradients")
    for name in FACTS["selected_tensors"]:
        expected = RECORDED[f"grad_step1.{name}"]
        torch.testing.assert_close(results["gradients"][0][name], expected, rtol=0, atol=1e-5 * expected.abs().max())
    for step, gradients in enumerate(results["gradients"]):
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        torch.testing.assert_close(norm, RECORDED["grad_norm"][step], rtol=1e-4, atol=0)


@pytest.mark.parametrize("step", [1, STEPS])
def test_weights(run, step):
    _, results = run
    for name in FACTS["selected_tensors"]:
        difference = (results["weights"][step - 1][name] - RECORDED[f"after_step{step}.{name}"]).abs()
        # Adam makes a step of lr of a gradient that is nothing but rounding; few are.
        assert difference.max() <= 1e-3, name
        assert (difference > 1e-5).float().mean() < 0.01, name


def test_every_final_weight(run):
    _, results = run
    initial = load_file(CHECKPOINT / "model.safetensors")
    final = results["weights"][-1]
    assert final.keys() == FACTS["final_checksums"].keys()
    for name, expected in FACTS["final_checksums"].items():
        assert final[name].norm().item() == pytest.approx(expected["l2"], rel=1e-5), name
        assert (final[name] - initial[name]).norm().item() == pytest.approx(expected["moved_l2"], rel=1e-2), name


@pytest.mark.parametrize("name", TWINS)
def test_a_wrong_objective_would_be_noticed(twin, name):
    """The mutated twins miss the loss of the first step already, by 50 times the tolerance."""
    assert largest_loss_error(twin[name], steps=1) > 5e-3


def test_a_wrong_optimizer_would_be_noticed(train):
    results = results_of(train(beta1=0.5))
    assert largest_loss_error(results, steps=1) < 1e-4
    assert largest_loss_error(results) > 5e-3


@pytest.mark.parametrize("name", [name for name, settings in RUNS.items() if settings["ranks"] > 1])
def test_both_ranks_end_with_the_same_weights(folder_of, name):
    folder = folder_of(name)
    first, second = results_of(folder, 0)["weights"][-1], results_of(folder, 1)["weights"][-1]
    assert all(torch.equal(first[name], second[name]) for name in first)
