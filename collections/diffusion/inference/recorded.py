"""Passes of the same shapes, recorded as CUDA graphs and replayed, torch only.

The layers of one pass are hundreds of kernels. At few tokens a GPU runs them in less time than Python takes to launch
them; a graph is launched at once.
"""

import gc
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

LOGGER = logging.getLogger(__name__)
KEPT = 8
"""Graphs of one :class:`RecordedPasses`, at most; each holds its output, and all share what they need on the way."""

COUNTED = 4_096
"""Shapes of passes that a :class:`Recorder` counts, at most: the latest."""

Run = Callable[..., Tensor]
"""From tensors to a tensor, all on one GPU."""


class Recorder:
    """Records passes of one model, and counts them; a failure ends that for good, for a device may not get over it.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device):
        self.works = True
        # The last one is the one that came last.
        self.seen: dict[Hashable, int] = {}
        self._device = device
        # Memory is shared by graphs that were recorded on one stream, and are never replayed at the same time.
        with torch.cuda.device(device):
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self._first: Graph | None = None

    def record(self, run: Run, inputs: tuple[Tensor, ...]) -> "Graph | None":
        """The pass as a graph; None where it cannot be recorded, of which a warning says why."""
        try:
            with torch.cuda.device(self._device):
                # What is recorded in inference mode may be replayed outside of it.
                with torch.inference_mode(False):
                    kept = [tensor.clone() for tensor in inputs]
                if self._first is None:
                    # A pool is dead for good when the last of its graphs is forgotten.
                    self._first = self._capture(torch.clone, [inputs[0].new_zeros(1)])
                return self._capture(run, kept)
        except torch.OutOfMemoryError:
            return None
        except RuntimeError as error:
            self.works = False
            cause = error.__context__ or error
            LOGGER.warning("generation is slower than it could be, its passes cannot be recorded: %s", cause)
            return None

    def _capture(self, run: Run, inputs: list[Tensor]) -> "Graph":
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self._device.index]
        before = generator.clone_state()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), _uncollected():
            try:
                # Not torch.cuda.graph, which collects garbage first, for longer than a pass. Other threads may go on.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                output = run(*inputs)
                graph.capture_end()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                # A capture that was invalidated does not get so far: without this all memory comes from the pool,
                # and no noise from the generator.
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                generator.graphsafe_set_state(before)
                raise
        torch.cuda.current_stream().wait_stream(self._stream)
        return Graph(graph, inputs, output)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without a collection of garbage: with a graph in it, that would be the end of a recording."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Graph:
    """One recorded pass.

    Args:
        graph: what was recorded.
        inputs: where it reads.
        output: where it writes.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, inputs: list[Tensor], output: Tensor):
        self._graph, self._inputs, self._output = graph, inputs, output
        self._given: list[tuple[Tensor, int] | None] = [None] * len(inputs)

    def replay(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The output for these inputs, in memory of its own."""
        for place, (kept, given) in enumerate(zip(self._inputs, inputs, strict=True)):
            # Much of what passes get is the same from one to the next. Tensors of inference mode have no version.
            version = None if given.is_inference() else (given, given._version)
            if version is None or not _is_same(version, self._given[place]):
                kept.copy_(given)
                self._given[place] = version
        self._graph.replay()
        return self._output.clone()


def _is_same(one: tuple[Tensor, int], other: tuple[Tensor, int] | None) -> bool:
    """Whether a tensor is another one, and was not written to in between."""
    return other is not None and one[0] is other[0] and one[1] == other[1]


class RecordedPasses:
    """Runs passes over the same memory, by one thread at a time; records those whose shapes come again and again.

    The first pass of a shape runs as it is. The second runs as it is going to be recorded, which compiles what that
    needs; the third is recorded. The model's passes are counted, over whatever memory: what has been compiled serves
    them all. Over this memory, only one that has been among the latest ``KEPT`` that were asked for is recorded, and
    forgotten when it no longer is: lengths that come by one after the other, and again in the next text, would each be
    recorded to be replayed once.

    Args:
        recorder: of the model.
    """

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        # The last one is the one asked for last; None where nothing is recorded yet.
        self._graphs: dict[Hashable, Graph | None] = {}

    @property
    def names(self) -> list[Hashable]:
        """Of what is recorded."""
        return [name for (name, *_), graph in self._graphs.items() if graph is not None]

    def __call__(self, name: Hashable, run: Run, recordable: Run, *inputs: Tensor) -> Tensor:
        """``run(*inputs)``, for good: no later pass changes it.

        Args:
            name: what it does; all runs of one name, over whatever memory, do the same with inputs of the same shapes.
            run: the pass.
            recordable: the same pass, all work of which is on the device and depends on shapes alone. Tensors that it
                reads or writes beside its inputs are there already, and live, and stay where they are, as long as this
                object.
            inputs: on the recorder's device.
        """
        key = (name, *((tensor.shape, tensor.dtype) for tensor in inputs))
        came_lately = key in self._graphs
        graph = self._graphs.pop(key, None)
        seen = self._recorder.seen.pop(key, 0)
        self._recorder.seen[key] = seen + 1
        if len(self._recorder.seen) > COUNTED:
            del self._recorder.seen[next(iter(self._recorder.seen))]
        if graph is None and came_lately and seen >= 2 and self._recorder.works:
            graph = self._recorder.record(recordable, inputs)
        self._graphs[key] = graph
        if len(self._graphs) > KEPT:
            del self._graphs[next(iter(self._graphs))]
        if graph is None:
            return recordable(*inputs) if seen == 1 else run(*inputs)
        return graph.replay(inputs)
