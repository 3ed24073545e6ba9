"""In which order training reads its rows, epoch after epoch, as a function of seed and position."""

from collections.abc import Callable

import numpy as np

from nemo_dllm.collections.diffusion.data.packed import epoch_permutation

# Groups per window: enough for groups of equal lengths, few enough that windows differ from epoch to epoch.
_GROUPS_PER_WINDOW = 64


class EpochOrder:
    """Looks up what an epoch's order says about a position in consumption order; keeps the last two epochs.

    Args:
        num_rows: rows per epoch.
        order_of_epoch: epoch -> what is indexed by the position in the epoch, for instance a permutation.
    """

    def __init__(self, num_rows: int, order_of_epoch: Callable) -> None:
        self.num_rows = num_rows
        self._order_of_epoch = order_of_epoch
        self._kept: dict = {}

    def at(self, index: int) -> tuple[object, int]:
        """The order of the epoch that sample `index` is in, and its position there."""
        epoch, position = divmod(int(index), self.num_rows)
        if epoch not in self._kept:
            # A batch may reach over the border of two epochs.
            self._kept = {kept: order for kept, order in self._kept.items() if kept == epoch - 1}
            self._kept[epoch] = self._order_of_epoch(epoch)
        return self._kept[epoch], position


def length_grouped_permutation(lengths: np.ndarray, seed: int, epoch: int, group_size: int) -> np.ndarray:
    """A random order in which each `group_size` rows in a row have similar lengths, [num_rows] int64.

    Rows are shuffled, sorted by length within windows of 64 groups, and the groups of a window shuffled. Groups begin
    at multiples of the size, counted across epochs: what is left of a group that the last epoch began comes first.

    Args:
        lengths: [num_rows] tokens.
        seed, epoch: as of `epoch_permutation`.
        group_size: rows per group, for instance the global batch size.
    """
    order = epoch_permutation(len(lengths), seed, epoch)
    generator = np.random.default_rng((seed, epoch, group_size))
    window = group_size * _GROUPS_PER_WINDOW
    left = -epoch * len(order) % group_size
    grouped, order = [order[:left]], order[left:]
    for start in range(0, len(order), window):
        rows = order[start : start + window]
        rows = rows[np.argsort(lengths[rows], kind="stable")]
        groups = [rows[first : first + group_size] for first in range(0, len(rows), group_size)]
        # An incomplete group stays last, so that all others keep their border.
        full = len(groups) if len(groups[-1]) == group_size else len(groups) - 1
        grouped += [groups[at] for at in generator.permutation(full)] + groups[full:]
    return np.concatenate(grouped)
