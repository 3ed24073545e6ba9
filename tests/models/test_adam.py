"""AdamW with one step count per parameter group, against torch's own and against the formulas."""

import copy

import pytest
import torch

from nemo_dllm.collections.diffusion.models.adam import GroupStepAdamW

SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-8}


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (4,), (2, 2))]


def groups_of(tensors):
    """Two groups with different weight decay and learning rate, as Megatron makes."""
    return [{"params": tensors[:1], "weight_decay": 0.1}, {"params": tensors[1:], "weight_decay": 0.0, "lr": 3e-3}]


def give_gradients(tensors, step, without=()):
    generator = torch.Generator().manual_seed(1000 + step)
    for index, tensor in enumerate(tensors):
        gradient = torch.randn(tensor.shape, generator=generator)
        tensor.grad = None if index in without else gradient


def train(optimizer, tensors, steps):
    for step in steps:
        give_gradients(tensors, step)
        optimizer.step()


@pytest.mark.parametrize(
    "ours, theirs",
    [({}, torch.optim.AdamW), ({"adam_w_mode": False}, torch.optim.Adam)],
    ids=["decoupled weight decay", "L2"],
)
def test_every_step_equals_torchs(ours, theirs):
    a, b = parameters(), parameters()
    first, second = GroupStepAdamW(groups_of(a), **SETTINGS, **ours), theirs(groups_of(b), **SETTINGS)
    for step in range(20):
        for optimizer, tensors in ((first, a), (second, b)):
            give_gradients(tensors, step)
            for group in optimizer.param_groups:
                group["lr"] *= 0.95  # as a schedule does
            optimizer.step()
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("change", [{"weight_decay": 0.0}, {"eps": 1e-2}, {"betas": (0.8, 0.99)}])
def test_another_setting_would_be_noticed(change):
    """The mutated twin."""
    a, b = parameters(), parameters()
    first, second = GroupStepAdamW(groups_of(a), **SETTINGS), torch.optim.AdamW(groups_of(b), **SETTINGS)
    second.param_groups[0].update(change)
    for optimizer, tensors in ((first, a), (second, b)):
        train(optimizer, tensors, range(20))
    assert (a[0] - b[0]).abs().max() > 1e-4


def test_the_first_step_by_hand():
    """Both moments are corrected to the gradient itself, so the step is lr * sign, after the decay by lr * decay."""
    tensor = torch.nn.Parameter(torch.tensor([2.0, -4.0]))
    optimizer = GroupStepAdamW([tensor], lr=0.1, weight_decay=0.5)
    tensor.grad = torch.tensor([0.3, -7.0])
    optimizer.step()
    torch.testing.assert_close(tensor.data, torch.tensor([2 * 0.95 - 0.1, -4 * 0.95 + 0.1]))


def test_a_parameter_without_gradient_stands_still_while_its_groups_count_goes_on():
    """Unlike torch's, whose count stands still too: afterwards the bias correction is that of the group's steps."""
    still, moving = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = GroupStepAdamW([still, moving], **SETTINGS)
    (b1, b2), lr, eps = SETTINGS["betas"], SETTINGS["lr"], SETTINGS["eps"]
    value, mean, square = 1.0, 0.0, 0.0
    for step in range(1, 9):
        gradient = 0.5 + 0.1 * step
        moving.grad = torch.full((1,), gradient)
        still.grad = torch.full((1,), gradient) if step % 3 == 0 else None
        optimizer.step()
        if step % 3 == 0:
            mean, square = b1 * mean + (1 - b1) * gradient, b2 * square + (1 - b2) * gradient**2
            value -= lr * mean / (1 - b1**step) / ((square / (1 - b2**step)) ** 0.5 + eps)
        torch.testing.assert_close(still.data, torch.tensor([value]), rtol=1e-6, atol=1e-7)
    assert optimizer.param_groups[0]["step"] == 8


def test_a_group_without_any_gradient_counts_and_keeps_still():
    """Other ranks hold its gradients where parameters are sharded, and all must agree on the count."""
    tensors = parameters()
    optimizer = GroupStepAdamW(groups_of(tensors), **SETTINGS)
    give_gradients(tensors, 0, without=(0,))
    optimizer.step()
    assert [group.get("step", 0) for group in optimizer.param_groups] == [1, 1]
    assert tensors[0] not in optimizer.state


def test_step_counts_stand_in_the_groups_only():
    tensors = parameters()
    optimizer = GroupStepAdamW(groups_of(tensors), **SETTINGS)
    train(optimizer, tensors, range(3))
    state = optimizer.state_dict()
    assert [group["step"] for group in state["param_groups"]] == [3, 3]
    assert [sorted(entry) for entry in state["state"].values()] == [["exp_avg", "exp_avg_sq"]] * 3


@pytest.mark.parametrize("reused", [False, True], ids=["a new optimizer", "one that trained on"])
def test_resuming_equals_the_straight_run(reused):
    straight, stopped = parameters(), parameters()
    train(GroupStepAdamW(groups_of(straight), **SETTINGS), straight, range(20))

    optimizer = GroupStepAdamW(groups_of(stopped), **SETTINGS)
    train(optimizer, stopped, range(8))
    saved = copy.deepcopy((optimizer.state_dict(), stopped))
    if reused:  # its cached counts are those of another step
        train(optimizer, stopped, range(100, 103))
        for tensor, value in zip(stopped, saved[1], strict=True):
            tensor.data.copy_(value)
    else:
        stopped = saved[1]
        optimizer = GroupStepAdamW(groups_of(stopped), **SETTINGS)
    optimizer.load_state_dict(saved[0])
    train(optimizer, stopped, range(8, 20))
    for x, y in zip(straight, stopped, strict=True):
        assert torch.equal(x, y)


def test_losing_the_count_would_be_noticed():
    """The mutated twin of resuming: bias correction starts anew."""
    straight, stopped = parameters(), parameters()
    train(GroupStepAdamW(groups_of(straight), **SETTINGS), straight, range(9))
    optimizer = GroupStepAdamW(groups_of(stopped), **SETTINGS)
    train(optimizer, stopped, range(8))
    for group in optimizer.param_groups:
        del group["step"]
    train(optimizer, stopped, range(8, 9))
    assert (straight[0] - stopped[0]).abs().max() > 1e-3


def test_the_closures_loss_comes_back():
    tensor = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = GroupStepAdamW([tensor], lr=0.1)

    def closure():
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = (tensor**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 9.0
    torch.testing.assert_close(tensor.data, torch.tensor([2.9]))
