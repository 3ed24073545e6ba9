import dataclasses
import math

import pytest
import torch

from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion, get_schedule

MASK = 7
SCHEDULES = ["linear", "cosine", "polynomial", "geometric"]


def test_shapes_and_types(objective, text):
    tokens_BL, mask_BL = text(4, 6)
    corruption = objective().corrupt(tokens_BL, mask_BL.float(), torch.arange(4))
    types = {name: (tuple(value.shape), value.dtype) for name, value in corruption._asdict().items()}
    assert types == {
        "tokens": ((4, 6), torch.int64),
        "masked": ((4, 6), torch.bool),
        "time": ((4, 6), torch.float32),
        "loss_weight": ((4, 6), torch.float32),
        "nll_weight": ((4, 6), torch.float32),
        "count": ((), torch.int64),
        "maskable": ((4, 6), torch.bool),
        "position": ((1, 6), torch.int64),
    }
    loss = objective().reduce(torch.ones(4, 6, dtype=torch.bfloat16), corruption)
    assert (loss.sum.dtype, loss.count.dtype) == (torch.float32, torch.int64)


def test_inputs_are_left_alone(objective, text):
    tokens_BL, mask_BL = text(4, 6)
    before = tokens_BL.clone(), mask_BL.clone()
    it = objective(right_shift=True, force_mask=True)
    settings = dataclasses.asdict(it)
    it.corrupt(tokens_BL, mask_BL, torch.arange(4))
    assert torch.equal(tokens_BL, before[0])
    assert torch.equal(mask_BL, before[1])
    assert dataclasses.asdict(it) == settings


@pytest.mark.parametrize("force_mask", [False, True])
@pytest.mark.parametrize("right_shift", [False, True])
def test_prompt_and_padding_are_never_masked(objective, text, right_shift, force_mask):
    draws, length = 1000, 14
    tokens_BL = text(1, length)[0].expand(draws, -1)
    mask_BL = torch.zeros(draws, length, dtype=torch.bool)
    mask_BL[:, 5:11] = True  # prompt 0..4, answer 5..10, pads 11..13
    it = objective(right_shift=right_shift, force_mask=force_mask)
    corruption = it.corrupt(tokens_BL, mask_BL, torch.arange(draws))
    outside_BL = ~mask_BL
    assert not corruption.masked[outside_BL].any()
    assert torch.equal(corruption.tokens[outside_BL], tokens_BL[outside_BL])
    assert not corruption.loss_weight[outside_BL].any()
    assert not corruption.nll_weight[outside_BL].any()
    assert torch.equal(corruption.maskable, mask_BL)
    assert corruption.count == 6 * draws
    assert corruption.masked[:, 5:11].any(dim=0).all()  # the first and the last token of the answer are trained


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_share_of_masked_tokens_is_the_mask_rate(objective, text, schedule):
    length = 20_000
    tokens_BL, mask_BL = text(4, length)
    time_B = torch.tensor([0.05, 0.4, 0.7, 0.99])
    corruption = objective(schedule=schedule).corrupt(tokens_BL, mask_BL, torch.arange(4), time=time_B)
    rate_B = get_schedule(schedule).mask_rate(time_B)
    deviation_B = (rate_B * (1 - rate_B) / length).sqrt()
    assert ((corruption.masked.float().mean(dim=1) - rate_B).abs() <= 5 * deviation_B + 1 / length).all()
    assert torch.equal(corruption.tokens == MASK, corruption.masked)


def test_the_draw_decides_not_the_token(objective, text):
    tokens_BL, mask_BL = text(1, 6)
    tokens_BL[0, [1, 4]] = MASK  # clean text that holds the mask id, in the prompt and in the answer
    mask_BL[0, :3] = False
    it = objective()
    corruption = it.corrupt(
        tokens_BL,
        mask_BL,
        torch.tensor([0]),
        time=torch.tensor([0.5]),
        uniforms_BL=torch.tensor([[0.0, 0.0, 0.0, 0.1, 0.9, 0.9]]),
    )
    assert corruption.masked.tolist() == [[False, False, False, True, False, False]]
    assert corruption.tokens.tolist() == [[100, MASK, 102, MASK, MASK, 105]]
    assert it.reduce(torch.ones(1, 6), corruption) == (2.0, 3)


def test_full_masking_trains_exactly_the_answer_in_both_shift_modes(objective, text):
    tokens_BL, mask_BL = text(1, 5)
    mask_BL[0, :2] = False
    for right_shift in (False, True):
        it = objective(right_shift=right_shift)
        corruption = it.corrupt(tokens_BL, mask_BL, torch.tensor([0]), time=torch.ones(1))
        assert corruption.masked.tolist() == [[False, False, True, True, True]]


def test_position_zero_has_no_left_neighbour(objective, text):
    tokens_BL, mask_BL = text(4, 6)
    corruption = objective(right_shift=True).corrupt(tokens_BL, mask_BL, torch.arange(4), time=torch.ones(4))
    assert torch.equal(corruption.masked, corruption.maskable)
    assert corruption.maskable.tolist() == 4 * [[False] + 5 * [True]]
    assert corruption.count == 20


