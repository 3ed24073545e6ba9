"""Threads of process groups: each script runs in a process of its own, as the change is one to torch."""

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing changes where CUDA exists")


def run(code, *arguments):
    """Words that a script prints."""
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize("interfaces, devices", [("", 1), ("lo", 1), ("lo,lo", 2)])
def test_groups_get_one_worker_and_keep_their_settings(interfaces, devices, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    code = """
import datetime, torch
from nemo_dllm.collections.diffusion.gloo import use_few_threads_of_gloo
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
def made():
    group = torch.distributed.new_group([0], timeout=datetime.timedelta(seconds=7))
    torch.distributed.barrier(group)
    options = group._get_backend(torch.device("cpu")).options
    return options._threads, len(options._devices), options._timeout.seconds
print(*made())
use_few_threads_of_gloo()
print(*made())
"""
    assert run(code) == [str(2 * devices), str(devices), "7", "1", str(devices), "7"]


def test_megatrons_groups_have_one_device():
    code = """
from pathlib import Path
from nemo_dllm.collections.diffusion.single_process import single_process
with single_process():
    print(*(file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")))
"""
    threads = run(code)
    assert threads.count("pt_gloo_runloop") >= 10
    assert threads.count("gloo_tcp_loop") == 1


def test_a_fork_makes_its_own_device(tmp_path):
    code = """
import datetime, os, sys, torch
from nemo_dllm.collections.diffusion.gloo import use_few_threads_of_gloo
use_few_threads_of_gloo()
Group = torch.distributed.ProcessGroupGloo
alone = Group(torch.distributed.HashStore(), 0, 1)
ranks = []
for rank in range(2):
    ranks.append(os.fork())
    if not ranks[-1]:
        total = torch.tensor(rank + 1)
        store = torch.distributed.FileStore(sys.argv[1], 2)
        Group(store, rank, 2, datetime.timedelta(seconds=60)).allreduce([total]).wait()
        os._exit(total.item())
print(*(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks))
"""
    assert run(code, tmp_path / "store") == ["3", "3"]
