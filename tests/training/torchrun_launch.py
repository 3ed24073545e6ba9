"""What the torchrun command does, but for starting Python anew: an agent, its store and a process for each rank.

Globals: ``ranks``, the number of processes; ``logs``, a folder; ``arguments``, of ``runpy.run_path`` in each.
"""

import runpy

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run(*arguments):
    """As run_path, without its result, which could not travel back."""
    runpy.run_path(*arguments)


if __name__ == "__main__":
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,  # noqa: F821
        logs_specs=DefaultLogsSpecs(log_dir=logs),  # noqa: F821
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(launch, run)(*arguments)  # noqa: F821
