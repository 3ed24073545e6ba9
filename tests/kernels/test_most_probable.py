"""The most probable tokens against torch, on a GPU, or on a CPU with TRITON_INTERPRET=1.

Shape letters: N rows, V vocabulary columns.
"""

import os

import pytest
import torch

pytest.importorskip("triton")

from nemo_dllm.collections.diffusion.kernels.most_probable import most_probable
from nemo_dllm.collections.diffusion.sampling import SamplerConfig, generate
from nemo_dllm.collections.diffusion.sampling.token_choice import restrict_logits

INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
WHERE = [
    pytest.param(("cpu", torch.float32), marks=INTERPRETED, id="interpreted"),
    pytest.param(("cpu", torch.float16), marks=INTERPRETED, id="interpreted-fp16"),
    pytest.param(("cuda", torch.float32), marks=pytest.mark.gpu, id="fp32"),
    pytest.param(("cuda", torch.float16), marks=pytest.mark.gpu, id="fp16"),
    pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.gpu, id="bf16"),
]
INFINITY = float("inf")


@pytest.fixture(params=WHERE, name="where")
def device_and_dtype(request):
    return request.param


def columns(ids, vocabulary, device):
    return torch.isin(torch.arange(vocabulary), torch.tensor(ids)).to(device)


@pytest.mark.parametrize("rows, vocabulary", [(1, 5), (3, 4096), (2, 4097), (4, 30_000)])
@pytest.mark.parametrize("forbidden", [(), (0,), (3, 4)])
def test_as_torch_finds_them(where, rows, vocabulary, forbidden):
    generator = torch.Generator().manual_seed(vocabulary)
    # Every other column, so that a row is not as long as the step to the next one.
    wide = 4 * torch.randn(rows, vocabulary + 7, generator=generator)
    logits_NV = wide.to(*where)[:, :vocabulary]
    given = logits_NV.clone()
    tokens_N, probability_N = most_probable(logits_NV, columns(forbidden, vocabulary, where[0]) if forbidden else None)
    config = SamplerConfig(suppress_token_ids=forbidden[1:])
    expected_NV = restrict_logits(logits_NV, None, forbidden[0], config) if forbidden else logits_NV.float()
    assert torch.equal(tokens_N, expected_NV.argmax(dim=-1)) and tokens_N.dtype == torch.int64
    expected_N = expected_NV.double().softmax(dim=-1).gather(1, tokens_N[:, None])[:, 0]
    torch.testing.assert_close(probability_N.double(), expected_N, rtol=1e-6, atol=0)
    assert torch.equal(logits_NV, given)


@pytest.mark.parametrize("rows", [1, 3])
def test_logits_whose_neighbours_lie_apart(where, rows):
    logits_VN = torch.randn(4_100, rows, generator=torch.Generator().manual_seed(1)).to(*where)
    for logits_NV in (logits_VN.T, logits_VN.repeat_interleave(2, dim=0)[::2].T):
        tokens_N, _ = most_probable(logits_NV)
        assert torch.equal(tokens_N, logits_NV.float().argmax(dim=-1))


@pytest.mark.gpu
def test_more_rows_than_most_sizes_of_a_grid_may_have():
    logits_NV = torch.zeros(70_000, 5, device="cuda")
    logits_NV[:, 2], logits_NV[-1, 3] = 1.0, 2.0
    tokens_N, _ = most_probable(logits_NV)
    assert (tokens_N[:-1] == 2).all() and tokens_N[-1] == 3


def test_the_lowest_of_equals_whatever_part_it_is_in(where):
    logits_NV = torch.zeros(3, 10_000)
    logits_NV[0, [9_000, 4_500, 4_501]] = 2.0
    logits_NV[1, [0, 9_999]] = -1.0
    logits_NV[2, 9_999] = 1.0
    tokens_N, _ = most_probable(logits_NV.to(*where))
    assert tokens_N.tolist() == [4_500, 1, 9_999]


def test_infinite_logits_and_numbers_that_are_none(where):
    logits_NV = torch.zeros(5, 5_000)
    logits_NV[0, 4_200] = INFINITY  # What half precision overflows to.
    logits_NV[1, [10, 4_999]] = INFINITY
    logits_NV[2, 4_800] = float("nan")
    logits_NV[3] = -INFINITY
    logits_NV[4] = -INFINITY
    logits_NV[4, 4_900] = -3.0
    tokens_N, probability_N = most_probable(logits_NV.to(*where), columns([0], 5_000, where[0]))
    assert tokens_N[[0, 1, 4]].tolist() == [4_200, 10, 4_900]
    assert probability_N[[0, 1, 4]].tolist() == [1.0, 0.5, 1.0]
    assert probability_N[[2, 3]].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"remasking": "margin"},
        {"remasking": "entropy"},
        {"remasking": "random", "seed": 3},
        {"suppress_token_ids": (4, 5), "eos_token_id": 2, "min_new_tokens": 3},
        {"eos_token_id": 2, "eos_penalty": 3.0},
        {"begin_suppress_token_ids": (7, 8)},
        {"top_k": 1},
        {"threshold": 0.05},
    ],
    ids=str,
)
def test_a_sampler_writes_on_a_gpu_what_it_writes_on_a_cpu(fields):
    table_VV = 3 * torch.randn(32, 32, generator=torch.Generator().manual_seed(0))

    def write(device):
        def model(tokens_BT, *, key_mask_BT):
            shares_BTV = torch.nn.functional.one_hot(tokens_BT, 32).float().cumsum(dim=1)
            return (shares_BTV @ table_VV.to(device)).sin() * 4 + shares_BTV.flip(-1)

        # Draws differ between devices, so that nothing but the order may be random.
        config = SamplerConfig(12, **{"block_size": 4, **fields})
        prompts = [[1, 2, 3], [9], [12, 4, 4, 1, 0]]
        result = generate(model, prompts, config, mask_token_id=31, device=device)
        return [row.tolist() for row in result.completions]

    written = write("cuda")
    if fields.get("remasking") == "random":
        assert all(31 not in row for row in written) and written == write("cuda")
    else:
        assert written == write("cpu")


@pytest.mark.gpu
def test_logits_that_are_no_numbers_are_told():
    def model(tokens_BT, *, key_mask_BT):
        return torch.full((*tokens_BT.shape, 12), float("nan"), device=tokens_BT.device)

    with pytest.raises(ValueError, match="the model's logits are NaN"):
        generate(model, [[1]], SamplerConfig(4), mask_token_id=11, device="cuda")
