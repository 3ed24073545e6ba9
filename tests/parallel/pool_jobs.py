"""What goes wrong in the processes of a pool, on purpose."""

import os
import signal
import threading
import time

import torch


def sleep(rank, ranks, store, sleeper):
    """One rank does not answer."""
    if rank == sleeper:
        sleep_deeply()


def sleep_deeply():
    time.sleep(600)


def wait_crosswise(rank, ranks, store):
    """Each rank waits for a message that the other would send later."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, ranks), rank=rank, world_size=ranks
    )
    other = 1 - rank
    torch.distributed.recv(torch.empty(1), other)
    torch.distributed.send(torch.ones(1), other)


def die(rank, ranks, store, victim, signal_name):
    """One rank ends by a signal while the others wait for it."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, ranks), rank=rank, world_size=ranks
    )
    if rank == victim:
        os.kill(os.getpid(), signal.Signals[signal_name])
        # Signals reach a process in their own time.
        time.sleep(60)
    torch.distributed.barrier()


def answer_and_die(rank, ranks, store, victim):
    """One rank ends when it has answered."""
    if rank == victim:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return rank


def fail(rank, ranks, store, victim):
    """One rank raises."""
    if rank == victim:
        raise ValueError(f"rank {rank} of {ranks}")
    time.sleep(600)
