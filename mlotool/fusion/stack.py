"""The tensors of several members in one: row k of each is member k's own parameter or buffer."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

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
    """

    def __init__(self, programs: Sequence[Program | None]) -> None:
        self._programs = list(programs)
        first = next(each for each in programs if each is not None)
        by_member = [_tensors(each or first) for each in programs]
        for each in by_member:
            _check_alike(by_member[0], each)
        self.num_parameters = sum(len(problem.own) for problem in first.engine.problems)
        self.tensors = [torch.stack([each.detach() for each in group]) for group in zip(*by_member, strict=True)]
        self._rows = [each.unbind() for each in self.tensors]
        self._bind()

    def refresh(self) -> None:
        """Take over what members have put in the place of their tensors, such as a buffer that was assigned anew."""
        for number, program in self._members():
            tensors = _tensors(program)
            for rows, tensor in zip(self._rows, tensors, strict=True):
                row = rows[number]
                if tensor.data_ptr() != row.data_ptr() and tensor is not row:
                    if tensor.shape != row.shape:
                        raise NotFusedError("a buffer of a module has changed its shape")
                    row.copy_(tensor.detach())
        self._bind()

    def is_bound(self) -> bool:
        """Return whether all members' tensors are still views of the stack."""
        return all(
            tensor.data_ptr() == rows[number].data_ptr()
            for number, program in self._members()
            for rows, tensor in zip(self._rows, _tensors(program), strict=True)
        )

    def drop(self, number: int) -> None:
        """Forget a member that has left; its row stays."""
        self._programs[number] = None

    def _members(self) -> Iterator[tuple[int, Program]]:
        for number, program in enumerate(self._programs):
            if program is not None:
                yield number, program

    def _bind(self) -> None:
        for number, program in self._members():
            rows = iter([rows[number] for rows in self._rows])
            for problem in program.engine.problems:
                for parameter in problem.own:
                    parameter.data = next(rows)
            for problem in program.engine.problems:
                if problem.slots.has_buffers:
                    problem.slots.put_buffers([next(rows) for _ in problem.slots.buffers()])


def _tensors(program: Program) -> list[Tensor]:
    problems = program.engine.problems
    found: list[Tensor] = [parameter for problem in problems for parameter in problem.own]
    return found + [buffer for problem in problems for buffer in problem.slots.buffers()]


def _check_alike(first: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    kinds, others = ([(each.shape, each.dtype, each.device) for each in tensors] for tensors in (first, other))
    if kinds != others:
        raise NotFusedError("their parameters or buffers are of other shapes, dtypes or devices")
    for tensors in (first, other):
        if not all(type(each) in (Tensor, nn.Parameter, nn.Buffer) and each.is_contiguous() for each in tensors):
            raise NotFusedError("a parameter or buffer is of an own tensor class, or has strides of its own")
        if len({each.data_ptr() for each in tensors if each.numel()}) < sum(each.numel() > 0 for each in tensors):
            raise NotFusedError("problems share a parameter or a buffer")
