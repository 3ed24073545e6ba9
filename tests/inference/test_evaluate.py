import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.nemo

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
TEXTS = [" ".join(f"w{(7 * i) % 190}" for i in range(100)), "w5 w7 w9", " ".join(f"w{i}" for i in range(30))]


@pytest.fixture(scope="module")
def load(single_process):
    from nemo_dllm.collections.diffusion.inference import load_checkpoint

    models = {}
    return lambda name: models.setdefault(name, load_checkpoint(GOLDEN / name))


@pytest.fixture(scope="module")
def evaluate_texts():
    from nemo_dllm.collections.diffusion.inference.evaluate import evaluate_texts

    return evaluate_texts


class Uniform(torch.nn.Module):
    """Every token is as probable as any other, wherever it stands."""

    config = SimpleNamespace(seq_length=512)

    def forward(self, input_ids, attention_mask, targets):
        from nemo_dllm.collections.diffusion.models.head import HeadOutput

        nll_N = torch.full_like(targets.loss_weight_N, math.log(200))
        return HeadOutput((nll_N * targets.loss_weight_N).sum(), nll_N)

    def parameters(self, recurse=True):
        yield torch.zeros(1)


@pytest.mark.parametrize("name", ["a2d_qwen3", "sdar", "dream"])
def test_uniform_logits_cost_the_logarithm_of_the_vocabulary(load, evaluate_texts, name):
    model = replace(load(name), core=Uniform())
    found = evaluate_texts(model, TEXTS, num_draws=200)
    assert found.nll == pytest.approx(math.log(200), rel=0.03)
    assert found.perplexity == pytest.approx(math.exp(found.nll))
    # Words of a model without shift are all scored; with one, a text's first word needs a start token before it.
    starts = len(TEXTS) if name == "dream" and model.tokenizer.bos_id is None else 0
    assert (found.tokens, found.rows) == (133 - starts, 3)
    if not starts:
        assert found.bytes == sum(map(len, TEXTS))
    assert found.bits_per_byte == pytest.approx(found.nll * found.tokens / math.log(2) / found.bytes)


@pytest.mark.parametrize("name", ["a2d_qwen3", "sdar", "dream", "llada2_moe"])
def test_batches_do_not_change_the_result_and_the_seed_does(load, evaluate_texts, name):
    results = [
        evaluate_texts(load(name), TEXTS, seq_length=40, batch_size=batch_size, num_draws=3) for batch_size in (1, 5)
    ]
    assert results[0].nll == pytest.approx(results[1].nll, abs=1e-5)
    assert results[0].rows == 5
    assert evaluate_texts(load(name), TEXTS, seq_length=40, num_draws=3, seed=5).nll != results[0].nll


def test_the_bound_is_that_of_validation(load, evaluate_texts):
    """By hand, for one row: the noise of validation, the whole canvas' logits, the weights of the bound."""
    from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion

    model = load("a2d_qwen3")
    found = evaluate_texts(model, TEXTS[1:2], num_draws=1, seed=3)
    tokens_BL = torch.tensor([model.encode(TEXTS[1]) + [0] * 61])
    real_BL = torch.arange(64)[None] < 3
    objective = MaskedDiffusion(mask_token_id=model.mask_token_id, seed=3)
    noised = objective.corrupt(tokens_BL, real_BL, torch.tensor([0]), validation=True)
    logits_BLV = model.denoiser(noised.tokens.to(model.device), key_mask_BT=real_BL.to(model.device)).cpu()
    nll_BL = -logits_BLV.log_softmax(-1).gather(-1, tokens_BL[..., None])[..., 0]
    assert found.nll == pytest.approx(float((nll_BL * noised.nll_weight).sum()) / 3, rel=1e-4)


def test_a_shifted_row_begins_with_the_token_before_it(load, evaluate_texts):
    from nemo_dllm.collections.diffusion.inference.evaluated_rows import rows_of_texts

    model = load("dream")
    words = model.encode(TEXTS[2])
    bos = model.tokenizer.bos_id
    rows, _ = rows_of_texts(model, TEXTS[2:], 12, None)
    assert rows[0].tokens == ([bos, *words[:11]] if bos is not None else words[:12])
    start = len(rows[0].tokens) - (bos is not None)
    assert rows[1].tokens == words[start - 1 : start + 11] and rows[1].scored == [False] + [True] * 11
    plain, num_bytes = rows_of_texts(load("a2d_qwen3"), TEXTS[2:], 12, 2)
    assert [row.tokens for row in plain] == [words[:12], words[12:24]]
    assert num_bytes == len(" ".join(TEXTS[2].split()[:24]))


def test_bad_numbers_and_texts(load, evaluate_texts):
    model = load("a2d_qwen3")
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        evaluate_texts(model, TEXTS, batch_size=0)
    with pytest.raises(ValueError, match="seq_length=513 is longer than the model's context of 512"):
        evaluate_texts(model, TEXTS, seq_length=513)
    with pytest.raises(ValueError, match="the text has no token to score"):
        evaluate_texts(model, [""])


def test_the_command_prints_lines_or_json(evaluate, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXTS[0])
    options = {"num_draws": 2, "seed": 1}
    evaluate(GOLDEN / "sdar", tmp_path, **options, json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["bytes"], found["draws"]) == (100, len(TEXTS[0]), 2)
    assert found["seq_length"] == 512
    evaluate(GOLDEN / "sdar", tmp_path, **options, json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["bits", "per", "byte", f"{found['bits_per_byte']:.4f}"]
    assert lines[-1] == f"100 tokens, {len(TEXTS[0])} bytes in 1 rows of at most 512 tokens, 2 noise levels each"


def test_an_export_is_judged_at_the_length_of_its_training(single_process, load, evaluate_texts, tmp_path):
    from nemo_dllm.collections.diffusion.inference import load_checkpoint
    from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
    from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
    from nemo_dllm.connectors.config import hf_to_nemo_config
    from nemo_dllm.connectors.hf_export import export_hf_checkpoint
    from nemo_dllm.connectors.hf_import import import_hf_checkpoint

    source = GOLDEN / "a2d_qwen3"
    model = MDLMModel(hf_to_nemo_config(source), MaskedDiffusion())
    trained = import_hf_checkpoint(model, source, tmp_path / "nemo")
    assert load_checkpoint(trained).seq_length == load("a2d_qwen3").seq_length == 512
    context = trained / "context" / "io.json"
    told = re.sub(r"(name='seq_length'[^{]*{[^{]*\"value\": )512", r"\g<1>48", context.read_text())
    context.write_text(told)
    exported = export_hf_checkpoint(trained, tmp_path / "hf")
    found, again = (evaluate_texts(load_checkpoint(path), TEXTS) for path in (trained, exported))
    assert found == again
    assert (found.seq_length, found.rows) == (48, 5)
    # What it can read is what its origin could.
    assert load_checkpoint(exported).seq_length == 512
    assert evaluate_texts(load_checkpoint(exported), TEXTS, seq_length=512).rows == 3
