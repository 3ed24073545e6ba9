"""The CPU runtime changes torch for a whole process, so most of these run in processes of their own."""

import subprocess
import sys

import pytest
import torch

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU runtime stays off where CUDA exists")


def run(code):
    """Output of a script in a fresh process, without the warnings of what it imports."""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_importing_changes_nothing_and_imports_no_megatron():
    code = """
import sys, torch
names = ("current_device", "synchronize", "Stream", "manual_seed")
before = [getattr(torch.cuda, name) for name in names], torch.zeros, torch.Tensor.to, torch.Tensor.type
from nemo_dllm.collections.diffusion import cpu
after = [getattr(torch.cuda, name) for name in names], torch.zeros, torch.Tensor.to, torch.Tensor.type
print(before == after, "megatron.core" in sys.modules)
"""
    assert run(code) == ["True", "False"]


@without_cuda
def test_enabling_twice_is_enabling_once_and_the_compiler_can_be_indexed_again():
    """Starting a process group makes torch index its functions anew; it refuses one object under two names."""
    code = """
import torch
from torch._dynamo import trace_rules
from nemo_dllm.collections.diffusion import cpu
def replaced():
    cuda, tensor = torch.cuda, torch.Tensor
    return torch.zeros, tensor.to, tensor.type, cuda.current_device, torch.distributed.all_to_all_single
before = replaced()
first = cpu.enable_cpu_runtime()
enabled = replaced()
second = cpu.enable_cpu_runtime()
print(first, second, enabled == replaced(), any(old is new for old, new in zip(before, enabled)))
trace_rules.clear_lru_cache()
print(len(trace_rules.get_torch_obj_rule_map()) > 100)
double = torch.compile(lambda x: torch.zeros_like(x) + 2 * x, backend="eager")
print(double(torch.ones(1)).item())
"""
    assert run(code) == ["True", "True", "True", "False", "True", "2.0"]


@without_cuda
@pytest.mark.usefixtures("single_process")
class TestEnabled:
    def test_cuda_means_cpu(self):
        device = torch.cuda.current_device()
        for tensor in (
            torch.zeros(2, device="cuda"),
            torch.tensor([1.0], device=device),
            torch.ones(2, device=torch.device("cuda", 0)),
            torch.ones(2).to("cuda:0"),
            torch.ones(2).to(device=device, dtype=torch.float64),
            torch.ones(2).cuda(non_blocking=True).pin_memory(),
            torch.empty(2, pin_memory=True),
        ):
            assert tensor.device.type == "cpu"
        assert next(torch.nn.Linear(2, 2).cuda().to("cuda").parameters()).device.type == "cpu"

    def test_to_still_converts(self):
        assert torch.ones(2).to(torch.float64).dtype == torch.float64
        assert torch.ones(2).to(torch.ones(1, dtype=torch.int32)).dtype == torch.int32
        assert torch.nn.Linear(2, 2).to(dtype=torch.bfloat16).weight.dtype == torch.bfloat16

    def test_type_names_are_those_of_cuda_and_conversions_stay(self):
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert torch.ones(1).type(torch.float64).dtype == torch.float64

    def test_streams_and_events_do_nothing(self):
        with torch.cuda.stream(torch.cuda.Stream()):
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream())
        assert event.elapsed_time(event) == 0.0
        torch.cuda.synchronize()

    def test_forked_regions_draw_from_the_seed_that_they_were_given(self):
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        tracker = CudaRNGStatesTracker()
        torch.manual_seed(1)
        expected_outside = torch.rand(2)
        torch.manual_seed(1)
        tracker.add("region", 7)
        with tracker.fork("region"):
            inside = torch.rand(2)
        assert torch.equal(torch.rand(2), expected_outside)
        torch.manual_seed(7)
        assert torch.equal(inside, torch.rand(2))
        with pytest.raises(Exception, match="rng state region already exists"):
            tracker.add("region", 8)

    def test_all_to_all_takes_sizes_as_tensors(self):
        received = torch.empty(3)
        sizes = torch.tensor([3])
        torch.distributed.all_to_all_single(received, torch.arange(3.0), sizes, sizes)
        assert received.tolist() == [0, 1, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_changes_where_cuda_exists():
    from nemo_dllm.collections.diffusion import cpu, gloo

    def replaceable():
        return torch.zeros, torch.cuda.current_device, torch.Tensor.to, torch.distributed.ProcessGroupGloo.__init__

    before = replaceable()
    gloo.use_few_threads_of_gloo()
    assert not cpu.enable_cpu_runtime()
    assert replaceable() == before
