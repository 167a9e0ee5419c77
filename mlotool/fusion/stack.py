"""The tensors of several members in one, row k of each being member k's own, and what else of a member's is its own."""

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mlotool.core.private import tree_flatten, tree_map_only, tree_unflatten
from mlotool.core.replay import RandomState
from mlotool.core.unchanged import SameForms
from mlotool.data.image_data import InMemoryDataset
from mlotool.data.language_data import TextWindows
from mlotool.data.splits import InMemoryTensors
from mlotool.problem.optimizers.rule import Hyperparameters
from mlotool.problem.problem import Problem
from mlotool.problem.streams.stream import BatchPlace, SameBatch, Stream
from mlotool.problem.trajectory import LowerSnapshot, StepRecord
from mlotool.program import Program
from mlotool.program.solution_plan import all_plans
from mlotool.program.trace import Traced


class NotFusedError(Exception):
    """Members cannot be trained as one program; the text says why, as the end of a sentence."""


def reason_of(error: Exception) -> str:
    """Return why an error, perhaps one that nobody has foreseen, keeps members from being one program.

    Example:
        >>> reason_of(NotFusedError("they have different problems")), reason_of(KeyError("a"))
        ('they have different problems', "KeyError: 'a'")
    """
    return str(error) if isinstance(error, NotFusedError) else f"{type(error).__name__}: {error}".splitlines()[0]


class Stack:
    """Parameters and buffers of several programs of equal structure, along a first axis that counts the members.

    The members' own parameters and buffers become views of it: whoever reads or writes them, a checkpoint or an
    optimizer, reads and writes the stack.

    Args:
        programs: the members, at least one; None has left, and its row holds what the first one's does.

    Raises:
        NotFusedError: their tensors differ in number, shape, dtype or device; nothing has changed.

    Attributes:
        tensors: (members, ...) each: by problem all trained parameters, then by problem all buffers.
        num_parameters: how many of them are parameters.
        reason: why members cannot be one stack any more; "" where they can.
        changes: how often code has run that may have put other objects in the place of members' tensors, or of what
            their optimizers keep. Nobody needs to look at these as long as it stays the same.
    """

    def __init__(self, programs: Sequence[Program | None]) -> None:
        self._programs, self.reason, self.changes = list(programs), "", 0
        first = next(filter(None, programs))
        by_member = [_tensors(program or first) for program in programs]
        for tensors in by_member:
            _check_tensors(by_member[0], tensors)
        self.num_parameters = len(_parameters(first))
        self.tensors = [torch.stack([tensor.detach() for tensor in group]) for group in zip(*by_member, strict=True)]
        self._rows = [[*rows] for rows in zip(*[tensor.unbind() for tensor in self.tensors], strict=True)]
        self._pointers = [[row.data_ptr() for row in rows] for rows in self._rows]
        self._forms: list[SameForms] = [SameForms([])] * len(programs)
        self._refreshed_at = 0
        for number in range(len(programs)):
            self._bind(number)

    def refresh(self) -> None:
        """Take over what members have put in the place of their tensors, by `data` or a buffer that is assigned."""
        if self._refreshed_at != self.changes:
            self._refreshed_at = self.changes
            for number in range(len(self._programs)):
                self.refresh_member(number)

    def refresh_member(self, number: int) -> None:
        """Take over what one member has put in the place of its tensors."""
        program, rows = self._programs[number], self._rows[number]
        if program is None:
            return
        tensors = _tensors(program)
        if len(tensors) != len(rows) or any(tensor is None for tensor in tensors):
            self.reason = "a buffer of a module has come or gone"
        elif [tensor.data_ptr() for tensor in tensors] != self._pointers[number] or not self._forms[number](tensors):
            if any(x.shape != y.shape or x.dtype != y.dtype for x, y in zip(rows, tensors, strict=True)):
                self.reason = "a parameter or a buffer of a module has changed its shape or dtype"
                return
            for row, tensor in zip(rows, tensors, strict=True):
                if tensor.data_ptr() != row.data_ptr() or tensor.stride() != row.stride():
                    # A copy first: both may be views of one memory.
                    row.copy_(tensor.detach().clone())
            self._bind(number)

    def buffers(self, number: int) -> list[Tensor]:
        """Return the buffers that a member has now, which need not be those of the stack."""
        program = self._programs[number]
        return [] if program is None else _buffers(program)

    def put_buffers(self, number: int, values: Sequence[Tensor]) -> None:
        """Let a member's buffers be those of the stack, with such values."""
        for row, value in zip(self._rows[number][self.num_parameters :], values, strict=True):
            row.copy_(value)
        self._bind(number)

    def drop(self, number: int) -> None:
        """Let go of a member, which keeps its values; its row takes those of the first one that is there.

        What has diverged would else go on in that row, and an operation over all rows may refuse it: one matrix with
        a NaN, and `torch.linalg.eigvalsh` raises for all.
        """
        self.refresh_member(number)
        program, self._programs[number] = self._programs[number], None
        if program is not None:
            _bind(program, [row.clone() for row in self._rows[number]])
        first = next((place for place, member in enumerate(self._programs) if member is not None), None)
        # What has left before may have taken the values of this one.
        for place, member in enumerate(self._programs):
            if member is None and first is not None:
                for row, other in zip(self._rows[place], self._rows[first], strict=True):
                    row.copy_(other)

    def _bind(self, number: int) -> None:
        if program := self._programs[number]:
            _bind(program, self._rows[number])
            self._forms[number] = SameForms(_tensors(program))


