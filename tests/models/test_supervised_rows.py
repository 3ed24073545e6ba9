"""Rows of fine-tuning data, padded and packed, through a small model under given masks: token by token the same.

Shape letters: L positions of a row.
"""

import json
from functools import partial

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.nemo

EOS, MASK, LENGTH = 256, 257, 48
ROWS = [("q" * (1 + i % 5), f"{i} is" + "a" * (i * 7 % 23)) for i in range(14)]
KINDS = {
    "masked": ("MaskedDiffusion", {}),
    "block": ("BlockDiffusion", {"block_size": 4}),
    "masked, both views": ("MaskedDiffusion", {"complementary": True}),
    "block, both views": ("BlockDiffusion", {"block_size": 4, "complementary": True}),
}


@pytest.fixture(scope="module")
def model(build_model):
    return build_model(vocab_size=258, seq_length=LENGTH).eval()


@pytest.fixture
def samples_of(tmp_path):
    from transformers import AutoTokenizer

    from nemo_dllm.collections.diffusion.data.chat_encoder import ChatEncoder
    from nemo_dllm.collections.diffusion.data.chat_template import ChatTemplate
    from nemo_dllm.collections.diffusion.data.sources import find_sources
    from nemo_dllm.collections.diffusion.data.supervised import FittedSamples
    from nemo_dllm.collections.diffusion.data.supervised_tokens import encode_supervised
    from nemo_dllm.collections.diffusion.data.tokenizer import byte_tokenizer

    def build(block_size):
        (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": p, "completion": c}) for p, c in ROWS))
        tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path / "byte"))
        encoder = ChatEncoder(tokenizer, ChatTemplate(tokenizer, ""))
        corpus = encode_supervised(find_sources([tmp_path / "rows.jsonl"]), encoder)
        return FittedSamples(corpus.samples, LENGTH, EOS, block_size)

    return build


def objective_of(kind):
    from nemo_dllm.collections.diffusion import objectives

    name, fields = KINDS[kind]
    return getattr(objectives, name)(mask_token_id=MASK, time_sampling="iid", **fields)


@torch.no_grad()
def nll_by_place(model, rows, samples, objective):
    """(sample, position within it, view) -> nll, under uniforms that belong to sample and position."""
    from nemo_dllm.collections.diffusion.models.batch import corrupt_batch

    number_of = {tuple(samples.sample(i).tokens.tolist()): i for i in range(len(samples))}
    uniforms = np.random.default_rng(0).random((len(samples), LENGTH), dtype=np.float32)
    found = {}
    for row in rows:
        places, uniforms_L = {}, torch.full((len(row["tokens"]),), 0.999)
        documents = row.get("document_ids", torch.zeros_like(row["tokens"]))
        for document in documents[row["key_mask"]].unique().tolist():
            positions = ((documents == document) & row["key_mask"]).nonzero().flatten()
            sample = number_of[tuple(row["tokens"][positions].tolist())]
            places |= {int(position): (sample, offset) for offset, position in enumerate(positions)}
            uniforms_L[positions] = torch.from_numpy(uniforms[sample, : len(positions)])
        drawn = objective.__class__.corrupt
        objective.corrupt = partial(drawn, objective, time=torch.tensor([0.5]), uniforms_BL=uniforms_L[None])
        batch = corrupt_batch({name: value[None] for name, value in row.items()}, objective, validation=False)
        output = model.forward_step(batch)
        rows_of_input = objective.views
        for place, nll in zip(batch.targets.row_N.tolist(), output.nll_N.tolist(), strict=True):
            found[*places[place // rows_of_input], place % rows_of_input] = nll
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_packed_as_padded(model, samples_of, kind):
    from nemo_dllm.collections.diffusion.data.supervised import PackedRows, PaddedRows, count_packed_rows

    objective = objective_of(kind)
    samples = samples_of(objective.block_size)
    packed = PackedRows(samples, count_packed_rows(samples), seed=1)
    assert len(packed) <= len(samples) // 2
    found = nll_by_place(model, packed, samples, objective)
    padded = PaddedRows(samples, len(samples), None, 2, pad_to_multiple_of=4)
    assert found == pytest.approx(nll_by_place(model, padded, samples, objective), rel=2e-5, abs=2e-5)
    trained = sum(int(samples.sample(i).loss_mask.sum()) for i in range(len(samples)))
    # Two views mask each trained token exactly once, one view about half of them.
    assert len({place[:2] for place in found}) == len(found)
    assert len(found) == trained if objective.views == 2 else 0.3 * trained < len(found) < 0.7 * trained
    for sample, position, _ in found:
        assert samples.sample(sample).loss_mask[position]


@pytest.mark.parametrize("packing", [False, True])
def test_trained_pads_under_complementary_masks(model, samples_of, packing):
    """Each trained token, pads among them, is masked in exactly one of the two views; prompts in none."""
    from nemo_dllm.collections.diffusion.data.supervised import PackedRows, PaddedRows
    from nemo_dllm.collections.diffusion.models.batch import corrupt_batch

    samples, objective = samples_of(None), objective_of("masked, both views")
    objective.group_size = 1
    row = (
        PackedRows(samples, 1, 0, supervise_padding=True)
        if packing
        else PaddedRows(samples, 1, None, 1, supervise_padding=True)
    )[0]
    batch = corrupt_batch({name: value[None] for name, value in row.items()}, objective, validation=False)
    assert sorted((batch.targets.row_N // 2).tolist()) == row["loss_mask"].nonzero().flatten().tolist()
    assert bool(row["loss_mask"][-1]) and int(row["tokens"][-1]) == EOS
    assert torch.isfinite(model.forward_step(batch).nll_N).all()
