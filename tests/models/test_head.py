"""The masked-position head against a dense linear layer and torch's cross-entropy.

Shape letters: N target positions, H hidden size, V vocabulary rows.
"""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_dllm.collections.diffusion.models.head import VocabularyShard, masked_cross_entropy

N, H, V = 7, 6, 11


def case_of(n=N, vocab=V, rows=V, dtype=torch.float32, seed=0):
    """Random inputs; hidden states and weights of ``rows`` >= ``vocab`` rows are large enough for a peaked softmax."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(n, H, generator=generator).to(dtype),
        "weight": torch.randn(rows, H, generator=generator).to(dtype),
        "targets": torch.randint(0, vocab, (n,), generator=generator),
        "loss_weight": torch.rand(n, generator=generator) * 3,
        "vocab_size": vocab,
        "scale": 1.0,
        "chunk": 3,
    }


def run(case, **changes):
    """Loss, nll and both gradients of the head in one process."""
    case = case | changes
    hidden, weight = case["hidden"].clone().requires_grad_(), case["weight"].clone().requires_grad_()
    shard = VocabularyShard(start=0, valid=case["vocab_size"], group=None)
    loss, nll = masked_cross_entropy(hidden, weight, case["targets"], case["loss_weight"], shard, case["chunk"])
    (loss * case["scale"]).backward()
    return {"loss": loss.detach(), "nll": nll, "grad_hidden": hidden.grad, "grad_weight": weight.grad}


def dense(case, **changes):
    """The same with all logits at once, padded rows cut off."""
    case = case | changes
    hidden, weight = case["hidden"].clone().requires_grad_(), case["weight"].clone().requires_grad_()
    logits_NV = hidden @ weight[: case["vocab_size"]].t()
    nll = F.cross_entropy(logits_NV.float(), case["targets"], reduction="none")
    loss = (nll * case["loss_weight"]).sum()
    (loss * case["scale"]).backward()
    return {"loss": loss.detach(), "nll": nll.detach(), "grad_hidden": hidden.grad, "grad_weight": weight.grad}


def assert_equal(actual, expected):
    """Equal to a few roundings of the largest entry."""
    for name, tensor in expected.items():
        atol = 2e-6 * max(1.0, tensor.abs().max().item() if tensor.numel() else 0.0)
        torch.testing.assert_close(
            actual[name], tensor, rtol=1e-5, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("chunk", [1, 3, N, 100])
@pytest.mark.parametrize("rows", [V, V + 5], ids=["exact", "padded"])
def test_loss_and_gradients_equal_the_dense_form(chunk, rows):
    case = case_of(rows=rows)
    assert_equal(run(case, chunk=chunk), dense(case))


@pytest.mark.parametrize(
    "mutation",
    [
        {"loss_weight": torch.ones(N)},
        {"targets": (torch.arange(N) * 3) % V},
        {"vocab_size": V - 1},
        {"scale": -1.0},
    ],
    ids=lambda mutation: next(iter(mutation)),
)
def test_the_comparison_notices_a_wrong_head(mutation):
    """The mutated twin: another weight, target, vocabulary or sign."""
    case = case_of() | {"targets": torch.arange(N)}
    with pytest.raises(AssertionError):
        assert_equal(run(case, **mutation), dense(case))


def test_hand_computed():
    """Logits (0, ln 3) give probabilities 1/4 and 3/4; target 0 costs ln 4 and pulls with -3/4 and 3/4."""
    case = {
        "hidden": torch.tensor([[1.0]]),
        "weight": torch.tensor([[0.0], [math.log(3)]]),
        "targets": torch.tensor([0]),
        "loss_weight": torch.tensor([2.0]),
        "vocab_size": 2,
        "scale": 1.0,
        "chunk": 8,
    }
    result = run(case)
    torch.testing.assert_close(result["nll"], torch.tensor([math.log(4)]))
    torch.testing.assert_close(result["loss"], torch.tensor(2 * math.log(4)))
    torch.testing.assert_close(result["grad_weight"], torch.tensor([[-1.5], [1.5]]))
    torch.testing.assert_close(result["grad_hidden"], torch.tensor([[1.5 * math.log(3)]]))


def test_nothing_to_score_is_zero_with_zero_gradients():
    result = run(case_of(n=0))
    assert result["loss"] == 0
    assert result["nll"].shape == (0,)
    assert result["grad_hidden"].shape == (0, H)
    assert torch.equal(result["grad_weight"], torch.zeros(V, H))


def test_padded_rows_take_no_probability_and_no_gradient():
    case = case_of(rows=V + 4)
    large = case["weight"].clone()
    large[V:] = 1e3
    result = run(case, weight=large)
    assert torch.equal(result["nll"], run(case)["nll"])
    assert torch.equal(result["grad_weight"][V:], torch.zeros(4, H))
    assert result["grad_hidden"].isfinite().all()


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary():
    case = case_of(rows=V + 4)
    result = run(case, hidden=torch.zeros(N, H))
    torch.testing.assert_close(result["nll"], torch.full((N,), math.log(V)))


def test_gradients_follow_what_comes_after_the_loss():
    case = case_of()
    once, scaled = run(case), run(case, scale=-2.5)
    assert torch.equal(once["loss"], scaled["loss"])
    for name in ("grad_hidden", "grad_weight"):
        torch.testing.assert_close(scaled[name], -2.5 * once[name])


def test_only_what_needs_a_gradient_gets_one():
    case = case_of()
    full = run(case)
    for trained in ("hidden", "weight"):
        tensors = {name: case[name].clone().requires_grad_(name == trained) for name in ("hidden", "weight")}
        shard = VocabularyShard(0, V, None)
        output = masked_cross_entropy(tensors["hidden"], tensors["weight"], case["targets"], case["loss_weight"], shard)
        output.loss_sum.backward()
        assert not output.nll_N.requires_grad
        assert [name for name, tensor in tensors.items() if tensor.grad is not None] == [trained]
        torch.testing.assert_close(tensors[trained].grad, full[f"grad_{trained}"])


def test_without_a_gradient_the_loss_is_the_same():
    case = case_of()
    with torch.no_grad():
        shard = VocabularyShard(0, V, None)
        output = masked_cross_entropy(case["hidden"], case["weight"], case["targets"], case["loss_weight"], shard)
    torch.testing.assert_close(output.loss_sum, dense(case)["loss"])
    assert not output.loss_sum.requires_grad


def test_bfloat16_keeps_losses_in_fp32_and_sums_the_weight_gradient_over_chunks_in_fp32():
    """One row per chunk: summed in bf16, 4,096 equal terms would stop growing at 256 of them."""
    rows = 4096
    case = {
        "hidden": torch.ones(rows, 1, dtype=torch.bfloat16),
        "weight": torch.zeros(2, 1, dtype=torch.bfloat16),
        "targets": torch.zeros(rows, dtype=torch.long),
        "loss_weight": torch.ones(rows),
        "vocab_size": 2,
        "scale": 1.0,
        "chunk": 1,
    }
    result = run(case)
    assert result["loss"].dtype == result["nll"].dtype == torch.float32
    assert result["grad_weight"].dtype == torch.bfloat16
    torch.testing.assert_close(result["loss"], torch.tensor(rows * math.log(2)))
    assert result["grad_weight"].tolist() == [[-rows / 2], [rows / 2]]


class LargestOutput(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_no_tensor_of_all_positions_times_the_vocabulary_exists():
    n, vocab, chunk = 64, 200, 4
    case = case_of(n=n, vocab=vocab, rows=vocab)
    with LargestOutput() as recorder:
        run(case, chunk=chunk)
    # The weight's own gradient is the largest.
    assert recorder.largest == vocab * H
    assert chunk * vocab < recorder.largest < n * vocab


def test_the_recorder_would_see_dense_logits():
    """The mutated twin."""
    n, vocab = 64, 200
    case = case_of(n=n, vocab=vocab, rows=vocab)
    with LargestOutput() as recorder:
        dense(case)
    assert recorder.largest >= n * vocab
    with LargestOutput() as recorder:
        run(case, chunk=n)
    assert recorder.largest >= n * vocab


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Runs cases on two gloo ranks with half the vocabulary each; returns a list of results per rank."""
    folder = tmp_path_factory.mktemp("sharded_head")

    def run_on_two_ranks(cases):
        torch.save(cases, folder / "cases")
        script = Path(__file__).with_name("sharded_head.py")
        ranks = [
            subprocess.Popen(
                [sys.executable, script, folder / "store", str(rank), "2", folder / "cases", folder / f"rank{rank}"]
            )
            for rank in range(2)
        ]
        assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
        return [torch.load(folder / f"rank{rank}") for rank in range(2)]

    return run_on_two_ranks


