"""Benchmarks as modules, whose imports of each other find their folder."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def import_benchmark(single_process):
    """Imports a file of ``benchmarks/`` that needs Megatron, by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        yield importlib.import_module
