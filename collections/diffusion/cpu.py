"""Megatron on a machine without CUDA: the same training code over gloo, for tests, laptops and CI.

Megatron and NeMo name CUDA directly (``torch.cuda.current_device()``, ``device="cuda"``, ``.cuda()``, pinned
memory, tensor type strings). :func:`enable_cpu_runtime` gives these names a CPU meaning. It does nothing where a
CUDA device exists, nothing on import, and calling it twice is the same as calling it once.
"""

import contextlib
import functools
import types

import torch

from nemo_dllm.collections.diffusion.gloo import use_few_threads_of_gloo

_CPU = torch.device("cpu")

_FACTORIES = (
    *("arange", "as_tensor", "tensor", "linspace", "eye", "randint", "randperm"),
    *("empty", "full", "ones", "rand", "randn", "zeros"),
    *("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
)

_enabled = False


class _NullStream:
    """Stands for a CUDA stream or event: work on the CPU is done when the call returns."""

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False

    def elapsed_time(self, other) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def record(self, *args) -> None:
        pass

    def record_event(self, *args) -> "_NullStream":
        return self

    def synchronize(self) -> None:
        pass

    def wait(self, *args) -> None:
        pass

    def wait_event(self, *args) -> None:
        pass

    def wait_stream(self, *args) -> None:
        pass


def enable_cpu_runtime() -> bool:
    """Make Megatron run on the CPU of this process.

    Returns:
        True where the CPU runtime is active, False where a CUDA device exists and nothing was changed.
    """
    global _enabled
    if torch.cuda.is_available():
        return False
    if not _enabled:
        # torch remembers which functions make tensors at its first `with torch.device(...)`: before they are wrapped.
        torch.utils._device._device_constructors()
        use_few_threads_of_gloo()
        _replace_cuda_module_functions()
        _read_cuda_device_arguments_as_cpu()
        _rename_tensor_types()
        _adapt_megatron()
        _enabled = True
    return True


def prepare_model_build(config) -> None:
    """Prepare a Megatron config and the random state for building a model on the CPU.

    Fusions that are CUDA kernels or compile on first use are switched off. Weights are drawn whole and then sliced,
    so that they do not depend on the tensor-parallel size. NeMo seeds Megatron's generators only where a CUDA device
    exists; dropout would find none.
    """
    from megatron.core import tensor_parallel

    for field in (
        "apply_rope_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "gradient_accumulation_fusion",
        "masked_softmax_fusion",
        "moe_permute_fusion",
        "cross_entropy_loss_fusion",
    ):
        setattr(config, field, False)
    config.use_cpu_initialization = True
    # gloo still sends an output when the interleaved schedule frees it; a CUDA stream would keep the order.
    config.deallocate_pipeline_outputs = False
    _adapt_nemo()
    if not tensor_parallel.get_cuda_rng_tracker().is_initialized():
        tensor_parallel.model_parallel_cuda_manual_seed(torch.initial_seed() % 2**31)


def prepare_fully_sharded() -> None:
    """Let Megatron-FSDP find its process groups and make its buffers on the CPU.

    It spells its device out as f"cuda:{current device}", and asks for a mesh of CUDA devices.
    """
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp

    def from_group(groups, device_type, **named):
        return torch.distributed.DeviceMesh.from_group(groups, "cpu", **named)

    mcore_fsdp_adapter.DeviceMesh = types.SimpleNamespace(from_group=from_group)
    mcore_fsdp_adapter.torch = megatron_fsdp.torch = _TorchOnCpu("torch")


class _TorchOnCpu(types.ModuleType):
    """torch, where every device is the CPU."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def device(*args) -> torch.device:
        return _CPU


def _replace_cuda_module_functions() -> None:
    # A new function for each name: torch's compiler keys its rules by object and refuses one object under two rules.
    def returning(make_value):
        return lambda *args, **kwargs: make_value()

    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed"):
        setattr(torch.cuda, name, returning(lambda: None))
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, _NullStream)
    for name in ("current_stream", "default_stream", "stream"):
        setattr(torch.cuda, name, returning(_NullStream))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(torch.cuda, name, returning(lambda: 0))
    torch.cuda.current_device = returning(lambda: _CPU)
    torch.cuda.get_rng_state = returning(torch.get_rng_state)
    torch.cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.cuda.nvtx.range_push = returning(lambda: None)
    torch.cuda.nvtx.range_pop = returning(lambda: None)


def _cpu_device(device):
    if isinstance(device, str) and device.startswith("cuda"):
        return _CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return _CPU
    return device


def _read_cuda_device_arguments_as_cpu() -> None:
    def factory_on_cpu(function):
        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            if "device" in kwargs:
                kwargs["device"] = _cpu_device(kwargs["device"])
            kwargs.pop("pin_memory", None)
            return function(*args, **kwargs)

        return wrapped

    for name in _FACTORIES:
        setattr(torch, name, factory_on_cpu(getattr(torch, name)))

    original_to, original_module_to = torch.Tensor.to, torch.nn.Module.to

    def arguments_on_cpu(args, kwargs):
        return tuple(map(_cpu_device, args)), {key: _cpu_device(value) for key, value in kwargs.items()}

    def tensor_to(self, *args, **kwargs):
        args, kwargs = arguments_on_cpu(args, kwargs)
        return original_to(self, *args, **kwargs)

    def module_to(self, *args, **kwargs):
        args, kwargs = arguments_on_cpu(args, kwargs)
        return original_module_to(self, *args, **kwargs)

    torch.Tensor.to = tensor_to
    torch.nn.Module.to = module_to
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


def _rename_tensor_types() -> None:
    """Gradient clipping and the distributed optimizer compare type strings with ``torch.cuda.FloatTensor``."""
    original_type = torch.Tensor.type

    def tensor_type(self, *args, **kwargs):
        result = original_type(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            result = result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.type = tensor_type


def _adapt_megatron() -> None:
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils

    # The tracker's states are those of the CPU generator, so that forked regions (initialisation, dropout)
    # draw from the seed that Megatron gave them.
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    megatron_random.CudaRNGStatesTracker.add = _add_cpu_state
    # Present whenever Transformer Engine imports, but a CUDA kernel.
    moe_utils.te_general_gemm = None
    _all_to_all_with_integer_splits()


def _adapt_nemo() -> None:
    """Where a model is built NeMo is imported; enabling the runtime alone should not wait for that."""
    from nemo.lightning.io import pl

    # Moves a loaded checkpoint from one CUDA device to another, and asserts that there is one.
    pl._fix_tensors_device = lambda checkpoint: checkpoint


def _add_cpu_state(self, name: str, seed: int) -> None:
    if seed in self.seeds_:
        raise Exception(f"seed {seed} already exists")
    if name in self.states_:
        raise Exception(f"rng state {name} already exists")
    self._is_initialized = True
    self.seeds_.add(seed)
    with _kept_rng_state():
        torch.manual_seed(seed)
        self.states_[name] = torch.get_rng_state()


@contextlib.contextmanager
def _kept_rng_state():
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _all_to_all_with_integer_splits() -> None:
    """Megatron hands the split sizes over as tensors, which gloo refuses."""
    original = torch.distributed.all_to_all_single

    def integers(splits):
        return splits.tolist() if isinstance(splits, torch.Tensor) else splits

    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, **kwargs):
        return original(
            output,
            input,
            output_split_sizes=integers(output_split_sizes),
            input_split_sizes=integers(input_split_sizes),
            **kwargs,
        )

    torch.distributed.all_to_all_single = all_to_all_single
