"""What rank 0 finds out for all ranks, before they have a process group."""

import json
import os
from collections.abc import Callable
from datetime import timedelta

import lightning.pytorch as pl
import torch
from nemo.lightning import MegatronStrategy
from torch.distributed import PrefixStore, Store, TCPStore

# A store gives up after minutes by itself; one that rank 0 has left raises at once.
_PATIENCE = timedelta(days=1)
# Errors of set-up by the name that the other ranks get; all else is a RuntimeError there.
_ERRORS = {error.__name__: error for error in (ValueError, OSError, *OSError.__subclasses__())}


def told_by_rank_zero(trainer: pl.Trainer, find_out: Callable[[], str | None], about: str = "checkpoint") -> str | None:
    """What ``find_out`` returns on rank 0, on all ranks. Others neither call it nor go on before it has returned.

    Args:
        trainer: with a ``MegatronStrategy``, whose ``store`` carries the answer and the process group after it.
        find_out: reads what ranks could see differently, such as a folder of a shared file system, or does what one
            of them has to do for all, however long that takes.
        about: name of the question, another one for every call of a run.

    Raises:
        Exception: what ``find_out`` raises, on all ranks.
    """
    if trainer.world_size == 1:
        return find_out()
    first = trainer.global_rank == 0
    error = None
    answer = {}
    if first:
        try:
            answer = {"value": find_out()}
        except Exception as raised:
            error = raised
            answer = {"error": type(raised).__name__, "message": str(raised)}
    answer = _shared(trainer, answer, about)
    if error is not None:
        raise error
    if "error" in answer:
        raise _ERRORS.get(answer["error"], RuntimeError)(answer["message"])
    return answer["value"]


def _shared(trainer: pl.Trainer, answer: dict, about: str) -> dict:
    """Rank 0's answer, on all ranks."""
    # A group of another size is not the trainer's: a conversion or a sampler of this process has left it open.
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() == trainer.world_size:
        answers = [answer]
        torch.distributed.broadcast_object_list(answers, src=0)
        return answers[0]
    store = _store_of(trainer)
    if trainer.global_rank == 0:
        store.set(about, json.dumps(answer))
        return answer
    store.wait([about], _PATIENCE)
    return json.loads(store.get(about))


def _store_of(trainer: pl.Trainer) -> Store:
    """Of the process group to come, which the strategy then opens on it, in a part that the group does not use."""
    strategy: MegatronStrategy = trainer.strategy
    if strategy.store is None:
        environment = strategy.cluster_environment
        address, port = environment.main_address, environment.main_port
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        rank, world_size = trainer.global_rank, trainer.world_size
        if strategy.launcher is None:
            store = next(torch.distributed.rendezvous("env://", rank, world_size))[0]
        else:
            # Lightning starts this node's other processes later on; waiting for them would be for ever.
            store = TCPStore(address, port, world_size, rank == 0, wait_for_workers=False)
        strategy.store = PrefixStore("default_pg", store)
    return PrefixStore("told_by_rank_zero", strategy.store)
