"""Ten optimizer steps of a public trainer, reproduced from its recorded draws by what recipes train with.

Model, data step, head, loss reduction, gradient scaling and optimizer are the real ones; only times and uniforms are
given. Tolerances are those of the recording, which was checked in float64.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from nemo_dllm.collections.diffusion.objectives import preset

pytestmark = pytest.mark.nemo

GOLDEN = Path(__file__).parents[1] / "golden"
STEPS = 10


class Recording(NamedTuple):
    """What a trainer did, and with which settings."""

    facts: dict
    tensors: dict

    @property
    def checkpoint(self):
        return GOLDEN / "models" / self.facts["model"]


RECORDINGS = {
    facts["file"].removesuffix(".safetensors"): Recording(facts, load_file(GOLDEN / "training" / facts["file"]))
    for facts in json.loads((GOLDEN / "training" / "index.json").read_text())
}
# Two data-parallel ranks share the distributed optimizer's state.
PLAIN = {"ranks": 1, "micro_batch_size": None}
TENSOR_PARALLEL = {"ranks": 2, "micro_batch_size": None, "layout": {"tensor_model_parallel_size": 2}}
RUNS = {
    ("mdlm_a2d_qwen3", "plain optimizer"): PLAIN,
    ("mdlm_a2d_qwen3", "plain optimizer, two micro-batches"): {"ranks": 1, "micro_batch_size": 2},
    ("mdlm_a2d_qwen3", "distributed optimizer"): {**PLAIN, "distributed": True},
    ("mdlm_a2d_qwen3", "distributed optimizer on two ranks"): {"ranks": 2, "micro_batch_size": 2, "distributed": True},
    ("mdlm_a2d_qwen3", "tensor parallel"): TENSOR_PARALLEL,
    ("mdlm_a2d_qwen3", "tensor and sequence parallel"): {
        "ranks": 2,
        "micro_batch_size": 2,
        "layout": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    },
    ("bd3lm_a2d_qwen3", "plain optimizer"): PLAIN,
    ("bd3lm_a2d_qwen3", "plain optimizer, three micro-batches"): {"ranks": 1, "micro_batch_size": 1},
    ("bd3lm_sdar", "distributed optimizer"): {**PLAIN, "distributed": True},
    ("bd3lm_sdar", "tensor and sequence parallel"): {
        "ranks": 2,
        "micro_batch_size": None,
        "layout": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    },
}
TWINS = {
    ("mdlm_a2d_qwen3", "logits of the left neighbour"): {"right_shift": True},
    ("mdlm_a2d_qwen3", "weight 1"): {"loss_weight": "uniform"},
    ("mdlm_a2d_qwen3", "mean over sequences"): {"loss_norm": "sequence"},
    ("mdlm_a2d_qwen3", "pads attended"): {"pads_attended": True},
    ("bd3lm_a2d_qwen3", "other blocks"): {"block_size": 2},
    ("bd3lm_sdar", "logits of the left neighbour"): {"right_shift": True},
}


@pytest.fixture(scope="module")
def train(run_job):
    """Runs the ten steps and returns the folder of results; ``changes`` are fields of the objective."""

    def run(
        name, ranks=1, layout=None, micro_batch_size=None, distributed=False, pads_attended=False, beta1=0.9, **changes
    ):
        facts, tensors = RECORDINGS[name]
        rows = {"tokens": tensors["input_ids"].flatten(0, 1), "loss_mask": tensors["labels"].flatten(0, 1) != -100}
        if facts["objective"] == "mdlm" and not pads_attended:
            rows["key_mask"] = tensors["attention_mask"].flatten(0, 1)
        return run_job(
            "trajectory",
            ranks,
            layout=layout,
            micro_batch_size=micro_batch_size or facts["batch"][0],
            hf_path=RECORDINGS[name].checkpoint,
            rows=rows,
            noise={"time": tensors["t"].flatten(), "uniforms": tensors["u"].flatten(0, 1)},
            kind=facts["objective"],
            objective={
                "mask_token_id": facts["special_ids"]["mask_token_id"],
                **preset(f"dllm_{facts['objective']}"),
                "schedule": facts["schedule"],
                **facts["config"],
                **changes,
            },
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
    return functools.cache(lambda key: train(key[0], **RUNS[key]))


@pytest.fixture(params=RUNS, ids=": ".join)
def run(request, folder_of):
    """The recording and settings of one of ``RUNS``, and its results on the first rank."""
    return RECORDINGS[request.param[0]], RUNS[request.param], results_of(folder_of(request.param))


@pytest.fixture(scope="module")
def twin(train):
    """Results of the twins, by name."""
    return {key: results_of(train(key[0], **changes)) for key, changes in TWINS.items()}


def largest_loss_error(recorded, results, steps=STEPS):
    losses, expected = torch.stack(results["losses"])[:steps], recorded["loss"][:steps]
    return ((losses - expected) / expected).abs().max().item()


def test_the_model_sees_the_recorded_inputs(run):
    recording, settings, results = run
    expected = recording.tensors["model_input_ids"].flatten(0, 1)
    size = settings["micro_batch_size"] or recording.facts["batch"][0]
    data_ranks = 1 if "layout" in settings else settings["ranks"]
    # With several data-parallel ranks, the first one's micro-batches.
    rows = [expected[start : start + size] for start in range(0, len(expected), size * data_ranks)]
    assert torch.equal(torch.cat(results["inputs"]), torch.cat(rows))


def test_losses(run):
    recording, _, results = run
    recorded = recording.tensors
    assert len(results["losses"]) == STEPS
    assert largest_loss_error(recorded, results) < 1e-4
    # These differ from a run whose optimizer does not step.
    assert (recorded["loss"] / recorded["loss_at_initial_weights"] - 1).abs()[1:].min() > 5e-4


def test_gradients(run):
    """Those of step 1, and the norm over all of them at each step."""
    recording, settings, results = run
    recorded = recording.tensors
    if settings.get("distributed") and settings["ranks"] > 1:
        pytest.skip("a rank of the distributed optimizer holds a share of the gradients")
    for name in recording.facts["selected_tensors"]:
        expected = recorded[f"grad_step1.{name}"]
        torch.testing.assert_close(results["gradients"][0][name], expected, rtol=0, atol=1e-5 * expected.abs().max())
    for step, gradients in enumerate(results["gradients"]):
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        torch.testing.assert_close(norm, recorded["grad_norm"][step], rtol=1e-4, atol=0)


@pytest.mark.parametrize("step", [1, STEPS])
def test_weights(run, step):
    recording, _, results = run
    recorded = recording.tensors
    for name in recording.facts["selected_tensors"]:
        difference = (results["weights"][step - 1][name] - recorded[f"after_step{step}.{name}"]).abs()
        # Adam makes a step of lr of a gradient that is nothing but rounding; few are.
        assert difference.max() <= 1e-3, name
        assert (difference > 1e-5).float().mean() < 0.01, name


def test_every_final_weight(run):
    recording, _, results = run
    initial = load_file(recording.checkpoint / "model.safetensors")
    final = results["weights"][-1]
    assert final.keys() == recording.facts["final_checksums"].keys()
    for name, expected in recording.facts["final_checksums"].items():
        assert final[name].norm().item() == pytest.approx(expected["l2"], rel=1e-5), name
        assert (final[name] - initial[name]).norm().item() == pytest.approx(expected["moved_l2"], rel=1e-2), name


@pytest.mark.parametrize("key", TWINS, ids=": ".join)
def test_a_wrong_objective_would_be_noticed(twin, key):
    """The mutated twins miss the loss of the first step already, by many times the tolerance."""
    assert largest_loss_error(RECORDINGS[key[0]].tensors, twin[key], steps=1) > 2e-3


def test_a_wrong_optimizer_would_be_noticed(train):
    results, recorded = results_of(train("mdlm_a2d_qwen3", beta1=0.5)), RECORDINGS["mdlm_a2d_qwen3"].tensors
    assert largest_loss_error(recorded, results, steps=1) < 1e-4
    assert largest_loss_error(recorded, results) > 5e-3


@pytest.mark.parametrize("key", [key for key, settings in RUNS.items() if settings["ranks"] > 1], ids=": ".join)
def test_both_ranks_end_with_the_same_weights(folder_of, key):
    folder = folder_of(key)
    first, second = results_of(folder, 0)["weights"][-1], results_of(folder, 1)["weights"][-1]
    assert all(torch.equal(first[name], second[name]) for name in first)
