"""Block diffusion over pipeline stages, which exchange more positions and rows than the samples have."""

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.nemo

CHECKPOINT = Path(__file__).parents[1] / "golden" / "models" / "qwen3_tied"
STEPS, SAMPLES, LENGTH = 3, 4, 10
ROWS = {
    "tokens": torch.randint(0, 190, (STEPS * SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0)),
    "loss_mask": (torch.arange(LENGTH) >= 2).expand(STEPS * SAMPLES, -1),
    "document_ids": (torch.arange(LENGTH) >= torch.arange(STEPS * SAMPLES)[:, None]).long(),
}
NOISE = {
    "time": torch.linspace(0.2, 0.8, STEPS * SAMPLES),
    "uniforms": torch.rand(STEPS * SAMPLES, LENGTH, generator=torch.Generator().manual_seed(1)),
}
OBJECTIVES = {
    "block diffusion": ("bd3lm", {"block_size": 4}),
    "with all that reads the clean copy": ("bd3lm", {"block_size": 4, "right_shift": True, "ar_loss_weight": 0.5}),
    "complementary masks": ("mdlm", {"complementary": True}),
}


@pytest.fixture(scope="module")
def losses(run_job):
    """Losses of three optimizer steps, as the last stage knows them."""

    def run(name, ranks=1, layout=None):
        kind, fields = OBJECTIVES[name]
        folder = run_job(
            "trajectory",
            ranks,
            layout=layout,
            micro_batch_size=2,
            hf_path=CHECKPOINT,
            rows=ROWS,
            noise=NOISE,
            kind=kind,
            objective={"mask_token_id": 196, **fields},
            optimizer={"lr": 1e-3, "weight_decay": 0.0},
            steps=STEPS,
        )
        return torch.stack(torch.load(folder / f"trajectory{ranks - 1}")["losses"])

    return run


@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_stages_train_as_one(losses, name):
    straight = losses(name)
    assert straight.unique().numel() == STEPS
    torch.testing.assert_close(losses(name, 2, {"pipeline_model_parallel_size": 2}), straight, rtol=1e-5, atol=0)
