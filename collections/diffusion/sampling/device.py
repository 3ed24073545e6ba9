"""Between the CPU, where a run does its bookkeeping, and the device of its model. Torch only."""

from collections.abc import Sequence

import torch
from torch import Tensor


def works_apart(device: torch.device) -> bool:
    """Whether a device goes on with what it was given while the CPU does something else."""
    return device.type != "cpu"


def on_cpu(values: Sequence) -> Tensor:
    """Values in a tensor of the CPU, whatever torch's default device is."""
    return torch.tensor(values, device="cpu")


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the CPU on a device; the CPU does not wait for what is queued there."""
    return tensor.to(device, non_blocking=True)


class OnItsWay:
    """A small tensor of a device that comes to the CPU, which does something else meanwhile.

    Args:
        tensor: on any device.
    """

    def __init__(self, tensor: Tensor):
        self._tensor, self._arrival = tensor, None
        if tensor.is_cuda:
            # Into pinned memory, behind what is queued.
            self._tensor = tensor.to("cpu", non_blocking=True)
            self._arrival = torch.cuda.current_stream(tensor.device).record_event()

    def tolist(self) -> list:
        """Its numbers; the CPU waits for them."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._tensor.tolist()
