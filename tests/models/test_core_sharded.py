"""The core under patterns of attention on two tensor-parallel ranks, with and without sequence parallelism.

Shape letters: B samples, S positions.
"""

import runpy
from pathlib import Path

import pytest
import torch

from nemo_dllm.collections.diffusion.attention.masks import Bidirectional, BlockCausal, NoisyClean

pytestmark = pytest.mark.nemo

SCRIPT = Path(__file__).with_name("sharded_core.py")
KEY_MASK = torch.arange(8) < torch.tensor([[8], [5]])
PATTERNS = [NoisyClean(3, 8), NoisyClean(4, 8, KEY_MASK), BlockCausal(5), Bidirectional()]


def batches():
    """Tokens of two samples and five targets in the first half, for each pattern."""
    from nemo_dllm.collections.diffusion.models.core import Targets

    generator = torch.Generator().manual_seed(0)
    targets = Targets(
        row_N=torch.tensor([0, 3, 15, 8, 4]), token_N=torch.arange(5), loss_weight_N=torch.linspace(0.5, 2, 5)
    )
    return [(torch.randint(0, 190, (2, 16), generator=generator), targets) for _ in PATTERNS]


@pytest.fixture(scope="module")
def run_ranks(forks, tmp_path_factory):
    def run(ranks, config):
        folder = tmp_path_factory.mktemp("sharded_core")
        job = {"folder": folder, "ranks": ranks, "config": config, "batches": batches(), "patterns": PATTERNS}
        processes = [
            forks.Process(target=runpy.run_path, args=(str(SCRIPT), {"job": job | {"rank": rank}}, "__main__"))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=300)
        assert [process.exitcode for process in processes] == [0] * ranks
        return [torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(ranks)]

    return run


@pytest.mark.parametrize(
    "kind, sequence_parallel",
    # Megatron trains experts on tensor-parallel ranks with sequence parallelism only.
    [("dense", False), ("dense", True), ("mixture of experts", True)],
    ids=["dense", "dense, sequence parallel", "mixture of experts, sequence parallel"],
)
def test_two_ranks_are_one(run_ranks, model_fields, kind, sequence_parallel):
    # Megatron slices drawn weights by rows, which would give a rank rows of the gate for its part of the up projection.
    fields = model_fields[kind] | {"gated_linear_unit": False}
    (whole,) = run_ranks(1, fields)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    first, second = run_ranks(2, fields | layout)
    for pattern, one, a, b in zip(PATTERNS, whole, first, second, strict=True):
        for rank in (a, b):
            torch.testing.assert_close(rank["loss"], one["loss"], rtol=1e-6, atol=0)
            torch.testing.assert_close(rank["logits"], one["logits"], rtol=0, atol=1e-6)
            assert rank["logits"].shape[1] == (8 if isinstance(pattern, NoisyClean) else 16)
            # Sequence parallelism gives each rank half of the sequence, and cannot drop the clean half.
            assert rank["positions"] == (8 if sequence_parallel else one["positions"])
        gradient = torch.cat((a["grad"], b["grad"]))
        assert (gradient - one["grad"]).abs().max() <= 1e-6 * one["grad"].abs().max()
    assert [one["positions"] for one in whole] == [8, 8, 16, 16]
