"""Saving: the state of optimizers that have not stepped yet, and writers that work in this process, without others."""

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer


def fill_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Make the moments, zero, of an optimizer that has not stepped: none of a run in fp16 has fitted, or it is loading.

    The distributed optimizer's resharding format takes them for given, and sharded weights are loaded into them.
    """
    if isinstance(optimizer, ChainedOptimizer):
        for part in optimizer.chained_optimizers:
            fill_optimizer_state(part)
    elif optimizer.init_state_fn is not None:
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)


def keep_write_results_in_process() -> None:
    """Let a synchronous save write its files in threads, and pass its results through a plain queue of this process.

    Megatron forks a process for each file and spawns one for the queue, which only an asynchronous save needs. A forked
    one dies of the Ctrl-C that reaches all of a terminal, and the save waits for it for ever; one forked beside CUDA or
    other threads may hang on its own. Spawning imports the user's script once more: a script without a main guard hangs
    there, any other waits for the import, and a killed run leaves that process behind with its output still open.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
    FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write_in_threads)


def _write_in_threads(transforms: list, use_msc: bool, rank: int, buckets: Sequence, results: queue.Queue) -> None:
    """As Megatron's: write each bucket to its file, and put {number: results of its items} or an error on a queue."""
    written, under_way = queue.Queue(), queue.Queue()

    def write(numbered: tuple) -> None:
        number, bucket = numbered
        under_way.put(number)
        fields = {"use_msc": True} if use_msc else {}
        FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, written, under_way, True, **fields)

    with ThreadPoolExecutor(max_workers=len(buckets)) as pool:
        list(pool.map(write, enumerate(buckets)))
    outcomes = dict(written.get() for _ in buckets)
    errors = [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]
    results.put(errors[0] if errors else outcomes)
