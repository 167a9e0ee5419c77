"""The batches of several members as one: the same containers, each tensor with an axis of members in front.

Each member has a row. A batch of a row is, bit for bit, what the member's own stream gives. Where the samples of all
lie in memory, one gather reads them.
"""

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import accumulate, compress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.data import TensorDataset

from mlotool.data.in_memory import InMemoryDataset
from mlotool.data.in_memory_tensors import InMemoryTensors
from mlotool.data.rows import rows
from mlotool.data.text_windows import TextWindows
from mlotool.fusion.stack import NotFusedError
from mlotool.problem.problem import Problem
from mlotool.problem.same_batch import SameBatch
from mlotool.problem.stream import Place, Stream
from mlotool.problem.trajectory import StepRecord
from mlotool.program import Program
from mlotool.program.solution_plan import all_plans
from mlotool.program.taken_steps import TakenStep, TakenSteps
from mlotool.program.traced_function import Traced

MAX_BYTES = 2**30
"""Of the tensors of different data sets that are joined, which are then in memory twice."""

_KINDS = (Tensor, TensorDataset, InMemoryDataset, InMemoryTensors, TextWindows)

_Places = tuple[Place | None, ...]

# M: members, b: batch


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


def stacked(batches: Sequence[Any], key: str = "a batch") -> Any:
    """Return batches of equal structure as one, with their tensors stacked along a new first axis.

    Args:
        batches: one for each member, at least one.
        key: where they stand, for messages.

    Raises:
        NotFusedError: they differ in structure, in a shape, or in what is no tensor.

    Example:
        >>> stacked([{"input": torch.zeros(2), "name": "a"}, {"input": torch.ones(2), "name": "a"}])["input"]
        tensor([[0., 0.],
                [1., 1.]])
    """
    first = batches[0]
    if any(type(each) is not type(first) for each in batches):
        raise NotFusedError(f"{key} is of different types in different runs")
    if isinstance(first, Tensor):
        if any(each.shape != first.shape for each in batches):
            shapes = ", ".join(str(list(shape)) for shape in dict.fromkeys(each.shape for each in batches))
            raise NotFusedError(f"{key} has different shapes in different runs: {shapes}")
        if any(each.dtype != first.dtype or each.device != first.device for each in batches):
            raise NotFusedError(f"{key} has different dtypes or devices in different runs")
        return torch.stack(list(batches))
    if isinstance(first, Mapping):
        if any(each.keys() != first.keys() for each in batches):
            raise NotFusedError(f"{key} has different keys in different runs")
        return {name: stacked([each[name] for each in batches], f"{key}[{name!r}]") for name in first}
    if is_dataclass(first) and not isinstance(first, type):
        # Not dataclasses.replace: it calls __init__, which may take other arguments than the fields.
        joined = copy.copy(first)
        for field in fields(first):
            parts = [getattr(each, field.name) for each in batches]
            object.__setattr__(joined, field.name, stacked(parts, f"{key}.{field.name}"))
        return joined
    if isinstance(first, Sequence) and not isinstance(first, str | bytes):
        if any(len(each) != len(first) for each in batches):
            raise NotFusedError(f"{key} has different lengths in different runs")
        parts = [stacked(part, f"{key}[{place}]") for place, part in enumerate(zip(*batches, strict=True))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)  # type: ignore[call-arg]
    # Two numbers that are NaN are no different values here.
    if not all(each is first or each == first or (each != each and first != first) for each in batches):
        raise NotFusedError(f"{key}, which is no tensor, has different values in different runs")
    return first


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
        >>> joint = StackedStream([Stream(torch.arange(4), 2, shuffle=False), Stream(torch.arange(4), 2, seed=1)])
        >>> joint.next([True, True]).value.shape, joint.next([True, False]).value[:, 0]
        (torch.Size([2, 2]), tensor([2, 2]))
    """

    def __init__(self, streams: Sequence[Stream | SameBatch | None], *, shares: bool | None = None) -> None:
        self._repeats_another = any(isinstance(stream, SameBatch) for stream in streams)
        self._streams = [_source(stream) for stream in streams]
        there = [stream for stream in self._streams if stream is not None]
        self._first = there[0]
        if not all(stream.moves_like(self._first) for stream in there):
            raise NotFusedError("the batches are on different devices or of different dtypes in different runs")
        # By row, the first one that has the same samples where both stand at the same place.
        self._twins = [
            None if stream is None else next(row for row, other in self._rows() if stream.loads_like(other))
            for stream in self._streams
        ]
        are_twins = len({*self._twins} - {None}) == 1
        if shares and not are_twins:
            raise NotFusedError("the batches hold different samples in different runs")
        self.shares = are_twins if shares is None else shares
        self._gather = None if self.shares else _Gather.of([stream or self._first for stream in self._streams])
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

    def _rows(self) -> list[tuple[int, Stream]]:
        return [(row, stream) for row, stream in enumerate(self._streams) if stream is not None]

    def _read(self, live: Sequence[bool], attribute: str, read: Callable[[Stream], Any]) -> StackedBatch:
        """Return the batches at the places that an attribute of each stream tells, which `read` returns of it."""
        lanes = zip(self._streams, live, strict=True)
        places: _Places = tuple([getattr(stream, attribute) if is_live else None for stream, is_live in lanes])
        for kept, batch in self._kept:
            if kept == places:
                return batch
        batch = self._loaded(places, read)
        self._kept.append((places, batch))
        return batch

    def _loaded(self, places: _Places, read: Callable[[Stream], Any]) -> StackedBatch:
        there = [row for row, place in enumerate(places) if place is not None]
        if self.shares:
            if len({places[row] for row in there}) > 1:
                raise NotFusedError("runs that share their batches stand at different places of the data")
            return StackedBatch(read(self._streams[there[0]]), is_shared=True)  # type: ignore[arg-type]
        if self._gather is not None:
            return StackedBatch(self._first.moved(self._gather(places)), is_shared=False)
        # Each batch is read once for all that have the same.
        known: dict[Any, Any] = {}
        for row in there:
            key = self._twins[row], places[row]
            if key not in known:
                known[key] = read(self._streams[row])  # type: ignore[arg-type]
        stand_in = next(iter(known.values()))
        keys = zip(self._twins, places, strict=True)
        return StackedBatch(stacked([known[key] if key[1] is not None else stand_in for key in keys]), is_shared=False)


def stacked_streams(
    streams: Mapping[str, Sequence[Stream | SameBatch | None]], *, shares: Mapping[str, bool] | None = None
) -> dict[str, StackedStream]:
    """Return the streams of all problems; one that repeats another's last batch reads nothing again.

    Args:
        streams: by problem, the stream of each row, as for `StackedStream`; problems without streams are left out.
        shares: by problem, what `StackedStream.shares` was when the group began; None: decided by these streams.
    """
    made: dict[tuple[int, ...], StackedStream] = {}
    found = {}
    for name, own in streams.items():
        if all(stream is None for stream in own):
            continue
        sources = [_source(stream) for stream in own]
        key = tuple(map(id, sources))
        if key not in made:
            made[key] = StackedStream(sources, shares=None if shares is None else shares[name])
        found[name] = made[key].repeated() if any(isinstance(stream, SameBatch) for stream in own) else made[key]
    return found


def _source(stream: Stream | SameBatch | None) -> Stream | None:
    return stream.stream if isinstance(stream, SameBatch) else stream


class JoinedData:
    """The samples of several data sets in memory, one after the other; a data set of several members is there once.

    A batch is, bit for bit, what the member's own data set returns for its own positions, also where a batch holds
    these (`index`).

    Args:
        dataset: the samples of all.
        begins: where the samples of each member's data set begin in it.
        positions: (n,) int64, the position of each sample in its own data set; None where there is only one.
    """

    def __init__(self, dataset: Any, begins: Sequence[int], positions: Tensor | None) -> None:
        self._dataset, self._positions = dataset, positions
        self.begins = list(begins)

    @classmethod
    def of(cls, datasets: Sequence[Any]) -> "JoinedData | None":
        """Join the data sets of members; None where that cannot be, or takes more than MAX_BYTES of copies."""
        kind = type(datasets[0])
        if kind not in _KINDS or any(type(each) is not kind for each in datasets) or not all(map(_is_plain, datasets)):
            return None
        different = list({id(each): each for each in datasets}.values())
        if len(different) == 1:
            return cls(different[0], [0] * len(datasets), None)
        if sum(leaf.nbytes for each in different for leaf in tree_leaves(_columns(each))) > MAX_BYTES:
            return None
        try:
            whole = _rebuilt(different)
        except (TypeError, ValueError):
            return None
        sizes = [len(each) for each in different]
        begins = dict(zip(map(id, different), accumulate(sizes, initial=0), strict=False))
        return cls(whole, [begins[id(each)] for each in datasets], torch.cat([torch.arange(size) for size in sizes]))

    def __getitem__(self, places: Tensor) -> Any:
        """Return the batch of the samples at `places` (b,)."""
        if isinstance(self._dataset, Tensor):
            return rows(self._dataset, places)
        if isinstance(self._dataset, TensorDataset):
            return [rows(tensor, places) for tensor in self._dataset.tensors]
        batch = self._dataset.__getitems__(places)
        if self._positions is not None and "index" in batch:
            batch["index"] = self._positions[places]
        return batch


def _is_plain(dataset: Any) -> bool:
    """Say whether its samples are read by position alone, from tensors in memory."""
    if isinstance(dataset, InMemoryDataset):
        return isinstance(dataset.images, Tensor) and not dataset.seeded
    return all(isinstance(leaf, Tensor) and leaf.layout == torch.strided for leaf in tree_leaves(_columns(dataset)))


def _columns(dataset: Any) -> Any:
    """Return what a data set is made of: tensors by name, possibly nested."""
    if isinstance(dataset, Tensor):
        return dataset
    if isinstance(dataset, TensorDataset):
        return [*dataset.tensors]
    if isinstance(dataset, InMemoryTensors):
        return dataset.values
    if isinstance(dataset, TextWindows):
        return {"tokens": dataset.tokens, "starts": dataset.starts, "domain": dataset.domain}
    names = ("images", "target", "extra", *(["clean_target"] if dataset.clean_target is not None else []))
    return {name: getattr(dataset, name) for name in names}


def _rebuilt(datasets: Sequence[Any]) -> Any:
    """Return one data set of the class of several with the samples of all.

    Raises:
        TypeError or ValueError: they differ in their keys, in the shape or dtype of a sample, or in a setting.
    """
    first, columns = datasets[0], [_columns(each) for each in datasets]
    if isinstance(first, TextWindows):
        begins = accumulate((len(each["tokens"]) for each in columns), initial=0)
        columns = [{**each, "starts": each["starts"] + begin} for each, begin in zip(columns, begins, strict=False)]
    for setting in ("length", "normalization"):
        if any(getattr(each, setting, None) != getattr(first, setting, None) for each in datasets):
            raise ValueError(f"{setting} differs")
    whole = tree_map(lambda *tensors: _joined(tensors), *columns)
    if isinstance(first, TensorDataset):
        return TensorDataset(*whole)
    if isinstance(first, InMemoryTensors):
        return InMemoryTensors(whole)
    if isinstance(first, TextWindows):
        return TextWindows(**whole, length=first.length)
    return InMemoryDataset(**whole, normalization=first.normalization) if isinstance(first, InMemoryDataset) else whole


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    if len({(tensor.shape[1:], tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        raise ValueError("samples differ in shape or dtype")
    return torch.cat([*tensors])


class _Gather:
    """Reads one batch a row in one call of a data set.

    The orders of all rows' epochs lie one after the other in one tensor of places in the joined data, so a batch of
    all rows is one gather of places there, and one of samples.

    Args:
        streams: one for each row, that load their batches in this process.
        data: the data sets of all rows.
    """

    def __init__(self, streams: Sequence[Stream], data: JoinedData) -> None:
        self._streams, self._data = streams, data
        self._batch_size = streams[0].batch_size
        self._sizes = [len(stream.dataset) for stream in streams]
        *self._begins, total = accumulate(self._sizes, initial=0)
        self._orders = torch.empty(total, dtype=torch.int64)
        self._epochs: list[int | None] = [None] * len(streams)
        # Of most streams an epoch's last batch is as large as the others: then no draw has to look.
        counts = zip(streams, self._sizes, strict=True)
        self._is_even = all(stream.num_batches * self._batch_size <= size for stream, size in counts)
        self._within = torch.arange(self._batch_size)

    @classmethod
    def of(cls, streams: Sequence[Stream]) -> "_Gather | None":
        """Return one for these streams; None where their batches do not come from memory in one call."""
        if not all(stream.is_loaded_here and stream.batch_size == streams[0].batch_size for stream in streams):
            return None
        data = JoinedData.of([stream.dataset for stream in streams])
        return None if data is None else cls(streams, data)

    def __call__(self, places: Sequence[Place | None]) -> Any:
        """Return the batches at `places`, one a row; where it is None, those of the first row that has one.

        Raises:
            NotFusedError: they are of different sizes.
        """
        size = self._batch_size if self._is_even else self._size(places)
        begins = [-1] * len(places)
        for row, place in enumerate(places):
            if place is not None:
                epoch, number = place
                if self._epochs[row] != epoch:
                    self._lay(row, epoch)
                begins[row] = self._begins[row] + number * self._batch_size
        if None in places:
            stand_in = next(begin for begin in begins if begin >= 0)
            begins = [stand_in if begin < 0 else begin for begin in begins]
        order = self._orders.index_select(0, (torch.tensor(begins)[:, None] + self._within[:size]).flatten())
        return tree_map_only(Tensor, lambda tensor: tensor.unflatten(0, (len(begins), size)), self._data[order])

    def _size(self, places: Sequence[Place | None]) -> int:
        """Return the samples of a batch."""
        numbers = [(row, place[1]) for row, place in enumerate(places) if place is not None]
        sizes = {min(self._batch_size, self._sizes[row] - number * self._batch_size) for row, number in numbers}
        if len(sizes) > 1:
            raise NotFusedError(f"batches are of different sizes in different runs: {', '.join(map(str, sizes))}")
        return sizes.pop()

    def _lay(self, row: int, epoch: int) -> None:
        """Put the order of a row's epoch in its place."""
        begin, size = self._begins[row], self._sizes[row]
        torch.add(self._streams[row].order(epoch), self._data.begins[row], out=self._orders[begin : begin + size])
        self._epochs[row] = epoch


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
            (plan.problem.name, "peek" if plan.algorithm.batch == "fresh" else "last")
            for plan in plans
            if not plan.algorithm.sees_steps
        ]
        self._unrolled = list(dict.fromkeys(plan.problem.name for plan in plans if plan.algorithm.sees_steps))

    def steps(self, live: Sequence[bool]) -> dict[str, StackedBatch]:
        """Return by problem the recorded steps that the gradient of live members differentiates.

        Raises:
            NotFusedError: they differ in more than tensors and numbers.
        """
        first = self._programs[live.index(True)]
        members = [program if is_live else first for program, is_live in zip(self._programs, live, strict=True)]
        there = [program for program in members if program is not None]
        return {name: _recorded_steps([program.problems[name] for program in there]) for name in self._unrolled}

    def __call__(self, live: Sequence[bool], steps: Mapping[str, StackedBatch]) -> list[dict[str, Any]]:
        """Return, for each batch that the gradient is averaged over, that batch and those of its pullbacks, by problem.

        A `StackedBatch`, or a list with one of each member, or its error, where they cannot be stacked; None without a
        stream.

        Args:
            live: which members take part.
            steps: what `steps` has returned, which goes along.
        """
        found = []
        for _ in range(self._count):
            entry = {self._name: self._drawn(self._name, "next", live), **steps}
            for name, how in self._below:
                if name not in entry:
                    entry[name] = self._drawn(name, how, live)
            found.append(entry)
        return found

    def _drawn(self, name: str, how: str, live: Sequence[bool]) -> StackedBatch | list[Any] | None:
        stream = self._streams.get(name)
        if stream is None:
            return None
        try:
            found: StackedBatch = getattr(stream, how)(live)
        except Exception:
            # They do not fit together, or one of them cannot be read: no stream has gone on.
            batches: list[Any] = [None] * len(live)
            for number, program in enumerate(self._programs):
                if program is not None and live[number]:
                    try:
                        batches[number] = getattr(program.problems[name].stream, how)()
                    except Exception as error:
                        batches[number] = error
            return batches
        return found

    def without(self, entries: Sequence[Mapping[str, Any]], live: Sequence[bool]) -> list[dict[str, Any]]:
        """Return what was drawn, without the batches of members that are not live any more.

        In their places are those of the first live one, so that what is computed of the others is what it is where
        they had left before.

        Args:
            entries: what was drawn.
            live: which members are left.
        """
        left: dict[int, Any] = {}
        for entry in entries:
            for name, batch in entry.items():
                # A batch that stands in two places is one.
                if id(batch) not in left:
                    left[id(batch)] = self._left(name, batch, live)
        return [{name: left[id(batch)] for name, batch in entry.items()} for entry in entries]

    def _left(self, name: str, batch: StackedBatch | list[Any] | None, live: Sequence[bool]) -> Any:
        first = live.index(True)
        places = [number if is_live else first for number, is_live in enumerate(live)]
        if isinstance(batch, list):
            if self._streams[name].shares:
                return StackedBatch(batch[first], is_shared=True)
            try:
                return StackedBatch(stacked([batch[place] for place in places]), is_shared=False)
            except NotFusedError:
                return batch
        if batch is None or batch.is_shared:
            return batch
        return StackedBatch(tree_map_only(Tensor, lambda tensor: tensor[places], batch.value), is_shared=False)


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


