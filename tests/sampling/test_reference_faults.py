"""What the reference gets wrong and the default does not, on its own recorded inputs."""

import json
from pathlib import Path

import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import (
    PRESETS,
    ReferenceQuirks,
    SamplerConfig,
    generate,
    generate_stream,
    preset,
)

TRACES = json.loads((Path(__file__).parents[1] / "golden" / "sampling" / "traces.json").read_text())
MASK, PAD = 196, 191


def case(name, kind="mdlm"):
    return TRACES[f"{kind}_a2d_qwen3.safetensors"][name]


def test_mask_tokens_of_a_prompt_are_text(tiny_decoder):
    """They stay, they take no commitments, and every hole is filled."""
    prompt = case("mask_in_prompt")["inputs"][0]
    assert MASK in prompt
    result = generate(tiny_decoder("a2d_qwen3"), [prompt], SamplerConfig(6, steps=6, block_size=6), mask_token_id=MASK)
    assert result.sequences[0][: len(prompt)].tolist() == prompt
    assert MASK not in result.completions[0] and len(result.completions[0]) == 6 == result.steps


def test_mask_tokens_of_a_prompt_that_compete_are_not_among_what_is_committed(tiny_decoder):
    prompt = case("mask_in_prompt")["inputs"][0]
    quirks = ReferenceQuirks(stray_masks_compete=True)
    config = SamplerConfig(6, steps=6, block_size=6, quirks=quirks)
    steps = list(generate_stream(tiny_decoder("a2d_qwen3"), [prompt], config, mask_token_id=MASK))
    assert MASK not in steps[-1].tokens_BT[0, : len(prompt)].tolist()
    before_BT = torch.arange(len(prompt) + 6)[None] >= len(prompt)
    for step in steps:
        assert torch.equal(step.committed_BT, before_BT & ~step.holes_BT)
        before_BT = step.holes_BT


@pytest.mark.parametrize("kind", ["mdlm", "bd3lm"])
def test_the_mask_token_is_never_an_answer(tiny_decoder, kind):
    recorded = case("predicts_mask", kind)
    fields = {"block_size": recorded["config"]["block_size"], "cache": "exact" if kind == "bd3lm" else None}
    length = recorded["config"]["max_new_tokens"]
    result = generate(
        tiny_decoder("a2d_qwen3"), recorded["inputs"], SamplerConfig(length, **fields), mask_token_id=MASK
    )
    assert MASK not in result.completions[0] and len(result.completions[0]) == length == result.steps


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("mask_id", [9, 0])
def test_no_preset_lets_a_mask_token_out(name, mask_id):
    """A model that is all but certain of the mask token, with everything else suppressed but two tokens."""

    class MaskLover:
        def new_cache(self, rows, positions):
            return None

        def denoise(self, tokens_BL, positions_BL, cache, *, key_mask_BL):
            return self(tokens_BL, key_mask_BT=key_mask_BL)

        def commit(self, tokens_BL, positions_BL, cache, *, key_mask_BL, blocks_BL):
            return self(tokens_BL, key_mask_BT=key_mask_BL)[:, -1]

        def __call__(self, tokens_BT, *, key_mask_BT):
            return 50.0 * torch.eye(10)[mask_id].expand(*tokens_BT.shape, 10)

    suppressed = tuple(range(1, 8))
    config = preset(name, max_new_tokens=40, steps=None, suppress_token_ids=suppressed, seed=0)
    result = generate(MaskLover(), [[1, mask_id, 2], [3]], config, mask_token_id=mask_id)
    assert set(torch.cat(result.completions).tolist()) <= {0, 8, 9} - {mask_id}
    assert [len(row) for row in result.completions] == [40, 40]


def test_blocks_of_a_block_model_are_those_of_training(tiny_decoder):
    """After 6 tokens and with blocks of 4, the first block has two holes; the reference starts a block of its own."""
    recorded = case("prompt_not_multiple", "bd3lm")

    def first_filled(**fields):
        config = SamplerConfig(8, block_size=4, cache="exact", steps_per_block=1, **fields)
        step = next(generate_stream(tiny_decoder("a2d_qwen3"), recorded["inputs"], config, mask_token_id=MASK))
        return step.committed_BT[0].nonzero().flatten().tolist()

    assert len(recorded["inputs"][0]) == 6
    assert first_filled() == [6, 7]
    assert first_filled(block_origin="prompt") == [6, 7, 8, 9]


def test_pad_tokens_inside_a_prompt_are_text(context_model):
    """Only what the sampler appends is hidden, whatever the ids."""
    seen = []
    model = context_model()

    def spy(tokens_BT, *, key_mask_BT):
        seen.append(None if key_mask_BT is None else key_mask_BT.tolist())
        return model(tokens_BT, key_mask_BT=key_mask_BT)

    config = SamplerConfig(1)
    generate(spy, [[1, 5, 2], [5]], config, mask_token_id=22, pad_token_id=5)
    assert seen == [[[True] * 4, [True, True, False, False]]]
    quirks = ReferenceQuirks(pad_ids_are_padding=True)
    for pad_token_id in (5, torch.tensor(5)):
        generate(spy, [[1, 5, 2]], SamplerConfig(1, quirks=quirks), mask_token_id=22, pad_token_id=pad_token_id)
    assert seen[1:] == [[[True, False, True, True]]] * 2


def test_a_completion_ends_with_its_end_token(tiny_decoder):
    """The reference finishes the block, and returns what stands behind the end token."""
    recorded = case("eos_stop", "bd3lm")
    eos = recorded["token_ids"]["eos_token_id"]
    fields = {"block_size": 4, "eos_token_id": eos}
    ours = generate(
        tiny_decoder("a2d_qwen3"), recorded["inputs"], SamplerConfig(12, cache="exact", **fields), mask_token_id=MASK
    )
    assert ours.completions[0].tolist() == [eos] and ours.steps == 1
    theirs = preset("dllm_bd3lm", max_new_tokens=12, steps=12, **fields)
    *_, last = generate_stream(tiny_decoder("a2d_qwen3"), recorded["inputs"], theirs, mask_token_id=MASK)
    assert last.step == 4 and last.tokens_BT[0, 4:8].tolist() == [eos] * 4
