"""The engine with models of checkpoints, on the GPU where there is one: their passes are recorded there."""

import threading
from pathlib import Path

import pytest

from nemo_dllm.collections.diffusion.sampling import generate
from nemo_dllm.collections.diffusion.serving.engine import BatchingEngine
from nemo_dllm.collections.diffusion.serving.limits import ServerLimits
from nemo_dllm.collections.diffusion.serving.rows import Row

pytestmark = pytest.mark.nemo

MODELS = Path(__file__).parents[1] / "golden" / "models"
CLIENTS, ROWS = 4, 6


@pytest.fixture(scope="module", params=["sdar", "a2d_llama"])
def model(request, single_process):
    from nemo_dllm.collections.diffusion.inference import load_checkpoint

    return load_checkpoint(MODELS / request.param)


@pytest.fixture
def engine(model):
    engine = BatchingEngine(
        model.denoiser,
        mask_token_id=model.mask_token_id,
        device=model.device,
        decode=model.decode,
        limits=ServerLimits(max_batch_rows=5),
    )
    engine.start()
    yield engine
    engine.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_come_and_go_get_what_they_get_alone(kit, model, engine, temperature):
    from nemo_dllm.collections.diffusion.inference import MegatronDenoiser

    config = model.sampler_config(temperature=temperature, block_size=4, threshold=0.2)
    rows = []

    def ask(client):
        for number in range(ROWS):
            seed = ROWS * client + number
            prompt = [5 + (7 * seed + place) % 90 for place in range(1 + seed % 11)]
            updates = []
            row = Row(prompt, [], 4 + 5 * seed % 17, config, seed, 0, updates.append, streams=True)
            row.updates = updates
            rows.append(row)
            engine.submit([row])
            if number % 2:
                kit.until(lambda row=row: row.done)

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kit.until(lambda: all(row.done for row in rows))
    plain = MegatronDenoiser(model.core, model.block_size, record=False)
    for row in rows:
        alone = generate(
            plain,
            [list(row.prefix)],
            model.sampler_config(temperature=temperature, block_size=4, threshold=0.2, max_new_tokens=row.hole_count),
            mask_token_id=model.mask_token_id,
            seeds=[row.seed],
            device=model.device,
        )
        assert row.updates[-1].error is None
        assert row.updates[-1].tokens == alone.completions[0].tolist(), row.seed
