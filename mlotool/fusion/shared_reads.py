"""Batches that several runs of one process ask for, each read once."""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

from mlotool.fusion.copied import copied, num_bytes
from mlotool.problem.stream import Place, Stream

MAX_BYTES = 2**28
"""Of the batches that are kept for those who have not asked yet."""


class SharedReads:
    """The batches of streams that have the very same samples: read for the first that asks, kept for the others.

    Each stream gets a copy, so that a loss that changes its batch in place changes no other run's; on a CPU a copy
    takes memory once someone writes to it. A batch is kept until all streams have asked for it, or until later ones
    need its room: then whoever comes late reads it again.

    Args:
        streams: that give the same samples where they stand at the same place, as `Stream.loads_like` says; one that
            is gone is not waited for.
        max_bytes: of the batches that are kept.
    """

    def __init__(self, streams: Iterable[Stream], max_bytes: int = MAX_BYTES) -> None:
        self._streams = WeakSet(streams)
        self._max_bytes = max_bytes
        self._kept: dict[Place, tuple[Any, int, WeakSet[Stream]]] = {}

    def read(self, stream: Stream, place: Place, load: Callable[[], Any]) -> Any:
        """Return the batch at `place`.

        Args:
            stream: that asks.
            place: an epoch, and the number of the batch in it.
            load: reads it.
        """
        if place not in self._kept:
            batch = load()
            # A stream that was sent back does not keep a batch for those that have passed it.
            waiting = WeakSet(each for each in self._streams if each is not stream and each.next_place <= place)
            if not waiting:
                return batch
            self._kept[place] = batch, num_bytes(batch), waiting
            self._make_room()
            return copied(batch)
        batch, _, waiting = self._kept[place]
        waiting.discard(stream)
        if waiting:
            return copied(batch)
        del self._kept[place]
        return batch

    def leave(self, stream: Stream) -> None:
        """Wait for a stream no longer, which reads its batches itself from now on."""
        if stream not in self._streams:
            return
        self._streams.discard(stream)
        stream.read_through(None)
        for place, (_, _, waiting) in [*self._kept.items()]:
            waiting.discard(stream)
            if not waiting:
                del self._kept[place]

    def _make_room(self) -> None:
        """Let the oldest batches go, but never the one that was read last."""
        total = sum(size for _, size, _ in self._kept.values())
        while total > self._max_bytes and len(self._kept) > 1:
            _, size, _ = self._kept.pop(next(iter(self._kept)))
            total -= size


def share_reads(streams: Iterable[Stream], max_bytes: int = MAX_BYTES) -> list[SharedReads]:
    """Let streams that have the very same samples read each batch once; others stay as they are.

    It pays where the streams stand at the same places at about the same time.

    Args:
        streams: of several runs of this process that train side by side.
        max_bytes: of the batches that are kept, for each set of equal streams.

    Example:
        >>> import torch
        >>> images = torch.rand(4, 2)
        >>> streams = [Stream(images, 2, seed=1) for _ in range(2)]
        >>> reads = share_reads(streams)
        >>> torch.equal(streams[0].next(), streams[1].next()), len(reads)
        (True, 1)
    """
    alike: list[list[Stream]] = []
    for stream in streams:
        known = next((each for each in alike if stream.loads_like(each[0])), None)
        if known is None:
            alike.append([stream])
        elif stream not in known:
            known.append(stream)
    shared = []
    for group in alike:
        if len(group) > 1:
            reads = SharedReads(group, max_bytes)
            for stream in group:
                stream.read_through(reads)
            shared.append(reads)
    return shared
