"""How Megatron's checkpoint writers hand their results over."""

import queue

from megatron.core.dist_checkpointing.strategies import filesystem_async


def keep_write_results_in_process() -> None:
    """Let a synchronous save pass its results through a plain queue of this process.

    Megatron spawns a process for that queue, which only an asynchronous save needs. Spawning imports the user's script
    once more: a script without a main guard hangs there, any other waits for the import, and a killed run leaves that
    process behind with its output still open.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