@dataclass(frozen=True)
class OwnValue:
    """A value of a member's own that a trace of another one would hold fixed: a number of a loss, a frozen parameter.

    Args:
        key: where it stands.
        values: (members, ...).
        holders: by member, the dict that has it, under the last part of the key.
    """

    key: str
    values: Tensor
    holders: Sequence[dict[str, Any]]


def own_values(members: Sequence[Program | None], known: Collection[str] = ()) -> list[OwnValue]:
    """Return the numbers of losses, and the frozen parameters, in which members differ.

    Args:
        members: None has left, and counts as the first one that is there, which is traced.
        known: keys of those in which members differed that have left meanwhile: what is computed with an axis of
            members may have other last bits than what is computed without.

    Raises:
        NotFusedError: losses differ in more than numbers, modules in their structure, or frozen parameters in their
            shapes.
    """
    first, values = next(filter(None, members)), list[OwnValue]()
    for number, problem in enumerate(first.internals.engine.problems):
        others = [(member or first).internals.engine.problems[number] for member in members]
        values += _numbers_of_losses(problem.name, [other.loss for other in others], problem.own[0], known)
        values += _frozen_parameters(problem.name, [other.module for other in others], known)
    return values


@contextmanager
def with_values(values: Sequence[OwnValue], tensors: Sequence[Tensor], member: int) -> Iterator[None]:
    """Let a member compute with other tensors, one a value and without the members' axis, in these places."""
    places = [(value.holders[member], value.key.rpartition(".")[2]) for value in values]
    kept = [holder[name] for holder, name in places]
    try:
        for (holder, name), tensor in zip(places, tensors, strict=True):
            holder[name] = tensor
        yield
    finally:
        for (holder, name), value in zip(places, kept, strict=True):
            holder[name] = value


def _numbers_of_losses(name: str, losses: Sequence[Any], like: Tensor, known: Collection[str]) -> Iterator[OwnValue]:
    first = losses[0]
    if not isinstance(first, partial):
        # A loss that is an object may hold anything: what differs there shows in the comparison with its plan.
        return
    forms = [(loss.func, loss.keywords.keys()) if type(loss) is type(first) else None for loss in losses]
    if any(form != forms[0] for form in forms):
        raise NotFusedError(f"the losses of problems.{name} are different functions, or have different settings")
    for key, value in first.keywords.items():
        values, place = [loss.keywords[key] for loss in losses], f"problems.{name}.loss.{key}"
        are_numbers = all(isinstance(setting, int | float) and not isinstance(setting, bool) for setting in values)
        if all(_equal(value, setting) for setting in values) and not (are_numbers and place in known):
            continue
        if not are_numbers:
            raise NotFusedError(f"the losses of problems.{name} differ in {key}, which is no number")
        stacked = torch.tensor(values, dtype=like.dtype, device=like.device)
        yield OwnValue(place, stacked, [loss.keywords for loss in losses])


