"""Passes that are recorded on a GPU give what they give when they run as they are.

Shape letters: B rows, T canvas positions, L positions of one pass.
"""

import gc
from pathlib import Path

import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import SamplerConfig, generate

pytestmark = [pytest.mark.gpu, pytest.mark.nemo]


MODELS = Path(__file__).parents[1] / "golden" / "models"
PROMPTS = [[12, 60, 4], [29, 12, 4, 0, 159, 33, 91, 8, 7], [5], [88, 7, 1, 8]]


@pytest.fixture(scope="module", params=["sdar", "a2d_llama"])
def loaded(request, single_process):
    from nemo_dllm.collections.diffusion.inference import load_checkpoint

    return load_checkpoint(MODELS / request.param)


@pytest.fixture
def both(loaded):
    """The denoiser that records, and the one that does not."""
    from nemo_dllm.collections.diffusion.inference import MegatronDenoiser

    return [MegatronDenoiser(loaded.core, loaded.block_size or 4, record=record) for record in (True, False)]


def canvas(seed, rows=3, length=12):
    return torch.randint(0, 150, (rows, length), generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("padded", [False, True])
def test_a_canvas(both, padded):
    kept = []
    for seed in range(5):
        tokens_BT = canvas(seed)
        key_mask_BT = torch.arange(12).cuda() < torch.tensor([[12], [7 + seed], [3]]).cuda() if padded else None
        at = torch.tensor([0, 1, 2], device="cuda"), torch.tensor([seed, 2, 1], device="cuda")
        recorded, plain = (
            (model(tokens_BT, key_mask_BT=key_mask_BT), model.score_positions(tokens_BT, *at, key_mask_BT=key_mask_BT))
            for model in both
        )
        real_BT = torch.ones_like(tokens_BT, dtype=torch.bool) if key_mask_BT is None else key_mask_BT
        assert torch.equal(recorded[0][real_BT], plain[0][real_BT])
        assert torch.equal(recorded[1], plain[1])
        kept.append((recorded[0], recorded[0].clone()))
    # Replays leave earlier results alone.
    assert all(torch.equal(result, copy) for result, copy in kept)
    assert both[0]._recorded.canvases.names == ["canvas"] and both[1]._recorded is None


@pytest.mark.parametrize("first, then", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)])
def test_what_is_recorded_in_inference_mode_is_replayed_outside_and_the_other_way_round(both, loaded, first, then):
    config = SamplerConfig(max_new_tokens=24, block_size=4, cache="exact")
    for context in (first, first, first, then):
        with context():
            written = [
                generate(model, PROMPTS, config, mask_token_id=loaded.mask_token_id, device="cuda") for model in both
            ]
            recorded, plain = ([row.tolist() for row in result.completions] for result in written)
            assert recorded == plain and torch.equal(*(model(canvas(0)) for model in both))


@pytest.mark.parametrize("blocks", [False, True])
def test_what_other_shapes_leave_behind_does_not_matter(loaded, blocks):
    """Masks and angles that are made of sizes alone are kept for the latest few sizes only."""
    from nemo_dllm.collections.diffusion.inference import MegatronDenoiser

    recorded, plain = (MegatronDenoiser(loaded.core, 4 if blocks else None, record=record) for record in (True, False))
    first = canvas(0)
    expected = plain(first)
    for _ in range(3):
        assert torch.equal(recorded(first), expected)
    for length in range(13, 60):
        plain(canvas(length, length=length))
        recorded(canvas(length, length=length))
        # Whatever has been freed is used again.
        torch.full((64, 1024), float("nan"), device="cuda")
        # So that it is not forgotten.
        assert torch.equal(recorded(first), expected)


