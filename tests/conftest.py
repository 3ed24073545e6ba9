"""Fixtures that tests of several rooms share.

Shape letters: B rows, T canvas positions, L positions of one pass, S cache slots, H = 1 head, E hidden size,
N scored positions, V vocabulary.
"""

import multiprocessing
import multiprocessing.forkserver
import os

import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import KVCache

# What is compared in fp32 is computed in fp32: cuBLAS may round to TF32, for some shapes and not for others, and
# Transformer Engine asks for that whatever torch is told. Read when cuBLAS is loaded.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")

# A test process has one server to fork from, so one list serves all tests.
PRELOADED = [
    "nemo_dllm.recipes",
    "nemo_dllm.cli.main",
    "nemo_dllm.collections.diffusion.inference",
    "nemo_dllm.connectors.hf_export",
]


@pytest.fixture(autouse=True)
def nemo_before_tests_that_import_it(request):
    """What NeMo and Megatron say on import is not the output of the test that happens to come first in its process."""
    if request.node.get_closest_marker("nemo"):
        import nemo.collections.llm  # noqa: F401


@pytest.fixture(scope="session", name="single_process")
def megatron_on_one_process():
    """A process group of one process over gloo with Megatron's parallel state, for building models without a trainer.

    On a machine without CUDA this switches the CPU runtime on, for the rest of the session.
    """
    from megatron.core import tensor_parallel

    from nemo_dllm.collections.diffusion.single_process import single_process

    with single_process():
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        yield


@pytest.fixture(scope="session")
def forks():
    """Processes forked from one that has imported NeMo, for runs that need torch.distributed to themselves.

    They see no CUDA device: what they show must hold bit for bit, and two ranks need no two devices. What still runs in
    the end is killed, or pytest would wait for it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUDA_VISIBLE_DEVICES", "")
        multiprocessing.forkserver.ensure_running()
    yield context
    for process in multiprocessing.active_children():
        process.kill()


class AttendingModel:
    """A model as samplers call it, over the canvas or with any cache, but for its layers.

    Those are ``_forward(tokens_BL, positions_BL, visible_BLS, store)``, where ``store(layer, keys, values)`` gives the
    keys and values to attend to. ``block_size`` is that of block-causal attention over the canvas, None without blocks.
    """

    def __call__(self, tokens_BT, *, key_mask_BT=None):
        keys_BT = torch.ones_like(tokens_BT, dtype=torch.bool) if key_mask_BT is None else key_mask_BT
        positions_BT = (keys_BT.cumsum(dim=1) - 1).clamp_min(0)
        blocks_BT = positions_BT // (self.block_size or tokens_BT.shape[1])
        visible_BTT = keys_BT[:, None] & (blocks_BT[:, None] <= blocks_BT[:, :, None])
        return self._forward(tokens_BT, positions_BT, visible_BTT, lambda layer, keys, values: (keys, values))

    def new_cache(self, rows, positions):
        return KVCache(rows, positions)

    def denoise(self, tokens_BL, positions_BL, cache, *, key_mask_BL):
        return self._cached(tokens_BL, positions_BL, cache, cache.window(positions_BL, key_mask_BL))

    def commit(self, tokens_BL, positions_BL, cache, *, key_mask_BL, blocks_BL):
        window = cache.window(positions_BL, key_mask_BL, blocks_BL)
        logits_BLV = self._cached(tokens_BL, positions_BL, cache, window)
        cache.hold(window)
        return logits_BLV[torch.arange(len(tokens_BL)), (key_mask_BL.sum(dim=1) - 1).clamp_min(0)]

    def score_and_keep(self, tokens_BL, positions_BL, cache, rows_N, columns_N, *, key_mask_BL, kept_BL):
        window = cache.window(positions_BL, key_mask_BL)
        logits_BLV = self._cached(tokens_BL, positions_BL, cache, window)
        cache.hold(window, kept_BL)
        return logits_BLV[rows_N, columns_N]

    def commit_and_score(self, tokens_BL, positions_BL, cache, rows_N, columns_N, *, key_mask_BL, blocks_BL, kept_BL):
        window = cache.window(positions_BL, key_mask_BL, blocks_BL)
        logits_BLV = self._cached(tokens_BL, positions_BL, cache, window)
        cache.hold(window, kept_BL)
        return logits_BLV[rows_N, columns_N]

    def _cached(self, tokens_BL, positions_BL, cache, window):
        return self._forward(tokens_BL, positions_BL, window.visible_BLS, lambda i, k, v: cache.write(i, window, k, v))


class TinyAttention(AttendingModel):
    """Two layers of attention with random weights and positions, over the canvas or with any cache.

    Args:
        vocabulary: tokens.
        block_size: of block-causal attention over the canvas; None is bidirectional.
        dtype, scale: of the logits; all else is float64, in which sums over hidden keys add exact zeros.

    ``passes`` keeps the shape of every pass.
    """

    def __init__(self, vocabulary, block_size=None, *, seed=3, dtype=torch.float64, scale=4.0):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.embeddings_VE, self.positions_TE = draw(vocabulary, 8), draw(128, 8)
        self.layers = draw(2, 3, 8, 8) / 3
        self.block_size, self.dtype, self.scale = block_size, dtype, scale
        self.passes = []

    def _forward(self, tokens_BL, positions_BL, visible_BLS, store):
        self.passes.append(tuple(tokens_BL.shape))
        hidden_BLE = self.embeddings_VE[tokens_BL] + self.positions_TE[positions_BL]
        for layer, (query, key, value) in enumerate(self.layers):
            keys_BSHE, values_BSHE = store(layer, (hidden_BLE @ key)[:, :, None], (hidden_BLE @ value)[:, :, None])
            scores_BLS = torch.einsum("ble,bse->bls", hidden_BLE @ query, keys_BSHE[:, :, 0])
            weights_BLS = scores_BLS.clamp(-30, 30).exp() * visible_BLS
            weights_BLS = weights_BLS / weights_BLS.sum(dim=-1, keepdim=True).clamp_min(1e-300)
            hidden_BLE = torch.tanh(hidden_BLE + weights_BLS @ values_BSHE[:, :, 0])
        return (self.scale * hidden_BLE @ self.embeddings_VE.T).to(self.dtype)


@pytest.fixture(scope="session")
def tiny_attention():
    """The class of a small model with caches, for tests, which cannot import this file."""
    return TinyAttention
