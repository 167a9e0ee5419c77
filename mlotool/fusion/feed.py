"""The batches of several runs, drawn by each and read together."""

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from mlotool.fusion.lane_gather import LaneGather
from mlotool.fusion.stacked_batches import stacked
from mlotool.fusion.stacking import NotJointError
from mlotool.problem.stream import Place, SameBatch, Stream

__all__ = ["JointBatch", "JointStream", "NotJointError", "joint_streams"]

# M: lanes, b: batch

_Places = tuple[Place | None, ...]


@dataclass(frozen=True, slots=True)
class JointBatch:
    """The batches of all lanes.

    Args:
        value: a batch as that of a member, its tensors (M, b, ...); or, if `is_shared`, (b, ...) for all lanes.
        is_shared: whether all lanes have the very same samples.
    """

    value: Any
    is_shared: bool


class JointStream:
    """The streams of one problem of M runs that are trained as one; each run has a lane.

    A batch of a lane is, bit for bit, what the member's own stream gives, and each stream goes on as by its own
    `next`: its position, its `last` batch and its checkpoints are right at any time.

    A lane may be without a stream (None) where its member has left; of lanes that are not live nobody reads the
    samples: they are those of the first live lane.

    Args:
        streams: one a lane; streams that repeat another's last batch are read there.
        shares: whether all lanes get one batch (`is_shared`). None: if the streams that are there have the very same
            samples, whose lanes may have been fewer at first: a resumed group gives what it was then.

    Raises:
        NotJointError: the streams give their batches on different devices or in different dtypes, or `shares` is asked
            of streams with different samples.

    Example:
        >>> import torch
        >>> joint = JointStream([Stream(torch.arange(4), 2, shuffle=False), Stream(torch.arange(4), 2, seed=1)])
        >>> joint.next([True, True]).value.shape, joint.next([True, False]).value[:, 0]
        (torch.Size([2, 2]), tensor([2, 2]))
    """

    def __init__(self, streams: Sequence[Stream | SameBatch | None], *, shares: bool | None = None) -> None:
        self._repeats_another = any(isinstance(each, SameBatch) for each in streams)
        self._streams = [_own(each) for each in streams]
        self._first = next(each for each in self._streams if each is not None)
        if not all(each.moves_like(self._first) for each in self._streams if each is not None):
            raise NotJointError("The batches are on different devices or of different dtypes in different runs.")
        self._twins = [None if each is None else self._first_like(each) for each in self._streams]
        are_twins = len({each for each in self._twins if each is not None}) == 1
        if shares and not are_twins:
            raise NotJointError("The batches hold different samples in different runs.")
        self.shares = are_twins if shares is None else shares
        self._gather = None if self.shares else LaneGather.of([each or self._first for each in self._streams])
        # The last two that were read: often what comes next and what came last.
        self._kept: deque[tuple[_Places, JointBatch]] = deque(maxlen=2)

    def next(self, live: Sequence[bool]) -> JointBatch:
        """Return the batches that `next` of each live lane's stream would return; each of these streams goes on.

        Args:
            live: for each lane, whether its member is there; at least one is.

        Raises:
            NotJointError: the batches of the lanes do not fit together; no stream has gone on.
        """
        if self._repeats_another:
            return self.last(live)
        batch = self.peek(live)
        for stream in compress(self._streams, live):
            stream.draw()  # type: ignore[union-attr]
        return batch

    def peek(self, live: Sequence[bool]) -> JointBatch:
        """Return the batches that `next` will return; the streams stay where they are. As for `next`."""
        if self._repeats_another:
            return self.last(live)
        lanes = zip(self._streams, live, strict=True)
        return self._read(tuple([each.next_place if is_live else None for each, is_live in lanes]), Stream.peek)  # type: ignore[union-attr]

    def last(self, live: Sequence[bool]) -> JointBatch:
        """Return the batches that `next` returned last; before the first, those it will return. As for `next`."""
        lanes = zip(self._streams, live, strict=True)
        return self._read(tuple([each.last_place if is_live else None for each, is_live in lanes]), Stream.last)  # type: ignore[union-attr]

    def repeated(self) -> "JointStream":
        """Return what repeats the last batch of this one, as `SameBatch` does; it reads nothing again."""
        twin = copy.copy(self)
        twin._repeats_another = True
        return twin

    def _read(self, places: _Places, own: Callable[[Stream], Any]) -> JointBatch:
        """Return the batches at `places`, which `own` returns of a stream."""
        for kept, batch in self._kept:
            if kept == places:
                return batch
        batch = self._loaded(places, own)
        self._kept.append((places, batch))
        return batch

    def _loaded(self, places: _Places, own: Callable[[Stream], Any]) -> JointBatch:
        if self.shares:
            lane = next(lane for lane, place in enumerate(places) if place is not None)
            if any(place is not None and place != places[lane] for place in places):
                raise NotJointError("Runs that share their batches stand at different places of the data.")
            return JointBatch(own(self._streams[lane]), is_shared=True)  # type: ignore[arg-type]
        if self._gather is not None:
            return JointBatch(self._first.moved(self._gather(places)), is_shared=False)
        return JointBatch(self._stacked(places, own), is_shared=False)

    def _stacked(self, places: _Places, own: Callable[[Stream], Any]) -> Any:
        """Return the batches that the streams load themselves, each once for all that have the same."""
        found: dict[Any, Any] = {}
        batches = []
        for stream, twin, place in zip(self._streams, self._twins, places, strict=True):
            if place is not None and (twin, place) not in found:
                found[twin, place] = own(stream)  # type: ignore[arg-type]
            batches.append(None if place is None else found[twin, place])
        stand_in = next(iter(found.values()))
        return stacked([stand_in if place is None else each for each, place in zip(batches, places, strict=True)])

    def _first_like(self, stream: Stream) -> int:
        """Return the first lane that has the same samples as `stream` where both stand at the same place."""
        return next(lane for lane, other in enumerate(self._streams) if other is not None and stream.loads_like(other))


def joint_streams(
    lanes: Mapping[str, Sequence[Stream | SameBatch | None]], *, shares: Mapping[str, bool] | None = None
) -> dict[str, JointStream]:
    """Return the streams of all problems; one that repeats another's last batch reads nothing again.

    Args:
        lanes: by problem, the stream of each lane, as for `JointStream`; problems without streams are left out.
        shares: by problem, what `JointStream.shares` was when the group began; None: decided by these streams.
    """
    made: dict[tuple[int, ...], JointStream] = {}
    joint = {}
    for name, streams in lanes.items():
        if all(each is None for each in streams):
            continue
        key = tuple(id(_own(each)) for each in streams)
        if key not in made:
            made[key] = JointStream([_own(each) for each in streams], shares=None if shares is None else shares[name])
        joint[name] = made[key].repeated() if any(isinstance(each, SameBatch) for each in streams) else made[key]
    return joint


def _own(stream: Stream | SameBatch | None) -> Stream | None:
    return stream.stream if isinstance(stream, SameBatch) else stream