@pytest.mark.parametrize("rows", [2, 3])
def test_blocks_with_a_cache(both, rows):
    size = 4
    caches = [model.new_cache(rows, 40) for model in both]
    for step in range(10):
        tokens_BL = canvas(step, rows, size)
        positions_BL = torch.arange(size * step, size * (step + 1)).cuda().expand(rows, -1)
        # The second row has ended with the sixth block, whose half it fills.
        real_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
        real_BL[1, max(0, 22 - size * step) :] = False
        given = {"tokens_BL": tokens_BL, "positions_BL": positions_BL, "key_mask_BL": real_BL}
        looked = [model.denoise(cache=cache, **given) for model, cache in zip(both, caches, strict=True)]
        torch.testing.assert_close(looked[0][real_BL], looked[1][real_BL], atol=2e-5, rtol=0)
        kept = [
            model.commit(cache=cache, blocks_BL=positions_BL // size, **given)
            for model, cache in zip(both, caches, strict=True)
        ]
        ends_B = real_BL.any(dim=1)
        torch.testing.assert_close(kept[0][ends_B], kept[1][ends_B], atol=2e-5, rtol=0)
        assert torch.equal(caches[0].held_BS[:rows, :40], caches[1].held_BS[:, :40])
    assert sorted(kind for kind, _ in caches[0].passes.names) == ["commit", "denoise"]
    assert both[1]._recorded is None
    # Small passes are worth making where they are recorded.
    assert both[0].full_pass < both[1].full_pass


@pytest.mark.parametrize(
    "fields",
    [
        {"cache": "exact"},
        {"cache": "exact", "cfg_scale": 1.0},
        {"cache": None, "cfg_scale": 1.0},
        {"cache": None, "temperature": 1.0, "seed": 3},
        {"cache": "approximate_delayed"},
        {"cache": "approximate_dual"},
    ],
    ids=str,
)
def test_the_sampler_writes_the_same(both, loaded, fields):
    config = SamplerConfig(max_new_tokens=24, block_size=4, **fields)
    written = [generate(model, PROMPTS, config, mask_token_id=loaded.mask_token_id, device="cuda") for model in both]
    recorded, plain = ([row.tolist() for row in result.completions] for result in written)
    assert recorded == plain and all(recorded)


def test_the_next_cache_of_these_rows_and_slots_has_the_passes_of_the_last_one(both):
    tokens_BL, positions_BL = canvas(0, 1, 4), torch.arange(4).cuda()[None]
    given = {"tokens_BL": tokens_BL, "positions_BL": positions_BL}
    given["key_mask_BL"] = torch.ones_like(tokens_BL, dtype=torch.bool)
    first, memories = None, []
    for rows, positions in [(1, 8), (1, 9), (2, 8), (1, 200), (1, 90), (7, 8), (5, 8)]:
        cache = both[0].new_cache(rows, positions)
        before = list(cache.passes.names)
        batch = {name: tensor.expand(rows, -1) for name, tensor in given.items()}
        for step in range(4):
            logits_BLV = both[0].denoise(cache=cache, **batch)
            if step == 2:
                both[0].commit(cache=cache, blocks_BL=torch.zeros_like(batch["tokens_BL"]), **batch)
        # Nothing of an earlier text is seen.
        first = logits_BLV[:1] if first is None else first
        torch.testing.assert_close(logits_BLV, first.expand_as(logits_BLV), atol=2e-5, rtol=0)
        memories.append((cache.memory, len(before)))
        assert "denoise" in [kind for kind, _ in cache.passes.names]
        del cache
    assert len({id(memory) for memory, _ in memories}) == 4
    # Seven and five rows have memory of eight.
    assert [recorded for _, recorded in memories] == [0, 1, 0, 0, 1, 0, 1]


@pytest.mark.parametrize("rows", [1, 3])
def test_prompts_of_about_one_length_share_a_pass(both, rows):
    caches, lengths = [], (70, 128, 100, 65, 90)
    for length in lengths:
        tokens_BL = canvas(length, rows, length)
        positions_BL = torch.arange(length).cuda().expand(rows, -1)
        real_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
        real_BL[-1, length // 2 :] = False
        given = {"tokens_BL": tokens_BL, "positions_BL": positions_BL, "key_mask_BL": real_BL}
        block = {name: tensor[:, :4] for name, tensor in given.items()} | {"positions_BL": positions_BL[:, :4] + length}
        results = []
        for model in both:
            cache = model.new_cache(rows, 140)
            kept = model.commit(cache=cache, blocks_BL=positions_BL // 4, **given)
            results.append((kept, *(model.denoise(cache=cache, **block) for _ in range(3))))
            caches.append(cache.memory)
        torch.testing.assert_close(*(torch.cat([x.flatten() for x in result]) for result in results), atol=2e-5, rtol=0)
        passes = getattr(cache, "passes", None)
        del cache, passes
    assert len({id(memory) for memory in caches[::2]}) == 1
    kinds = [(kind, shape[1]) for ((kind, _), (shape, _), *_) in both[0]._recorded.caches._idle[0].passes._graphs]
    assert sorted(kinds) == [("commit", 128), ("denoise", 4)]


def block(number, rows=2):
    """A block of four tokens in the first of two rows, or in both."""
    tokens_BL = canvas(number, 2, 4)[:rows]
    return {
        "tokens_BL": tokens_BL,
        "positions_BL": torch.arange(4 * number, 4 * number + 4).cuda().expand(rows, -1),
        "key_mask_BL": torch.ones_like(tokens_BL, dtype=torch.bool),
    }


def committed(model, cache, blocks, rows=2):
    """The cache with some blocks."""
    for number in range(blocks):
        given = block(number, rows)
        model.commit(cache=cache, blocks_BL=given["positions_BL"] // 4, **given)
    return cache


def test_rows_that_are_joined_have_memory_of_the_pool(both):
    from nemo_dllm.collections.diffusion.sampling.joining import Picked

    logits = []
    # What is recorded comes last.
    for model in reversed(both):
        for blocks in range(1, 5):
            whole = committed(model, model.new_cache(2, 16), blocks)
            one = type(whole).join_rows([Picked(whole, [1])], 20)
            two = type(whole).join_rows([Picked(one, [0]), Picked(committed(model, whole, blocks), [0])], 150)
            for _ in range(3):
                logits.append(model.denoise(cache=two, **block(blocks)))
    half = len(logits) // 2
    for plain, recorded in zip(logits[:half], logits[half:], strict=True):
        torch.testing.assert_close(recorded, plain, atol=2e-5, rtol=0)
    assert "denoise" in [kind for kind, _ in two.passes.names]


def test_a_row_joins_in_a_free_place_and_what_was_recorded_stays(both):
    from nemo_dllm.collections.diffusion.sampling.joining import Picked

    logits = []
    for model in reversed(both):
        batch = committed(model, model.new_cache(2, 40), 3)
        for _ in range(4):
            model.denoise(cache=batch, **block(3))
        keys, values = next(iter(batch.memory.layers.values()))
        values[0], where = float("nan"), keys.data_ptr()
        # The first row has ended; the one that comes is shorter than what was there.
        joined = type(batch).join_rows(
            [Picked(committed(model, model.new_cache(1, 8), 1, rows=1), [0]), Picked(batch, [1])], 40
        )
        assert joined is batch and next(iter(joined.memory.layers.values()))[0].data_ptr() == where
        given = block(3)
        given["positions_BL"] = torch.tensor([[4, 5, 6, 7], [12, 13, 14, 15]]).cuda()
        logits.append(model.denoise(cache=joined, **given))
        alone = committed(model, model.new_cache(1, 8), 1, rows=1)
        first = {name: tensor[:1] for name, tensor in given.items()}
        torch.testing.assert_close(logits[-1][:1], model.denoise(cache=alone, **first), atol=2e-5, rtol=0)
    torch.testing.assert_close(*logits, atol=2e-5, rtol=0)
    assert "denoise" in [kind for kind, _ in joined.passes.names]


def test_rotary_frequencies_that_were_made_on_the_cpu(both):
    rope = both[0].core.rotary_pos_emb
    expected = both[1](canvas(0))
    rope.inv_freq = rope.inv_freq.cpu()
    assert all(torch.equal(both[0](canvas(0)), expected) for _ in range(4))
    assert both[0]._recorded.canvases.names == ["canvas"] and rope.inv_freq.is_cuda


def test_what_waits_for_the_device_runs_as_it_is(caplog):
    from nemo_dllm.collections.diffusion.inference.recorded import RecordedPasses, Recorder

    recorder = Recorder(torch.device("cuda", torch.cuda.current_device()))
    passes, others = RecordedPasses(recorder), RecordedPasses(recorder)

    def doubled(x):
        return 2 * x

    def waits(x):
        return x + int(x.sum())

    for number in range(4):
        given = torch.full((3,), number, device="cuda")
        assert others("double", doubled, doubled, given).tolist() == [2 * number] * 3
    for number in range(4):
        given = torch.full((3,), number, device="cuda")
        assert passes("sum", waits, waits, given).tolist() == [4 * number] * 3
    (warning,) = [record.getMessage() for record in caplog.records if "cannot be recorded" in record.getMessage()]
    assert "captur" in warning and not recorder.works and others.names == ["double"]
    # What was recorded before goes on, and the device's generator and memory are as they were.
    given = torch.full((3,), 7, device="cuda")
    assert others("double", doubled, doubled, given).tolist() == [14] * 3
    assert torch.rand(4, device="cuda").max() < 1
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    halves = [torch.empty(free // 3, dtype=torch.uint8, device="cuda") for _ in range(2)]
    del halves
    # Only blocks that are given back to the device make room for this one.
    assert torch.empty(free // 2, dtype=torch.uint8, device="cuda").numel() == free // 2


def test_a_graph_that_is_garbage_does_not_end_a_recording():
    from nemo_dllm.collections.diffusion.inference.recorded import RecordedPasses, Recorder

    recorder = Recorder(torch.device("cuda", torch.cuda.current_device()))
    thresholds = gc.get_threshold()

    def run(x):
        # More of it than is collected after.
        return x + len([[] for _ in range(20000)])

    try:
        gc.set_threshold(100, 1, 1)
        for size in range(1, 4):
            passes = RecordedPasses(recorder)
            passes.itself = passes
            given = torch.zeros(size, device="cuda")
            assert all(passes("add", run, run, given).tolist() == [20000] * size for _ in range(4))
            assert passes.names == ["add"]
    finally:
        gc.set_threshold(*thresholds)
    assert recorder.works


def test_a_pass_without_room_to_be_recorded_is_tried_again():
    from nemo_dllm.collections.diffusion.inference.recorded import RecordedPasses, Recorder

    passes = RecordedPasses(Recorder(torch.device("cuda", torch.cuda.current_device())))
    room = 1 << 62

    def large(x):
        if torch.cuda.is_current_stream_capturing():
            torch.empty(room, dtype=torch.uint8, device="cuda")
        return x + 1

    given = torch.zeros(2, device="cuda")
    assert all(passes("large", large, large, given).tolist() == [1, 1] for _ in range(4)) and not passes.names
    room = 1
    assert passes("large", large, large, given).tolist() == [1, 1] and passes.names == ["large"]
