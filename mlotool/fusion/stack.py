"""The tensors of several members in one: row k of each is member k's own parameter or buffer."""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from mlotool.core.unchanged import SameForms
from mlotool.fusion.errors import NotFusedError
from mlotool.program import Program


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
        first = next(each for each in programs if each is not None)
        by_member = [_tensors(each or first) for each in programs]
        for each in by_member:
            _check_alike(by_member[0], each)
        self._places: dict[str, slice] = {}
        self.num_parameters = 0
        for problem in first.engine.problems:
            begin, self.num_parameters = self.num_parameters, self.num_parameters + len(problem.own)
            self._places[problem.name] = slice(begin, self.num_parameters)
        self.tensors = [torch.stack([each.detach() for each in group]) for group in zip(*by_member, strict=True)]
        self._rows = [each.unbind() for each in self.tensors]
        self._pointers = [[rows[number].data_ptr() for rows in self._rows] for number in range(len(self._programs))]
        # What is trained stays the same objects; buffers may be assigned anew.
        self._own = [_parameters(each or first) for each in programs]
        self._same_forms: list[SameForms] = []
        for number in range(len(self._programs)):
            program = self._programs[number]
            if program is not None:
                _bind(program, [each[number] for each in self._rows])
            self._same_forms.append(SameForms(_tensors(program or first)))
        self._refreshed_at = 0
        self._look_at_all()

    def parameters(self, name: str) -> list[Tensor]:
        """Return the trained parameters of a problem, (members, ...) each."""
        return self.tensors[self._places[name]]

    def refresh(self) -> None:
        """Take over what members have put in the place of their tensors, by `data` or a buffer that is assigned."""
        if self._refreshed_at == self.changes:
            return
        self._refreshed_at = self.changes
        tensors = self._of_all()
        if _pointers(tensors) == self._all_pointers and self._all_forms(tensors):
            return
        for number, _ in self._members():
            self.refresh_member(number)
        self._look_at_all()

    def refresh_member(self, number: int) -> None:
        """Take over what one member has put in the place of its tensors."""
        program = self._programs[number]
        if program is None:
            return
        buffers = _buffers(program)
        tensors = self._own[number] + buffers
        if len(tensors) != len(self._rows) or any(each is None for each in buffers):
            self.reason = "a buffer of a module has come or gone"
            return
        if [*map(Tensor.data_ptr, tensors)] == self._pointers[number] and self._same_forms[number](tensors):
            return
        rows = [each[number] for each in self._rows]
        if any(x.shape != y.shape or x.dtype != y.dtype for x, y in zip(rows, tensors, strict=True)):
            self.reason = "a parameter or a buffer of a module has changed its shape or dtype"
            return
        for row, tensor in zip(rows, tensors, strict=True):
            if tensor.data_ptr() != row.data_ptr() or tensor.stride() != row.stride():
                # A copy first: both may be views of one memory.
                row.copy_(tensor.detach().clone())
        _bind(program, rows)
        self._same_forms[number] = SameForms(_tensors(program))

    def buffers(self, number: int) -> list[Tensor]:
        """Return the buffers that a member has now, which need not be those of the stack."""
        program = self._programs[number]
        assert program is not None
        return _buffers(program)

    def put_buffers(self, number: int, values: Sequence[Tensor]) -> None:
        """Let a member's buffers be those of the stack, with such values."""
        program = self._programs[number]
        assert program is not None
        rows = [each[number] for each in self._rows]
        for row, value in zip(rows[self.num_parameters :], values, strict=True):
            row.copy_(value)
        _bind(program, rows)

    def drop(self, number: int) -> None:
        """Let go of a member, which keeps its values; its row takes those of the first one that is there.

        What has diverged would else go on in that row, and an operation over all rows may refuse it: one matrix with
        a NaN, and `torch.linalg.eigvalsh` raises for all.
        """
        self.refresh_member(number)
        program, self._programs[number] = self._programs[number], None
        rows = [each[number] for each in self._rows]
        if program is not None:
            _bind(program, [row.clone() for row in rows])
        self._fill(number)
        # What has left before may have taken the values of this one.
        for other, each in enumerate(self._programs):
            if each is None and other != number:
                self._fill(other)
        self._look_at_all()

    def _look_at_all(self) -> None:
        """Remember the tensors of all members, so that one look at all of them is enough where nothing changes."""
        if self.reason:
            return
        programs = [program for _, program in self._members()]
        self._all_parameters = [parameter for program in programs for parameter in _parameters(program)]
        self._all_problems = [problem for program in programs for problem in program.engine.problems]
        tensors = self._of_all()
        self._all_pointers, self._all_forms = _pointers(tensors), SameForms(tensors)

    def _of_all(self) -> list[Tensor]:
        slots = [each.slots for each in self._all_problems]
        return [*self._all_parameters, *chain.from_iterable([each.buffers() for each in slots if each.has_buffers])]

    def _fill(self, number: int) -> None:
        """Let the row of a member that has left be that of the first one that is there."""
        first = next((other for other, _ in self._members()), None)
        if first is not None:
            for rows in self._rows:
                rows[number].copy_(rows[first])

    def _members(self) -> Iterator[tuple[int, Program]]:
        for number, program in enumerate(self._programs):
            if program is not None:
                yield number, program


def _bind(program: Program, rows: Sequence[Tensor]) -> None:
    """Let a program's tensors be these."""
    places = iter(rows)
    for problem in program.engine.problems:
        for parameter in problem.own:
            parameter.data = next(places)
    for problem in program.engine.problems:
        if problem.slots.has_buffers:
            problem.slots.put_buffers([next(places) for _ in problem.slots.buffers()])


def _buffers(program: Program) -> list[Tensor]:
    return [buffer for problem in program.engine.problems for buffer in problem.slots.buffers()]


def _tensors(program: Program) -> list[Tensor]:
    return _parameters(program) + _buffers(program)


def _pointers(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return where the memory of tensors begins; -1 of a buffer that is None."""
    return [-1 if each is None else each.data_ptr() for each in tensors]


def _parameters(program: Program) -> list[Tensor]:
    return [parameter for problem in program.engine.problems for parameter in problem.own]


def _check_alike(first: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    kinds, others = ([(each.shape, each.dtype, each.device) for each in tensors] for tensors in (first, other))
    if kinds != others:
        raise NotFusedError("their parameters or buffers are of other shapes, dtypes or devices")
    for tensors in (first, other):
        if not all(type(each) in (Tensor, nn.Parameter, nn.Buffer) and each.is_contiguous() for each in tensors):
            raise NotFusedError("a parameter or buffer is of an own tensor class, or has strides of its own")
        if len({each.data_ptr() for each in tensors if each.numel()}) < sum(each.numel() > 0 for each in tensors):
            raise NotFusedError("problems share a parameter or a buffer")
