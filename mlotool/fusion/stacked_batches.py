"""The batches of several members as one: the same containers, each tensor with an axis of members in front.

Each member has a row. A batch of a row is, bit for bit, what the member's own stream gives. Where all rows read from
one data set in memory, it is called once for all of them.
"""

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mlotool.core.private import tree_flatten, tree_map_only, tree_unflatten
from mlotool.core.replay import RandomState
from mlotool.data.image_data import InMemoryDataset
from mlotool.data.language_data import TextWindows
from mlotool.data.splits import InMemoryTensors
from mlotool.fusion.stack import NotFusedError
from mlotool.problem.optimizers.rule import Hyperparameters
from mlotool.problem.problem import Problem
from mlotool.problem.stream import Place, SameBatch, Stream
from mlotool.problem.trajectory import LowerSnapshot, StepRecord
from mlotool.program import Program
from mlotool.program.solution_plan import all_plans
from mlotool.program.trace import Traced

_Places = tuple[Place | None, ...]

# M: members, b: batch


class UnlikeBatchesError(NotFusedError):
    """The batches of this tick do not fit together; those of the next one may."""


@dataclass(frozen=True, slots=True)
class StackedBatch:
    """The batches of all members.

    Args:
        value: a batch as that of a member, its tensors (M, b, ...); or, if `is_shared`, (b, ...) for all members.
        is_shared: whether all members have the very same samples.
    """

    value: Any
    is_shared: bool

    def of(self, number: int) -> Any:
        """Return the batch of one member."""
        return self.value if self.is_shared else tree_map_only(Tensor, lambda tensor: tensor[number], self.value)


def stacked(batches: Sequence[Any], key: str = "batches") -> Any:
    """Return batches of equal structure as one, with their tensors stacked along a new first axis.

    Args:
        batches: one for each member, at least one.
        key: what they are, for messages.

    Raises:
        UnlikeBatchesError: they differ in structure, in a shape, or in what is no tensor.

    Example:
        >>> stacked([{"input": torch.zeros(2), "name": "a"}, {"input": torch.ones(2), "name": "a"}])["input"]
        tensor([[0., 0.],
                [1., 1.]])
    """
    columns, structures = zip(*map(tree_flatten, batches), strict=True)
    if any(each != structures[0] for each in structures):
        raise UnlikeBatchesError(f"{key} have different keys or containers in different runs")
    return tree_unflatten([_stacked_leaf(leaves, key) for leaves in zip(*columns, strict=True)], structures[0])


def _stacked_leaf(leaves: Sequence[Any], key: str) -> Any:
    first = leaves[0]
    if not isinstance(first, Tensor):
        # Two numbers that are NaN are no different values here.
        if not all(each is first or each == first or (each != each and first != first) for each in leaves):
            raise UnlikeBatchesError(f"{key} have different values in different runs: {first!r:.50}")
        return first
    if any(not isinstance(each, Tensor) or (each.dtype, each.device) != (first.dtype, first.device) for each in leaves):
        raise UnlikeBatchesError(f"{key} have different dtypes or devices in different runs")
    if len(shapes := dict.fromkeys(each.shape for each in leaves)) > 1:
        raise UnlikeBatchesError(f"{key} have different shapes in different runs: {', '.join(map(str, shapes))}")
    return torch.stack([*leaves])