def test_two_vocabulary_shards_equal_one_process(sharded):
    cases = {
        "even": case_of(vocab=12, rows=12),
        "second shard partly padding": case_of(vocab=7, rows=12),
        "second shard all padding": case_of(vocab=5, rows=12),
        "one row per chunk": case_of(vocab=7, rows=12) | {"chunk": 1},
        "scaled": case_of(vocab=9, rows=12) | {"scale": -2.5},
        "nothing to score": case_of(n=0, vocab=12, rows=12),
        "far apart": case_of(vocab=12, rows=12)
        | {"weight": torch.cat([torch.full((6, H), -20.0), torch.full((6, H), 20.0)])},
    }
    first, second = sharded(list(cases.values()))
    for (name, case), a, b in zip(cases.items(), first, second, strict=True):
        assert torch.equal(a["loss"], b["loss"]), name
        assert torch.equal(a["nll"], b["nll"]), name
        joined = {
            "loss": a["loss"],
            "nll": a["nll"],
            "grad_hidden": a["grad_hidden"] + b["grad_hidden"],
            "grad_weight": torch.cat([a["grad_weight"], b["grad_weight"]]),
        }
        assert_equal(joined, dense(case))
        # Each rank holds its share only: the mutated twin of adding them.
        if len(case["targets"]) and name != "second shard all padding":
            assert not torch.allclose(a["grad_hidden"], joined["grad_hidden"], atol=1e-3), name


@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_fp16_gradients_neither_underflow_nor_overflow(scale):
    """Against fp32 on the same rounded inputs, with the probabilities of a large vocabulary and a loss scale."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 16, generator=generator).half()
    weight = (0.1 * torch.randn(5000, 16, generator=generator)).half()
    targets = torch.randint(0, 5000, (8,), generator=generator)
    shard = VocabularyShard(start=0, valid=5000, group=None)

    def gradients(dtype):
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]
        loss, _ = masked_cross_entropy(*inputs, targets, torch.full((8,), 0.01), shard, 3)
        return torch.autograd.grad(loss * scale, inputs)

    for half, full in zip(gradients(torch.float16), gradients(torch.float32), strict=True):
        assert half.dtype == torch.float16
        torch.testing.assert_close(half.float(), full, rtol=2e-3, atol=6e-8)
