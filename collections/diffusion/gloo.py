"""Process groups over gloo with few threads, on a machine without CUDA."""

import functools
import os

import torch


@functools.cache
def use_few_threads_of_gloo() -> None:
    """Give each process group over gloo one thread for its collectives, and all of a process one for what they send.

    Of the two workers that torch gives a group, each notes the name of what it has done last, without a lock. A name of
    more than the 15 bytes that a string holds in itself, as of the coalesced gathers of Megatron-FSDP, may then be
    freed by both, and the process dies soon after.

    The thread of a device looks every 10 ms whether it should end. One for each of Megatron's twenty groups wakes an
    idle process 2,000 times a second.

    Groups that exist keep their threads, so this comes before a trainer makes its own. Where CUDA is, nothing changes.
    """
    if torch.cuda.is_available() or not torch.distributed.is_gloo_available():
        return
    gloo = torch.distributed.ProcessGroupGloo
    original = gloo.__init__

    def with_few_threads(group, store, rank, size, timeout=torch.distributed.constants.default_pg_timeout):
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
        options = gloo._Options()
        options._devices = [_device(os.getpid(), name) for name in (interfaces or "").split(",")]
        options._timeout, options._threads = timeout, 1
        original(group, store, rank, size, options)

    gloo.__init__ = with_few_threads


@functools.cache
def _device(process: int, interface: str):
    """A process's device on an interface, "" being that to which the host's name leads; a fork has no threads of it."""
    gloo = torch.distributed.ProcessGroupGloo
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()