class StackedStream:
    """The streams of one problem of M members.

    Each stream goes on as by its own `next`: its position, its `last` batch and its checkpoints are right at any time.
    A row may be without a stream (None) where its member has left; of rows that are not live nobody reads the samples:
    they are those of the first live row.

    Args:
        streams: one a row; streams that repeat another's last batch are read there.
        shares: whether all rows get one batch (`is_shared`). None: if the streams that are there have the very same
            samples, whose rows may have been fewer at first: a resumed group gives what it was then.

    Raises:
        NotFusedError: the streams give their batches on different devices or in different dtypes, or `shares` is asked
            of streams with different samples.

    Example:
        >>> import torch
        >>> stream = StackedStream([Stream(torch.arange(4), 2, shuffle=False), Stream(torch.arange(4), 2, seed=1)])
        >>> stream.next([True, True]).value.shape, stream.next([True, False]).value[:, 0]
        (torch.Size([2, 2]), tensor([2, 2]))
    """

    def __init__(self, streams: Sequence[Stream | SameBatch | None], *, shares: bool | None = None) -> None:
        self._repeats_another = any(isinstance(stream, SameBatch) for stream in streams)
        self._streams = [_source(stream) for stream in streams]
        there = [stream for stream in self._streams if stream is not None]
        self._first = there[0]
        if not all(stream.moves_like(self._first) for stream in there):
            raise NotFusedError("the batches are on different devices or of different dtypes in different runs")
        # By row, a stream that has the same samples where both stand at the same place.
        self._twins = [
            None if stream is None else next(other for other in there if stream.loads_like(other))
            for stream in self._streams
        ]
        are_twins = all(stream.loads_like(self._first) for stream in there)
        if shares and not are_twins:
            raise NotFusedError("the batches hold different samples in different runs")
        self.shares = are_twins if shares is None else shares
        self._gathers = not self.shares and _read_by_position(there)
        # The last two that were read: often what comes next and what came last.
        self._kept: deque[tuple[_Places, StackedBatch]] = deque(maxlen=2)

    def next(self, live: Sequence[bool]) -> StackedBatch:
        """Return the batches that `next` of each live row's stream would return; each of these streams goes on.

        Args:
            live: for each row, whether its member is there; at least one is.

        Raises:
            NotFusedError: the batches of the rows do not fit together; no stream has gone on.
        """
        batch = self.peek(live)
        if not self._repeats_another:
            for stream in compress(self._streams, live):
                stream.draw()  # type: ignore[union-attr]
        return batch

    def peek(self, live: Sequence[bool]) -> StackedBatch:
        """Return the batches that `next` will return; the streams stay where they are. As for `next`."""
        return self.last(live) if self._repeats_another else self._read(live, "next_place", Stream.peek)

    def last(self, live: Sequence[bool]) -> StackedBatch:
        """Return the batches that `next` returned last; before the first, those it will return. As for `next`."""
        return self._read(live, "last_place", Stream.last)

    def repeated(self) -> "StackedStream":
        """Return what repeats the last batch of this one, as `SameBatch` does; it reads nothing again."""
        twin = copy.copy(self)
        twin._repeats_another = True
        return twin

    def _read(self, live: Sequence[bool], attribute: str, read: Callable[[Stream], Any]) -> StackedBatch:
        """Return the batches at the places that an attribute of each stream tells, which `read` returns of it."""
        rows = zip(self._streams, live, strict=True)
        places: _Places = tuple([getattr(stream, attribute) if is_live else None for stream, is_live in rows])
        for kept, batch in self._kept:
            if kept == places:
                return batch
        batch = self._loaded(places, read)
        self._kept.append((places, batch))
        return batch

    def _loaded(self, places: _Places, read: Callable[[Stream], Any]) -> StackedBatch:
        rows = [row for row, place in enumerate(places) if place is not None]
        if self.shares:
            if len({places[row] for row in rows}) > 1:
                raise NotFusedError("runs that share their batches stand at different places of the data")
            return StackedBatch(read(self._streams[rows[0]]), is_shared=True)  # type: ignore[arg-type]
        # Those that have left get what the first one has that is there.
        sources = [row if place is not None else rows[0] for row, place in enumerate(places)]
        if self._gathers:
            return StackedBatch(self._first.moved(self._gathered(sources, places)), is_shared=False)
        # Each batch is read once for all that have the same.
        known: dict[Any, Any] = {}
        for row in rows:
            key = self._twins[row], places[row]
            if key not in known:
                known[key] = read(self._streams[row])  # type: ignore[arg-type]
        return StackedBatch(stacked([known[self._twins[row], places[row]] for row in sources]), is_shared=False)

    def _gathered(self, sources: Sequence[int], places: _Places) -> Any:
        """Return the batches of some rows, which one call of their data set reads."""
        size, indices = self._first.batch_size, []
        for row in sources:
            epoch, number = places[row]  # type: ignore[misc]
            indices.append(self._streams[row].order(epoch)[number * size : (number + 1) * size])  # type: ignore[union-attr]
        if len(sizes := {*map(len, indices)}) > 1:
            raise UnlikeBatchesError(f"batches are of different sizes in different runs: {', '.join(map(str, sizes))}")
        data: Any = self._first.dataset
        batch = data.__getitems__(torch.cat(indices))
        return tree_map_only(Tensor, lambda tensor: tensor.unflatten(0, (len(indices), -1)), batch)


def stacked_streams(
    streams: Mapping[str, Sequence[Stream | SameBatch | None]], *, shares: Mapping[str, bool] | None = None
) -> dict[str, StackedStream]:
    """Return the streams of all problems; one that repeats another's last batch reads nothing again.

    Args:
        streams: by problem, the stream of each row, as for `StackedStream`; problems without streams are left out.
        shares: by problem, what `StackedStream.shares` was when the group began; None: decided by these streams.
    """
    made: dict[tuple[int, ...], StackedStream] = {}
    by_name = {}
    for name, rows in streams.items():
        if all(stream is None for stream in rows):
            continue
        sources = [_source(stream) for stream in rows]
        key = tuple(map(id, sources))
        if key not in made:
            made[key] = StackedStream(sources, shares=None if shares is None else shares[name])
        by_name[name] = made[key].repeated() if any(isinstance(stream, SameBatch) for stream in rows) else made[key]
    return by_name