def _frozen_parameters(name: str, modules: Sequence[nn.Module], known: Collection[str]) -> Iterator[OwnValue]:
    structures = [[(path, type(child)) for path, child in module.named_modules()] for module in modules]
    if any(structure != structures[0] for structure in structures):
        raise NotFusedError(f"the modules of problems.{name} are of different structures")
    for path, child in modules[0].named_modules():
        holders: list[dict[str, Any]] = [module.get_submodule(path)._parameters for module in modules]
        for key, tensor in child._parameters.items():
            if tensor is None or tensor.requires_grad:
                continue
            tensors = [holder[key] for holder in holders]
            if any(other is None or other.shape != tensor.shape for other in tensors):
                raise NotFusedError(f"a frozen parameter of problems.{name} ({path}.{key}) has different shapes")
            place = f"problems.{name}.module.{path}.{key}"
            if place in known or not all(torch.equal(tensor, other) for other in tensors):
                yield OwnValue(place, torch.stack([row.detach() for row in tensors]), holders)


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    equality: Any = type(a).__eq__
    # Of objects that are equal to no other one the comparison of gradients knows more.
    return equality is object.__eq__ or bool(a == b)


def _bind(program: Program, rows: Sequence[Tensor]) -> None:
    """Let a program's tensors be these."""
    values = iter(rows)
    for parameter in _parameters(program):
        parameter.data = next(values)
    for problem in program.internals.engine.problems:
        if problem.slots.has_buffers:
            problem.slots.put_buffers([next(values) for _ in problem.slots.buffers()])


def _parameters(program: Program) -> list[Tensor]:
    return [parameter for problem in program.internals.engine.problems for parameter in problem.own]


def _buffers(program: Program) -> list[Tensor]:
    return [buffer for problem in program.internals.engine.problems for buffer in problem.slots.buffers()]


def _tensors(program: Program) -> list[Tensor]:
    return _parameters(program) + _buffers(program)


