"""When a pass is nearly done. Shape letters: B rows, T canvas positions, L positions of one pass."""

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.nemo
MODELS = Path(__file__).parents[1] / "golden" / "models"


@pytest.fixture(scope="module")
def denoiser(single_process):
    from nemo_dllm.collections.diffusion.inference import MegatronDenoiser, load_checkpoint

    return MegatronDenoiser(load_checkpoint(MODELS / "sdar").core, 4)


def passes(denoiser, device):
    """One of each kind that gives logits, by name."""
    tokens_BT, scored = torch.arange(8, device=device).view(2, 4), torch.tensor([0, 1], device=device)
    positions_BL = torch.arange(4, device=device).expand(2, -1)
    block = {"cache": denoiser.new_cache(2, 8), "key_mask_BL": torch.ones_like(tokens_BT, dtype=torch.bool)}
    entries = {"rows_N": scored, "columns_N": scored, "kept_BL": positions_BL < 2}
    return {
        "canvas": lambda: denoiser(tokens_BT),
        "positions": lambda: denoiser.score_positions(tokens_BT, scored, scored),
        "block": lambda: denoiser.denoise(tokens_BT, positions_BL, **block),
        "kept": lambda: denoiser.score_and_keep(tokens_BT, positions_BL, **block, **entries),
        "joint": lambda: denoiser.commit_and_score(
            tokens_BT, positions_BL, **block, **entries, blocks_BL=positions_BL // 2
        ),
    }


def test_on_a_cpu_a_pass_is_done_when_it_returns(denoiser):
    if torch.cuda.is_available():
        pytest.skip("the model is on a GPU")
    for run in passes(denoiser, "cpu").values():
        run()
        denoiser.nearly_done()
    assert denoiser._encoded is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["canvas", "positions", "block", "kept", "joint"])
def test_on_a_gpu_it_is_when_its_head_is_left(denoiser, monkeypatch, name):
    run, head = passes(denoiser, "cuda")[name], denoiser.core.logits

    def slow_head(*arguments):
        torch.cuda._sleep(1_000_000_000)
        return head(*arguments)

    run()
    torch.cuda.synchronize()
    with monkeypatch.context() as patched:
        patched.setattr(denoiser.core, "logits", slow_head)
        run()
    denoiser.nearly_done()
    assert denoiser._encoded.query() and not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
