"""Passes of the same shapes, recorded as CUDA graphs and replayed, torch only.

The layers of one pass are hundreds of kernels. At few tokens a GPU runs them in less time than Python takes to launch
them; a graph is launched at once.
"""

import logging
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

LOGGER = logging.getLogger(__name__)
KEPT = 8
"""Graphs of one :class:`RecordedPasses`; each holds what its layers do between its input and its output."""


class _Graph:
    """One pass, recorded.

    Args:
        run: from tensors to a tensor, all work of which is on the device and depends on shapes alone. Tensors that it
            reads or writes beside its inputs stay where they are.
        inputs: of the first replay; copied.
        pool: memory that graphs share, which are never replayed at the same time.
    """

    def __init__(self, run: Callable[..., Tensor], inputs: tuple[Tensor, ...], pool: tuple[int, int]):
        self._inputs = [tensor.clone() for tensor in inputs]
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Not torch.cuda.graph, which collects garbage first, for longer than a pass. Other threads may go on.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._output = run(*self._inputs)
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The output for these inputs, in memory of its own."""
        for kept, given in zip(self._inputs, inputs, strict=True):
            kept.copy_(given)
        self._graph.replay()
        return self._output.clone()


class RecordedPasses:
    """Runs passes; records those whose shapes come again.

    The first pass of a shape runs as it is, and compiles what it needs; the second is recorded. Shapes that were not
    asked for longest are forgotten beyond ``KEPT``. What cannot be recorded runs as it is, and a warning says why.
    """

    def __init__(self):
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, _Graph | None] = {}
        self._unrecorded: set[Hashable] = set()

    def __call__(self, name: Hashable, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """``run(*inputs)``, for good: no later pass changes it.

        Args:
            name: what ``run`` does; runs of one name do the same with inputs of the same shapes.
            run: see :class:`_Graph`.
            inputs: on the current CUDA device.
        """
        if name in self._unrecorded:
            return run(*inputs)
        key = (name, *((tensor.shape, tensor.dtype) for tensor in inputs))
        known = key in self._graphs
        # The last one is the one asked for last.
        graph = self._graphs.pop(key, None)
        if known and graph is None:
            try:
                graph = _Graph(run, inputs, self._pool)
            except RuntimeError as error:
                LOGGER.warning(
                    "passes named %r are slower than they could be, they cannot be recorded: %s", name, error
                )
                self._unrecorded.add(name)
                return run(*inputs)
        self._graphs[key] = graph
        if len(self._graphs) > KEPT:
            del self._graphs[next(iter(self._graphs))]
        return run(*inputs) if graph is None else graph.replay(inputs)