def _check_tensors(first: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    kinds, others = ([(tensor.shape, tensor.dtype, tensor.device) for tensor in group] for group in (first, tensors))
    if kinds != others:
        raise NotFusedError("their parameters or buffers are of other shapes, dtypes or devices")
    if not all(type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.is_contiguous() for tensor in tensors):
        raise NotFusedError("a parameter or buffer is of an own tensor class, or has strides of its own")
    pointers = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
    if len({*pointers}) < len(pointers):
        raise NotFusedError("problems share a parameter or a buffer")


_Places = dict[int, BatchPlace]

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
    if any(structure != structures[0] for structure in structures):
        raise UnlikeBatchesError(f"{key} have different keys or containers in different runs")
    return tree_unflatten([_stacked_leaf(leaves, key) for leaves in zip(*columns, strict=True)], structures[0])


def _stacked_leaf(leaves: Sequence[Any], key: str) -> Any:
    first = leaves[0]
    if not isinstance(first, Tensor):
        # Two numbers that are NaN are no different values here.
        if not all(leaf is first or leaf == first or (leaf != leaf and first != first) for leaf in leaves):
            raise UnlikeBatchesError(f"{key} have different values in different runs: {first!r:.50}")
        return first
    kinds = {(leaf.dtype, leaf.device, leaf.shape) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves}
    if len(kinds) > 1:
        raise UnlikeBatchesError(f"{key} have different shapes, dtypes or devices in different runs")
    return torch.stack([*leaves])


class StackedStream:
    """The streams of one problem of M members.

    Each stream goes on as by its own `next`: its position, its `last` batch and its checkpoints are right at any time.
    A row may be without a stream (None) where its member has left; of rows that are not read nobody reads the samples:
    they are those of the first one that is.

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
        >>> stream.next([0, 1]).value.shape, stream.next([0]).value[:, 0]
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
        self._joined = None if self.shares or not _read_by_position(there) else JoinedData.of(self._streams)
        # The last two that were read: often what comes next and what came last.
        self._kept: deque[tuple[_Places, StackedBatch]] = deque(maxlen=2)

    def next(self, rows: Sequence[int]) -> StackedBatch:
        """Return the batches that `next` of each row's stream would return; each of these streams goes on.

        Args:
            rows: those whose members are there, at least one.

        Raises:
            NotFusedError: the batches of the rows do not fit together; no stream has gone on.
        """
        batch = self.peek(rows)
        if not self._repeats_another:
            for row in rows:
                self._streams[row].draw()  # type: ignore[union-attr]
        return batch

    def peek(self, rows: Sequence[int]) -> StackedBatch:
        """Return the batches that `next` will return; the streams stay where they are. As for `next`."""
        return self.last(rows) if self._repeats_another else self._read(rows, "next_place", Stream.peek)

    def last(self, rows: Sequence[int]) -> StackedBatch:
        """Return the batches that `next` returned last; before the first, those it will return. As for `next`."""
        return self._read(rows, "last_place", Stream.last)

    def repeated(self) -> "StackedStream":
        """Return what repeats the last batch of this one, as `SameBatch` does; it reads nothing again."""
        twin = copy.copy(self)
        twin._repeats_another = True
        return twin

    def _read(self, rows: Sequence[int], attribute: str, read: Callable[[Stream], Any]) -> StackedBatch:
        """Return the batches at the places that an attribute of each stream tells, which `read` returns of it."""
        places: _Places = {row: getattr(self._streams[row], attribute) for row in rows}
        for kept, batch in self._kept:
            if kept == places:
                return batch
        batch = self._loaded(places, read)
        self._kept.append((places, batch))
        return batch

    def _loaded(self, places: _Places, read: Callable[[Stream], Any]) -> StackedBatch:
        first = next(iter(places))
        if self.shares:
            if len({*places.values()}) > 1:
                raise NotFusedError("runs that share their batches stand at different places of the data")
            return StackedBatch(read(self._streams[first]), is_shared=True)  # type: ignore[arg-type]
        # Those that have left get what the first one has that is there.
        sources = [row if row in places else first for row in range(len(self._streams))]
        if self._joined is not None and not self._joined.is_current():
            self._joined = None
        if self._joined is not None:
            return StackedBatch(self._first.moved(self._gathered(self._joined, sources, places)), is_shared=False)
        # Each batch is read once for all that have the same.
        known: dict[Any, Any] = {}
        for row, place in places.items():
            key = self._twins[row], place
            if key not in known:
                known[key] = read(self._streams[row])  # type: ignore[arg-type]
        return StackedBatch(stacked([known[self._twins[row], places[row]] for row in sources]), is_shared=False)

    def _gathered(self, data: "JoinedData", sources: Sequence[int], places: _Places) -> Any:
        """Return the batches of some rows, which one call of a data set reads."""
        indices = [self._streams[row].indices(*places[row]) for row in sources]  # type: ignore[union-attr]
        if len(sizes := {*map(len, indices)}) > 1:
            raise UnlikeBatchesError(f"batches are of different sizes in different runs: {', '.join(map(str, sizes))}")
        batch = data.read(indices, sources)
        return tree_map_only(Tensor, lambda tensor: tensor.unflatten(0, (len(indices), -1)), batch)


# Of the tensors of different data sets that are joined, which are then in memory twice.
MAX_JOINED_BYTES = 2**30


class JoinedData:
    """The samples of several data sets in memory, one after the other, so that one gather reads batches of several.

    Args:
        datasets: one a row, of one kind of ours; several rows may have the same.
        whole: a data set with the samples of all that are different.
        begins: by row, where its samples begin there.
    """

    def __init__(self, datasets: Sequence[Any], whole: Any, begins: Sequence[int]) -> None:
        self._whole, self._begins = whole, torch.tensor(begins)
        different = {id(dataset): dataset for dataset in datasets}.values()
        # Of one data set nothing is a copy.
        self._copied = [part for dataset in different for part in _parts(vars(dataset))] if len(different) > 1 else []
        self._tensors = [part for _, _, part in self._copied if isinstance(part, Tensor)]
        self._versions = [part._version for part in self._tensors]

    @classmethod
    def of(cls, streams: Sequence[Stream | None]) -> "JoinedData | None":
        """Return the data of streams, of which those that are None read nothing; None where they do not fit together.

        Args:
            streams: as for `_read_by_position`.
        """
        first = next(filter(None, streams)).dataset
        datasets = [first if stream is None else stream.dataset for stream in streams]
        different = list({id(dataset): dataset for dataset in datasets}.values())
        if len(different) == 1:
            return cls(datasets, first, [0] * len(datasets))
        columns, structures = zip(*(tree_flatten(_columns(dataset)) for dataset in different), strict=True)
        kinds = {tuple(map(_kind_of_column, group)) for group in columns}
        settings = [getattr(dataset, "normalization", getattr(dataset, "length", None)) for dataset in different]
        num_bytes = sum(column.nbytes for group in columns for column in group if column is not None)
        are_alike = len(kinds) == 1 and all(structure == structures[0] for structure in structures)
        if not are_alike or any(setting != settings[0] for setting in settings) or num_bytes > MAX_JOINED_BYTES:
            return None
        joined = [None if group[0] is None else torch.cat(group) for group in zip(*columns, strict=True)]
        begins = dict(zip(map(id, different), accumulate(map(len, different), initial=0), strict=False))
        whole = _rebuilt(different, tree_unflatten(joined, structures[0]))
        return cls(datasets, whole, [begins[id(dataset)] for dataset in datasets])

    def is_current(self) -> bool:
        """Say whether the data sets have the tensors, with the values, that were joined."""
        # Each tick comes here, with all tensors of all data sets.
        for holder, name, part in self._copied:
            if holder.get(name) is not part:
                return False
        return self._versions == [part._version for part in self._tensors]

    def read(self, indices: Sequence[Tensor], rows: Sequence[int]) -> dict[str, Any]:
        """Return one batch, of some rows one after the other.

        Args:
            indices: of each of these rows, the positions (b,) of its samples in its own data set.
            rows: their numbers.
        """
        own = torch.stack(list(indices))
        places = own + self._begins[list(rows), None] if self._copied else own
        return {**self._whole.__getitems__(places.flatten()), "index": own.flatten()}


def _parts(holder: dict[Any, Any]) -> Iterator[tuple[dict[Any, Any], Any, Any]]:
    """Yield the tensors in a dict and in the dicts in it, and what may be in the place of some, with dict and name."""
    for name, part in holder.items():
        if part is None or isinstance(part, Tensor | dict):
            yield holder, name, part
        if isinstance(part, dict):
            yield from _parts(part)


def _columns(data: Any) -> dict[str, Any]:
    """Return the tensors that a data set is made of."""
    if isinstance(data, InMemoryTensors):
        return data.values
    names = ("tokens", "starts", "domain") if isinstance(data, TextWindows) else _OF_IMAGES
    return {name: getattr(data, name) for name in names}


_OF_IMAGES = ("images", "target", "clean_target", "extra")


def _kind_of_column(tensor: Tensor | None) -> object:
    if tensor is None:
        return None
    # A tensor of inference mode counts no changes; what is no plain tensor is like no other one.
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_inference()
    return (tensor.shape[1:], tensor.dtype, tensor.device) if is_plain else object()


def _rebuilt(datasets: Sequence[Any], columns: dict[str, Any]) -> Any:
    """Return a data set like the first one with the samples of all."""
    first = datasets[0]
    if isinstance(first, InMemoryTensors):
        return InMemoryTensors(columns)
    if isinstance(first, TextWindows):
        offsets = accumulate((len(dataset.tokens) for dataset in datasets), initial=0)
        starts = [dataset.starts + offset for dataset, offset in zip(datasets, offsets, strict=False)]
        return TextWindows(**{**columns, "starts": torch.cat(starts)}, length=first.length)
    return InMemoryDataset(**columns, normalization=first.normalization)


def stacked_streams(programs: Sequence[Program | None], shares: Mapping[str, bool]) -> dict[str, StackedStream]:
    """Return the streams of all problems that have some; one that repeats another's last batch reads nothing again.

    Args:
        programs: those of the members; None has left.
        shares: by problem, what `StackedStream.shares` was when the group began; of others these streams decide.
    """
    made: dict[tuple[int, ...], StackedStream] = {}
    by_name, first = {}, next(filter(None, programs))
    for name in first.problems:
        rows = [None if program is None else program.problems[name].stream for program in programs]
        if any(stream is not None for stream in rows):
            sources = [_source(stream) for stream in rows]
            key = tuple(map(id, sources))
            if key not in made:
                made[key] = StackedStream(sources, shares=shares.get(name))
            is_repeated = any(isinstance(stream, SameBatch) for stream in rows)
            by_name[name] = made[key].repeated() if is_repeated else made[key]
    return by_name


def _source(stream: Stream | SameBatch | None) -> Stream | None:
    return stream.stream if isinstance(stream, SameBatch) else stream


def _read_by_position(streams: Sequence[Stream]) -> bool:
    """Say whether all streams read batches of one size from data sets in memory, by the samples' positions alone."""
    datasets: list[Any] = [stream.dataset for stream in streams]
    kind = type(datasets[0])
    return (
        kind in (InMemoryDataset, InMemoryTensors, TextWindows)
        and all(type(data) is kind for data in datasets)
        and not any(data.seeded or not isinstance(data.images, Tensor) for data in datasets if kind is InMemoryDataset)
        and all(stream.is_read_by_position for stream in streams)
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
        plans = [*all_plans(first.internals.engine.solutions[traced.number])]
        self._below = [
            (plan.problem.name, StackedStream.peek if plan.algorithm.batch == "fresh" else StackedStream.last)
            for plan in plans
            if not plan.algorithm.sees_steps
        ]
        self._unrolled = list(dict.fromkeys(plan.problem.name for plan in plans if plan.algorithm.sees_steps))

    def __call__(self, there: Sequence[int]) -> list[dict[str, StackedBatch | None]]:
        """Return, for each batch that the gradient is averaged over, that batch and those of its pullbacks, by problem.

        Of a problem whose recorded steps are differentiated it is these; None of one without a stream.

        Args:
            there: the members that take part.

        Raises:
            NotFusedError: what they have cannot be stacked; some streams may have gone on.
        """
        members = [self._programs[place if place in there else there[0]] for place in range(len(self._programs))]
        steps = {name: _recorded_steps([member.problems[name] for member in members]) for name in self._unrolled}  # type: ignore[union-attr]
        entries = []
        for _ in range(self._count):
            entry = {self._name: self._read(self._name, StackedStream.next, there), **steps}
            for name, read in self._below:
                if name not in entry:
                    entry[name] = self._read(name, read, there)
            entries.append(entry)
        return entries

    def _read(
        self, name: str, read: Callable[[StackedStream, Sequence[int]], StackedBatch], there: Sequence[int]
    ) -> StackedBatch | None:
        stream = self._streams.get(name)
        return None if stream is None else read(stream, there)


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


# A hyperparameter by name, and its position in one that is a tuple.
NumberPlace = tuple[str, int | None]


class TakenStep(NamedTuple):
    """One step, without random numbers and lower problems, of which it has none.

    Args:
        theta: the parameters before it.
        state: the optimizer's state before it, one mapping per parameter.
        batches: of its gradient.
        buffers: before each evaluation; empty where there are none.
        settings: hyperparameters, one mapping per parameter.
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
        (list(step.theta), [*map(dict, step.state)], [batch for batch, _ in step.draws], [*map(dict, step.buffers)])
        for step in records
    ]
    theta, state, batches, buffers = stacked(contents, f"the recorded steps of problems.{name}")
    settings = [dict(rates) for rates in records[0].hyperparameters]
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
        is_number = all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
        if is_number and (key == "lr" or len(set(numbers)) > 1):
            arguments[index] = tuple(map(float, numbers))
        elif any(isinstance(number, Tensor) or number != numbers[0] for number in numbers):
            raise NotFusedError(f"optimizers of problems.{name}, whose steps are differentiated, differ in {key}")
    return arguments
