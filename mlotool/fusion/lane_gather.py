"""One gather for the batches of several runs whose samples lie in memory."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from mlotool.fusion.joined_data import JoinedData
from mlotool.fusion.stacking import NotJointError, as_lanes
from mlotool.problem.stream import Place, Stream

# m: lanes, b: batch


class LaneGather:
    """Reads one batch a lane in one call of a data set.

    The orders of all lanes' epochs lie one after the other in one tensor of places in the joined data, so a batch of
    all lanes is one gather of places there, and one of samples.

    Args:
        streams: one for each lane, that load their batches in this process.
        data: the data sets of all lanes.
    """

    def __init__(self, streams: Sequence[Stream], data: JoinedData) -> None:
        self._streams = list(streams)
        self._data = data
        self._batch_size = streams[0].batch_size
        self._sizes = [len(each.dataset) for each in streams]
        *self._begins, total = accumulate(self._sizes, initial=0)
        self._orders = torch.empty(total, dtype=torch.int64)
        self._epochs: list[int | None] = [None] * len(self._streams)
        # Of most streams an epoch's last batch is as large as the others: then no draw has to look.
        self._is_even = all(
            each.num_batches * self._batch_size <= size for each, size in zip(streams, self._sizes, strict=True)
        )
        self._within = torch.arange(self._batch_size)

    @classmethod
    def of(cls, streams: Sequence[Stream]) -> "LaneGather | None":
        """Return one for these streams; None where their batches do not come from memory in one call."""
        if not all(each.is_loaded_here and each.batch_size == streams[0].batch_size for each in streams):
            return None
        data = JoinedData.of([each.dataset for each in streams])
        return None if data is None else cls(streams, data)

    def __call__(self, places: Sequence[Place | None]) -> Any:
        """Return the batches at `places`, one a lane; where it is None, those of the first lane that has one.

        Raises:
            NotJointError: they are of different sizes.
        """
        size = self._batch_size if self._is_even else self._size(places)
        begins = [-1] * len(places)
        for lane, place in enumerate(places):
            if place is not None:
                epoch, number = place
                if self._epochs[lane] != epoch:
                    self._lay(lane, epoch)
                begins[lane] = self._begins[lane] + number * self._batch_size
        if None in places:
            stand_in = next(begin for begin in begins if begin >= 0)
            begins = [stand_in if begin < 0 else begin for begin in begins]
        rows = torch.tensor(begins)[:, None] + self._within[:size]
        return as_lanes(self._data[self._orders.index_select(0, rows.flatten())], len(begins), size)

    def _size(self, places: Sequence[Place | None]) -> int:
        """Return the samples of a batch."""
        lanes = [(lane, place[1]) for lane, place in enumerate(places) if place is not None]
        sizes = {min(self._batch_size, self._sizes[lane] - number * self._batch_size) for lane, number in lanes}
        if len(sizes) > 1:
            raise NotJointError(f"Batches are of different sizes in different runs: {', '.join(map(str, sizes))}.")
        return sizes.pop()

    def _lay(self, lane: int, epoch: int) -> None:
        """Put the order of a lane's epoch in its place."""
        begin, size = self._begins[lane], self._sizes[lane]
        torch.add(self._streams[lane].order(epoch), self._data.begins[lane], out=self._orders[begin : begin + size])
        self._epochs[lane] = epoch
