"""The tensors of several members in one, row k of each being member k's own, and what else of a member's is its own."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mlotool.core.unchanged import SameForms
from mlotool.program import Program


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
        self.tensors = [torch.stack([each.detach() for each in group]) for group in zip(*by_member, strict=True)]
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
        elif [each.data_ptr() for each in tensors] != self._pointers[number] or not self._forms[number](tensors):
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
        first = next((place for place, each in enumerate(self._programs) if each is not None), None)
        # What has left before may have taken the values of this one.
        for place, each in enumerate(self._programs):
            if each is None and first is not None:
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
    for number, problem in enumerate(first.engine.problems):
        others = [(member or first).engine.problems[number] for member in members]
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
    forms = [(each.func, each.keywords.keys()) if type(each) is type(first) else None for each in losses]
    if any(form != forms[0] for form in forms):
        raise NotFusedError(f"the losses of problems.{name} are different functions, or have different settings")
    for key, value in first.keywords.items():
        values, place = [each.keywords[key] for each in losses], f"problems.{name}.loss.{key}"
        are_numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)
        if all(_equal(value, each) for each in values) and not (are_numbers and place in known):
            continue
        if not are_numbers:
            raise NotFusedError(f"the losses of problems.{name} differ in {key}, which is no number")
        stacked = torch.tensor(values, dtype=like.dtype, device=like.device)
        yield OwnValue(place, stacked, [each.keywords for each in losses])


def _frozen_parameters(name: str, modules: Sequence[nn.Module], known: Collection[str]) -> Iterator[OwnValue]:
    structures = [[(path, type(child)) for path, child in module.named_modules()] for module in modules]
    if any(each != structures[0] for each in structures):
        raise NotFusedError(f"the modules of problems.{name} are of different structures")
    for path, child in modules[0].named_modules():
        holders: list[dict[str, Any]] = [module.get_submodule(path)._parameters for module in modules]
        for key, tensor in child._parameters.items():
            if tensor is None or tensor.requires_grad:
                continue
            tensors = [holder[key] for holder in holders]
            if any(each is None or each.shape != tensor.shape for each in tensors):
                raise NotFusedError(f"a frozen parameter of problems.{name} ({path}.{key}) has different shapes")
            place = f"problems.{name}.module.{path}.{key}"
            if place in known or not all(torch.equal(tensor, each) for each in tensors):
                yield OwnValue(place, torch.stack([each.detach() for each in tensors]), holders)


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
    for problem in program.engine.problems:
        if problem.slots.has_buffers:
            problem.slots.put_buffers([next(values) for _ in problem.slots.buffers()])


def _parameters(program: Program) -> list[Tensor]:
    return [parameter for problem in program.engine.problems for parameter in problem.own]


def _buffers(program: Program) -> list[Tensor]:
    return [buffer for problem in program.engine.problems for buffer in problem.slots.buffers()]


def _tensors(program: Program) -> list[Tensor]:
    return _parameters(program) + _buffers(program)


def _check_tensors(first: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    kinds, others = ([(each.shape, each.dtype, each.device) for each in group] for group in (first, tensors))
    if kinds != others:
        raise NotFusedError("their parameters or buffers are of other shapes, dtypes or devices")
    if not all(type(each) in (Tensor, nn.Parameter, nn.Buffer) and each.is_contiguous() for each in tensors):
        raise NotFusedError("a parameter or buffer is of an own tensor class, or has strides of its own")
    pointers = [each.data_ptr() for each in tensors if each.numel()]
    if len({*pointers}) < len(pointers):
        raise NotFusedError("problems share a parameter or a buffer")