def test_force_mask_takes_the_smallest_uniform_of_rows_without_a_mask(objective, text):
    tokens_BL, mask_BL = text(4, 4)
    mask_BL[1, 0], mask_BL[2] = False, False
    uniforms_BL = torch.tensor([[0.9, 0.3, 0.5, 0.7], [0.2, 0.9, 0.6, 0.7], [0.9] * 4, [0.05, 0.01, 0.5, 0.5]])
    noise = {"time": torch.full((4,), 0.1), "uniforms_BL": uniforms_BL}
    forced = objective(force_mask=True).corrupt(tokens_BL, mask_BL, torch.arange(4), **noise)
    free = objective().corrupt(tokens_BL, mask_BL, torch.arange(4), **noise)
    assert forced.masked.int().tolist() == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]]
    assert free.masked.int().tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]]
    assert forced.loss_weight[0, 1].item() == pytest.approx(10.0)


def test_settings_survive_a_round_trip_as_plain_values(objective):
    it = objective(schedule="cosine", loss_norm="sequence", right_shift=True)
    values = dataclasses.asdict(it)
    assert all(isinstance(value, int | float | str | None) for value in values.values())
    assert MaskedDiffusion(**values) == it
    assert (it.shift, objective().shift) == (1, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "quadratic"}, "schedule='quadratic' is unknown; known: cosine, geometric, linear, polynomial"),
        ({"time_sampling": "sobol"}, "time_sampling='sobol' is unknown; known: antithetic, iid, per_sequence"),
        ({"loss_weight": "snr"}, "loss_weight='snr' is unknown; known: scheduler, uniform"),
        ({"loss_norm": "mean"}, "loss_norm='mean' is unknown; known: batch, sequence, token"),
        ({"time_epsilon": 0.0}, r"time_epsilon=0.0 must be in \(0, 1\); 1e-3 is usual"),
        ({"time_epsilon": 1.0}, r"time_epsilon=1.0 must be in \(0, 1\)"),
        ({"weight_epsilon": -1e-6}, "weight_epsilon=-1e-06 must not be negative; 0 is the exact weight"),
        ({"group_size": 0}, "group_size=0 must be at least 1; it is the global batch size in samples"),
        ({"seed": -1}, r"seed=-1 is outside \[0, 2\*\*64\)"),
        ({"mask_token_id": -1}, "mask_token_id=-1 is no token id; set the id of the mask token"),
        ({"weight_epsilon": math.inf}, "weight_epsilon=inf must not be negative; .* infinity is none"),
        ({"time_epsilon": "0.1"}, "time_epsilon='0.1' must be a number"),
        ({"mask_token_id": "5"}, "mask_token_id='5' must be a whole number or None"),
        ({"mask_token_id": True}, "mask_token_id=True must be a whole number or None"),
        ({"group_size": 2.5}, "group_size=2.5 must be a whole number or None"),
        ({"seed": None}, "seed=None must be a whole number"),
        ({"right_shift": "yes"}, "right_shift='yes' must be True or False"),
        ({"complementary": 1}, "complementary=1 must be True or False"),
        ({"time_range": 0.5}, "time_range=0.5 must be a tuple of numbers"),
        ({"time_range": (0.1, 0.5, 0.9)}, r"time_range=\(0.1, 0.5, 0.9\) must be \(low, high\)"),
        ({"time_range": ("0.1", "0.9")}, "must be a tuple of numbers"),
        ({"loss_norm": ["token"]}, r"loss_norm=\['token'\] is unknown; known: batch, sequence, token"),
        (
            {"complementary": True, "time_range": (0.9995, 1.0)},
            r"time_range=\(0.9995, 1.0\) leaves no times for complementary=True, which end at .* = 0.999; choose",
        ),
    ],
)
def test_errors_of_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        MaskedDiffusion(**({"mask_token_id": MASK} | settings))


def test_force_mask_treats_packed_documents_as_if_alone(objective, text):
    tokens_BL, mask_BL = text(2, 12)
    document_BL = torch.tensor([[0] * 3 + [1] * 8 + [2], [4] * 12])
    mask_BL[0, 11] = False
    late = {"time": torch.full((2,), 1e-3), "uniforms_BL": torch.rand(2, 12) * 0.9 + 0.05}
    it = objective(force_mask=True)
    packed = it.corrupt(tokens_BL, mask_BL, torch.arange(2), document_BL=document_BL, **late)
    assert [row.tolist().count(True) for row in packed.masked] == [2, 1]
    for row, part in ((0, slice(0, 3)), (0, slice(3, 11)), (1, slice(0, 12))):
        noise = {"time": torch.tensor([1e-3]), "uniforms_BL": late["uniforms_BL"][row : row + 1, part]}
        alone = it.corrupt(tokens_BL[row : row + 1, part], mask_BL[row : row + 1, part], torch.arange(1), **noise)
        assert torch.equal(packed.masked[row, part], alone.masked[0])


def test_errors_of_use(objective, text):
    tokens_BL, mask_BL = text(2, 4)
    with pytest.raises(ValueError, match="needs group_size .* which is None; set group_size, or an iid time_sampling"):
        objective(group_size=None).corrupt(tokens_BL, mask_BL, torch.arange(2))
    with pytest.raises(ValueError, match="mask_token_id is None; set it to the id of the tokenizer's mask token"):
        MaskedDiffusion(group_size=2).corrupt(tokens_BL, mask_BL, torch.arange(2))
    with pytest.raises(ValueError, match=r"(?s)t=.* is outside \[0, 1\]"):
        objective().corrupt(tokens_BL, mask_BL, torch.arange(2), time=torch.tensor([0.5, 1.5]))
    late = MaskedDiffusion(mask_token_id=MASK)
    late.group_size = 2  # as a trainer does
    assert late.corrupt(tokens_BL, mask_BL, torch.arange(2)).time.shape == (2, 4)
