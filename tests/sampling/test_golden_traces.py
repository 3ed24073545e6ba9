"""Every canvas that dllm's samplers went through on the golden checkpoints, repeated token for token.

Shape letters: B rows, T positions, S recorded canvases (one before the first step).
"""

import json
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_dllm.collections.diffusion.sampling import generate_stream, preset
from nemo_dllm.collections.diffusion.sampling.denoise import denoise

GOLDEN = Path(__file__).parents[1] / "golden" / "sampling"
TRACES = json.loads((GOLDEN / "traces.json").read_text())
CASES = [(file, name) for file, cases in TRACES.items() for name in cases]
PRESET_OF = {"mdlm": "dllm_mdlm", "bd3lm": "dllm_bd3lm", "llada2": "dllm_llada2", "dream": "dllm_dream"}
# dllm's name of a setting -> ours.
SAME = {
    "temperature": "temperature",
    "cfg_scale": "cfg_scale",
    "cfg_keep_tokens": "cfg_keep_token_ids",
    "suppress_tokens": "suppress_token_ids",
    "begin_suppress_tokens": "begin_suppress_token_ids",
    "right_shift_logits": "right_shift",
    "threshold": "threshold",
    "top_p": "top_p",
    "top_k": "top_k",
    "block_size": "block_size",
}
ORDERS = {"random": "random", "maskgit_plus": "confidence", "entropy": "entropy", "topk_margin": "margin"}


def settings(case, kind):
    """dllm's settings of a case as a SamplerConfig."""
    theirs, inputs = case["config"], case["inputs"]
    fields = {SAME[name]: value for name, value in theirs.items() if name in SAME}
    fields |= {name: tuple(ids) for name, ids in fields.items() if isinstance(ids, list)}
    fields["remasking"] = ORDERS[theirs.get("alg") or theirs.get("remasking", "maskgit_plus")]
    if case["mode"] == "infill":
        length = max(map(len, inputs))
        fields["block_origin"] = "sequence"
    else:
        length = theirs["max_new_tokens"] or theirs["max_length"] - max(map(len, inputs))
        fields["max_new_tokens"] = length
    block_size = theirs.get("block_size") or length
    steps = theirs.get("steps_per_block") or ceil(theirs["steps"] / ceil(length / block_size))
    # dllm lets a block have more steps than tokens, and leaves out those that would commit nothing.
    fields["steps_per_block"] = min(steps, block_size)
    fields.setdefault("block_size", block_size)
    if kind != "llada2":
        fields["schedule"] = case["scheduler"]
    ids = case["token_ids"]
    return preset(PRESET_OF[kind], eos_token_id=ids["eos_token_id"], bos_token_id=ids["bos_token_id"], **fields)


def our_steps(model, case, config):
    torch.manual_seed(case["seed"])
    mask, pad = case["token_ids"]["mask_token_id"], case["token_ids"]["pad_token_id"]
    if case["mode"] == "sample":
        return generate_stream(model, case["inputs"], config, mask_token_id=mask, pad_token_id=pad)
    longest = max(map(len, case["inputs"]))
    tokens_BT = torch.tensor([row + [pad] * (longest - len(row)) for row in case["inputs"]])
    key_mask_BT = torch.tensor([[i < len(row) for i in range(longest)] for row in case["inputs"]])
    return denoise(model, tokens_BT, tokens_BT == mask, mask, config, key_mask_BT)


def row_offsets(case, kind, block_size):
    """Columns of padding before each recorded row: dllm's block and Dream samplers pad on the left."""
    lengths = [max(1, len(row)) for row in case["inputs"]]
    if kind == "bd3lm":
        return [block_size * ceil(max(lengths) / block_size) - length for length in lengths]
    return [max(lengths) - length for length in lengths] if kind == "dream" else [0] * len(lengths)