def _source(stream: Stream | SameBatch | None) -> Stream | None:
    return stream.stream if isinstance(stream, SameBatch) else stream


def _read_by_position(streams: Sequence[Stream]) -> bool:
    """Say whether all streams read batches of one size from one data set in memory, by the samples' positions alone."""
    data = streams[0].dataset
    is_seeded = type(data) is InMemoryDataset and (data.seeded or not isinstance(data.images, Tensor))
    return (
        type(data) in (InMemoryDataset, InMemoryTensors, TextWindows)
        and not is_seeded
        and all(stream.is_loaded_here and stream.dataset is data for stream in streams)
        and len({stream.batch_size for stream in streams}) == 1
    )


class Draw:
    """Draws what the gradient of one problem is taken on, for all members.

    Args:
        traced: the problem, of the first member.
        programs: the members; None has left.
        streams: by name of the problem.
    """

    def __init__(
        self, traced: Traced, programs: Sequence[Program | None], streams: Mapping[str, StackedStream]
    ) -> None:
        first = next(program for program in programs if program is not None)
        self._name, self._count = traced.problem.name, traced.problem.settings.accumulate_batches
        self._programs, self._streams = programs, streams
        plans = [*all_plans(first.engine.solutions[traced.number])]
        self._below = [
            (plan.problem.name, StackedStream.peek if plan.algorithm.batch == "fresh" else StackedStream.last)
            for plan in plans
            if not plan.algorithm.sees_steps
        ]
        self._unrolled = list(dict.fromkeys(plan.problem.name for plan in plans if plan.algorithm.sees_steps))

    def __call__(self, live: Sequence[bool]) -> list[dict[str, StackedBatch | None]]:
        """Return, for each batch that the gradient is averaged over, that batch and those of its pullbacks, by problem.

        Of a problem whose recorded steps are differentiated it is these; None of one without a stream.

        Args:
            live: which members take part.

        Raises:
            NotFusedError: what they have cannot be stacked; some streams may have gone on.
        """
        first = self._programs[live.index(True)]
        members = [program if is_live else first for program, is_live in zip(self._programs, live, strict=True)]
        there = [program for program in members if program is not None]
        steps = {name: _recorded_steps([program.problems[name] for program in there]) for name in self._unrolled}
        entries = []
        for _ in range(self._count):
            entry = {self._name: self._read(self._name, StackedStream.next, live), **steps}
            for name, read in self._below:
                if name not in entry:
                    entry[name] = self._read(name, read, live)
            entries.append(entry)
        return entries

    def _read(
        self, name: str, read: Callable[[StackedStream, Sequence[bool]], StackedBatch], live: Sequence[bool]
    ) -> StackedBatch | None:
        stream = self._streams.get(name)
        return None if stream is None else read(stream, live)


def _recorded_steps(problems: Sequence[Problem]) -> StackedBatch:
    """Return the steps of the unrolls that problems of several members are in, each tensor with an axis of members.

    Args:
        problems: of each member; a member that has left has another one's.

    Raises:
        NotFusedError: they differ in more than tensors and numbers.
    """
    name, unrolls = problems[0].name, [tuple(problem.trajectory) for problem in problems]
    if not unrolls[0]:
        raise NotFusedError(f"no steps of problems.{name} are recorded to be differentiated: they are simulated")
    if len({(len(problem.trajectory), problem.trajectory.has_all) for problem in problems}) > 1:
        raise NotFusedError(f"different steps of problems.{name} are recorded in different runs")
    # The optimizer's class, and what else shapes its steps.
    settings = [(problem.settings.gradient_clip_norm, problem.settings.optimizer_roles) for problem in problems]
    kinds = {
        f"{type(problem.optimizer)}, {clip}, {sorted(roles.items())}"
        for problem, (clip, roles) in zip(problems, settings, strict=True)
    }
    if len(kinds) > 1:
        raise NotFusedError(
            f"optimizers of problems.{name}, whose steps are differentiated, differ in kind or clipping"
        )
    steps = [_recorded_step(name, records) for records in zip(*unrolls, strict=True)]
    return StackedBatch(TakenSteps(kinds.pop(), problems[0].trajectory.has_all, steps), is_shared=False)


NumberPlace = tuple[str, int | None]
"""A hyperparameter by name, and its position in one that is a tuple."""


