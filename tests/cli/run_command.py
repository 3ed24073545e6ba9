"""A command in a process of its own, as ``job`` says: ``program`` and ``arguments``, and files for what it prints."""

import os
import sys
from importlib import import_module

for descriptor, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT), descriptor)  # noqa: F821
sys.argv = [job["program"], *job["arguments"]]  # noqa: F821
mains = {"nemo-dllm": ("nemo_dllm.cli.main", "main"), "nemo": ("nemo_run.__main__", "app")}
module, function = mains[job["program"]]  # noqa: F821
getattr(import_module(module), function)()