def assert_recorded(steps, case, kind, config, history_SBT):
    assert len(steps) == len(history_SBT) - 1
    offsets = row_offsets(case, kind, config.block_size)
    for step, recorded_BT in zip(steps, history_SBT[1:], strict=True):
        for row, offset in enumerate(offsets):
            length = max(1, len(case["inputs"][row]))
            length += config.max_new_tokens if case["mode"] == "sample" else 0
            recorded_T = recorded_BT[row, offset : offset + length]
            # Blocks that dllm had not reached are not on its canvas.
            recorded_T = recorded_T[recorded_T != -1]
            assert step.tokens_BT[row, : len(recorded_T)].tolist() == recorded_T.tolist(), step.step


@pytest.mark.parametrize("file, name", CASES, ids=[f"{file.split('.')[0]}-{name}" for file, name in CASES])
def test_every_canvas_is_the_recorded_one(tiny_decoder, file, name):
    case, kind = TRACES[file][name], file.split("_")[0]
    config = settings(case, kind)
    steps = list(our_steps(tiny_decoder(case["model"]), case, config))
    assert_recorded(steps, case, kind, config, load_file(GOLDEN / file)[f"{name}.history"])


@pytest.mark.parametrize(
    "name, quirk",
    [
        ("mdlm-predicts_mask", "mask_token_allowed"),
        ("bd3lm-predicts_mask", "mask_token_allowed"),
        ("mdlm-mask_in_prompt", "stray_masks_compete"),
        ("mdlm-begin_suppress", "begin_suppress_by_confidence"),
        ("mdlm-begin_suppress", "topk_ties"),
        ("bd3lm-pad_in_prompt", "pad_ids_are_padding"),
        ("bd3lm-eos_stop", "stop_after_block"),
        ("mdlm-gumbel", "global_noise"),
        ("mdlm-random_remasking", "global_noise"),
        ("bd3lm-random_remasking", "global_noise"),
        ("mdlm-infill_batch", "lockstep"),
    ],
)
def test_every_quirk_is_needed(tiny_decoder, name, quirk):
    kind, name = name.split("-")
    file = f"{kind}_a2d_qwen3.safetensors"
    case = TRACES[file][name]
    config = settings(case, kind)
    config = replace(config, quirks=replace(config.quirks, **{quirk: False}), seed=0)
    steps = list(our_steps(tiny_decoder(case["model"]), case, config))
    with pytest.raises(AssertionError):
        assert_recorded(steps, case, kind, config, load_file(GOLDEN / file)[f"{name}.history"])


@pytest.mark.parametrize(
    "file, name, changed",
    [
        ("mdlm_a2d_qwen3", "blocks", {"block_size": 8}),
        ("mdlm_a2d_qwen3", "cosine", {"schedule": "linear"}),
        ("mdlm_llada", "cfg", {"cfg_scale": 2.5}),
        ("mdlm_a2d_qwen3", "cfg_batch_keep", {"cfg_keep_token_ids": ()}),
        ("mdlm_a2d_qwen3", "right_shift", {"right_shift": False}),
        ("mdlm_a2d_qwen3", "suppress", {"suppress_token_ids": ()}),
        ("bd3lm_a2d_qwen3", "prompt_not_multiple", {"block_origin": "sequence"}),
        ("bd3lm_sdar", "right_shift", {"right_shift": False}),
        ("llada2_llada2_moe", "steps3", {"schedule": "linear"}),
        ("llada2_llada2_moe", "batch_threshold", {"threshold": 0.05}),
        ("dream_dream", "entropy", {"remasking": "confidence"}),
        ("dream_dream", "margin", {"remasking": "confidence"}),
        ("dream_dream", "maskgit", {"right_shift": False}),
    ],
)
def test_other_settings_give_other_canvases(tiny_decoder, file, name, changed):
    case, kind = TRACES[f"{file}.safetensors"][name], file.split("_")[0]
    config = replace(settings(case, kind), **changed)
    steps = list(our_steps(tiny_decoder(case["model"]), case, config))
    with pytest.raises(AssertionError):
        assert_recorded(steps, case, kind, config, load_file(GOLDEN / f"{file}.safetensors")[f"{name}.history"])
