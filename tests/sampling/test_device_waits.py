"""How often a step waits for the device. Shape letters: B rows, T canvas positions, L positions of one pass."""

import warnings

import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import KVCache, ReferenceQuirks, SamplerConfig, generate_stream

MASK = 31
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
READS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__contains__,
    torch.Tensor.nonzero,
    torch.nonzero,
    torch.argwhere,
    torch.masked_select,
    torch.Tensor.masked_select,
    torch.unique,
    torch.Tensor.unique,
    torch.equal,
    torch.allclose,
    torch.bincount,
    torch.repeat_interleave,
}


class OnDevice(torch.Tensor):
    """A tensor that stands for one on a GPU: what is made of it is one too, until it is brought to the CPU."""

    reads = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        moved = function is torch.Tensor.to and "cpu" in map(str, [*args[1:], *(kwargs or {}).values()])
        indexed = function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and _makes_wait(args[1])
        if function in READS or moved or indexed:
            OnDevice.reads += 1
            return result.as_subclass(torch.Tensor) if isinstance(result, torch.Tensor) else result
        return result


def _makes_wait(index):
    """Indices that the CPU has to look into, or to bring to the device first."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(p, list) or (isinstance(p, torch.Tensor) and p.dtype == torch.bool) for p in parts)


class Model:
    """Bidirectional or cached, as the sampler asks; its logits are on the device. ``passes`` counts its calls."""

    passes = 0

    def __init__(self, device="cpu"):
        generator = torch.Generator().manual_seed(0)
        self.embedding_VE = torch.randn(MASK + 1, 16, generator=generator).to(device)
        self.wrap = (lambda x: x.as_subclass(OnDevice)) if device == "cpu" else (lambda x: x)

    def __call__(self, tokens_BT, *, key_mask_BT):
        return self._logits(tokens_BT)

    def new_cache(self, rows, positions):
        return KVCache(rows, positions)

    def denoise(self, tokens_BL, positions_BL, cache, *, key_mask_BL):
        return self._logits(tokens_BL)

    def commit(self, tokens_BL, positions_BL, cache, *, key_mask_BL, blocks_BL):
        return self._logits(tokens_BL)[:, -1]

    def score_and_keep(self, tokens_BL, positions_BL, cache, rows_N, columns_N, *, key_mask_BL, kept_BL):
        return self._logits(tokens_BL)[rows_N, columns_N]

    def _logits(self, tokens_BL):
        self.passes += 1
        # Neighbours make each position its own.
        hidden_BLE = self.embedding_VE[tokens_BL].cumsum(dim=1).sin()
        return self.wrap(hidden_BLE @ self.embedding_VE.T)


SETTINGS = [
    {},
    {"threshold": 0.2, "block_size": 4},
    {"factor": 0.5, "block_size": 4},
    {"steps": 3, "schedule": "cosine"},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 1},
    {"temperature": 0.7, "tempered_confidence": True, "seed": 1},
    {"remasking": "entropy", "remasking_temperature": 0.5, "seed": 1},
    {"remasking": "margin"},
    {"remasking": "random", "seed": 1},
    {"eos_token_id": 2, "min_new_tokens": 3, "eos_penalty": 0.5},
    {"stop_token_ids": (2, 3), "suppress_token_ids": (5, 6), "begin_suppress_token_ids": (7, 8)},
    {"stop_strings": ("ab",), "eos_token_id": 2},
    {"right_shift": True},
    {"cfg_scale": 1.0, "cfg_keep_token_ids": (1,)},
    {"editing_threshold": 0.1, "max_post_steps": 2, "block_size": 4},
    {"cache": "exact", "block_size": 4, "right_shift": True},
    {"cache": "exact", "block_size": 4, "cfg_scale": 1.0},
    {"cache": "approximate_prefix", "block_size": 4},
    {"cache": "approximate_dual", "block_size": 4, "right_shift": True},
    {"cache": "approximate_delayed", "refresh_interval": 3},
]


def decode(ids):
    return "".join(chr(97 + i % 26) for i in ids)


@pytest.mark.parametrize("fields", SETTINGS)
def test_a_step_reads_from_the_device_once(fields):
    steps = generate_stream(Model(), PROMPTS, SamplerConfig(9, **fields), mask_token_id=MASK, decode=decode)
    OnDevice.reads, seen = 0, []
    for step in steps:
        assert type(step.tokens_BT) is torch.Tensor
        seen.append(OnDevice.reads)
        OnDevice.reads = 0
    assert seen and set(seen) == {1}


class Apart(Model):
    """Works apart from the CPU, and tells when it is nearly done."""

    waited_for = 0

    def nearly_done(self):
        self.waited_for += 1


@pytest.mark.parametrize("fields", SETTINGS)
def test_a_rehearsal_has_no_effect(fields, monkeypatch):
    monkeypatch.setattr("nemo_dllm.collections.diffusion.sampling.run.works_apart", lambda device: True)
    apart, other, config = Apart(), Model(), SamplerConfig(9, **fields)
    rehearsed, plain = (
        list(generate_stream(model, PROMPTS, config, mask_token_id=MASK, decode=decode)) for model in (apart, other)
    )
    assert apart.waited_for == len(rehearsed) == len(plain) and apart.passes == other.passes
    for one, other in zip(rehearsed, plain, strict=True):
        for name, value in vars(one).items():
            assert torch.equal(value, vars(other)[name]) if torch.is_tensor(value) else value == vars(other)[name]


@pytest.mark.parametrize("apart, waited_for", [(True, 64), (False, 0)])
def test_only_short_steps_of_a_device_that_works_apart_are_rehearsed(apart, waited_for, monkeypatch):
    monkeypatch.setattr("nemo_dllm.collections.diffusion.sampling.run.works_apart", lambda device: apart)
    model = Apart()
    assert len(list(generate_stream(model, [[1]], SamplerConfig(66), mask_token_id=MASK))) == 66
    assert model.waited_for == waited_for


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: bool(x[0, 0] > 0),
        lambda x: x[x > 0],
        lambda x: int(x.argmax()),
        lambda x: x[:, [0, 1]],
        lambda x: x.to("cpu"),
        lambda x: (x + 1).nonzero(),
    ],
)
def test_the_count_counts(read):
    OnDevice.reads = 0
    read(torch.eye(3).as_subclass(OnDevice))
    assert OnDevice.reads == 1


@pytest.mark.gpu
@pytest.mark.parametrize("fields", SETTINGS)
def test_nothing_that_a_step_does_makes_it_wait_for_the_gpu(fields):
    """What CUDA itself counts; tensors that come from the CPU are copied without waiting."""
    steps = generate_stream(
        Model("cuda"), PROMPTS, SamplerConfig(9, **fields), mask_token_id=MASK, decode=decode, device="cuda"
    )
    next(steps)  # Tables of tokens go to the device once.
    waits = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        while True:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if next(steps, None) is None:
                    break
            waits.append(sum("synchronizing CUDA operation" in str(warning.message) for warning in caught))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # For what it does wait for there is an event.
    assert waits and not any(waits)


@pytest.mark.gpu
def test_noise_of_the_reference_is_drawn_on_the_gpu():
    config = SamplerConfig(5, temperature=1.0, remasking="random", steps=5, quirks=ReferenceQuirks(global_noise=True))
    steps = list(generate_stream(Model("cuda"), PROMPTS, config, mask_token_id=MASK, device="cuda"))
    assert len(steps) == 5 and not steps[-1].holes_BT.any()