class TakenStep(NamedTuple):
    """One step, without random numbers and lower problems, of which it has none.

    Args:
        theta: the parameters before it.
        state: the optimizer's state before it, one mapping a parameter.
        batches: of its gradient.
        buffers: before each evaluation; empty where there are none.
        settings: hyperparameters, one mapping a parameter.
        numbers: those of them that are arguments, (n,) float64.
        places: by parameter, where among the numbers a hyperparameter stands.
    """

    theta: list[Tensor]
    state: list[dict[str, Tensor]]
    batches: list[Any]
    buffers: list[dict[str, Tensor | None]]
    settings: list[dict[str, Any]]
    numbers: Tensor
    places: list[dict[NumberPlace, int]]

    def record(self, devices: Sequence[Any]) -> StepRecord:
        """Return it as a record.

        Args:
            devices: CUDA devices of the problem.
        """
        # What draws random numbers is not traced: any state will do.
        random = RandomState(tuple(devices))
        pairs = zip(self.settings, self.places, strict=True)
        given = tuple(_with_numbers(settings, places, self.numbers) for settings, places in pairs)
        draws = tuple((batch, random) for batch in self.batches)
        return StepRecord(tuple(self.theta), tuple(self.state), given, draws, {}, buffers=tuple(self.buffers))


class TakenSteps(NamedTuple):
    """The steps of an unroll, oldest first.

    Args:
        kind: what runs whose steps are one function share beside containers.
        has_all: whether the first of them is the first of its unroll.
        steps: the steps.
    """

    kind: str
    has_all: bool
    steps: list[TakenStep]

    def as_lower_snapshot(
        self, theta: Sequence[Tensor], stream: Stream | SameBatch | None, devices: Sequence[Any]
    ) -> LowerSnapshot:
        """Return the problem as its reader finds it.

        Args:
            theta: its parameters now.
            stream: its own.
            devices: its CUDA devices.
        """
        return LowerSnapshot(theta, stream, tuple(step.record(devices) for step in self.steps), self.has_all)


def _with_numbers(settings: Mapping[str, Any], places: Mapping[NumberPlace, int], numbers: Tensor) -> Hyperparameters:
    given = dict(settings)
    for (name, position), number in places.items():
        value = numbers[number]
        given[name] = value if position is None else (*given[name][:position], value, *given[name][position + 1 :])
    return given


def _recorded_step(name: str, records: Sequence[StepRecord]) -> TakenStep:
    if any(record.lower_snapshots for record in records):
        raise NotFusedError(f"the steps of problems.{name}, which are differentiated, read other problems")
    if len({tuple(map(tuple, record.state)) for record in records}) > 1:
        raise NotFusedError(f"optimizers of problems.{name}, whose steps are differentiated, keep different tensors")
    contents = [
        (list(each.theta), [*map(dict, each.state)], [batch for batch, _ in each.draws], [*map(dict, each.buffers)])
        for each in records
    ]
    theta, state, batches, buffers = stacked(contents, f"the recorded steps of problems.{name}")
    settings = [dict(each) for each in records[0].hyperparameters]
    columns: dict[tuple[float, ...], int] = {}
    places: list[dict[tuple[str, int | None], int]] = []
    for position, own_settings in enumerate(settings):
        places.append({})
        for key in [*own_settings]:
            values = [record.hyperparameters[position][key] for record in records]
            for index, numbers in _arguments(name, key, values).items():
                places[-1][key, index] = columns.setdefault(numbers, len(columns))
                # Not what it is this time: the function is that of any other.
                kept = own_settings[key]
                own_settings[key] = None if index is None else (*kept[:index], None, *kept[index + 1 :])
    rows = torch.tensor(list(columns), dtype=torch.float64, device=theta[0].device).reshape(-1, len(records)).T
    return TakenStep(theta, state, batches, buffers, settings, rows, places)


def _arguments(name: str, key: str, values: Sequence[Any]) -> dict[int | None, tuple[float, ...]]:
    """Return the values of a hyperparameter that are to be arguments, by member: rates, which move, and what differs.

    Those of a tuple (betas) are told by their positions.
    """
    parts: dict[int | None, tuple[Any, ...]] = {None: tuple(values)}
    if all(isinstance(value, tuple) for value in values):
        parts = dict(enumerate(zip(*values, strict=True)))
    arguments: dict[int | None, tuple[float, ...]] = {}
    for index, numbers in parts.items():
        is_number = all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)
        if is_number and (key == "lr" or len(set(numbers)) > 1):
            arguments[index] = tuple(map(float, numbers))
        elif any(isinstance(each, Tensor) or each != numbers[0] for each in numbers):
            raise NotFusedError(f"optimizers of problems.{name}, whose steps are differentiated, differ in {key}")
    return arguments