def _recorded_step(name: str, records: Sequence[StepRecord]) -> TakenStep:
    if any(record.lower_snapshots for record in records):
        raise NotFusedError(f"the steps of problems.{name}, which are differentiated, read other problems")
    own = [
        (list(each.theta), [*map(dict, each.state)], [batch for batch, _ in each.draws], [*map(dict, each.buffers)])
        for each in records
    ]
    theta, state, batches, buffers = stacked(own, f"the record of a step of problems.{name}")
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
    joined = torch.tensor(list(columns), dtype=torch.float64, device=theta[0].device).reshape(-1, len(records)).T
    return TakenStep(theta, state, batches, buffers, settings, joined, places)


def _arguments(name: str, key: str, values: Sequence[Any]) -> dict[int | None, tuple[float, ...]]:
    """Return the values of a hyperparameter that are to be arguments, by member: rates, which move, and what differs.

    Those of a tuple (betas) are told by their positions.
    """
    parts: dict[int | None, tuple[Any, ...]] = {None: tuple(values)}
    if all(isinstance(value, tuple) for value in values):
        parts = dict(enumerate(zip(*values, strict=True)))
    found: dict[int | None, tuple[float, ...]] = {}
    for index, numbers in parts.items():
        is_number = all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)
        if is_number and (key == "lr" or len(set(numbers)) > 1):
            found[index] = tuple(map(float, numbers))
        elif any(isinstance(each, Tensor) for each in numbers):
            raise NotFusedError(
                f"{key} of the optimizer of problems.{name}, whose steps are differentiated, is a tensor"
            )
        elif any(each != numbers[0] for each in numbers):
            raise NotFusedError(f"optimizers of problems.{name}, whose steps are differentiated, differ in {key}")
    return found
