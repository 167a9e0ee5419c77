"""Optimizer steps of the same problem of several members, by one call of a kernel where they have the same settings."""

import itertools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from mlotool.fusion.stacked_gradients import Stacked
from mlotool.problem.optimizers.optimizer_step import KernelGroup, take_steps
from mlotool.problem.optimizers.rule import COUNTER, Hyperparameters
from mlotool.problem.problem import Problem
from mlotool.program.prepared_step import stepped

Stepped = list[Tensor | Exception | None]
"""Of each member, the norm of its gradient where that is clipped, or the error of its step."""

_Groups = list[KernelGroup]
"""Those of one optimizer."""

_VECTOR_BYTES = 64
"""A multiple of the size of a CPU's vector registers."""


class StackedSteps:
    """Takes the steps of one problem of all members of a stack, with the bits of `Problem.step`.

    Where all have one kind of optimizer with the same settings, their parameters and what the optimizers keep are rows
    of one tensor each, and a kernel is called once on these, however many members there are. Else each steps by itself.

    Args:
        problems: of each member; None has left.
        parameters: (members, ...) each; their rows are the members' own.
        changes: returns another number where optimizers, or what they keep, may be others than at the last step; they
            may always be, where it is None.

    Attributes:
        is_joint: whether the last step was taken by kernels alone, which run nobody's code.
    """

    def __init__(
        self,
        problems: Sequence[Problem | None],
        parameters: Sequence[Tensor],
        changes: Callable[[], int] | None = None,
    ) -> None:
        self._problems, self._parameters = list(problems), list(parameters)
        # A kernel may round what does not fill a vector register in another way: then no bit may depend on a neighbour.
        self._are_whole = [each[0].numel() * each.element_size() % _VECTOR_BYTES == 0 for each in parameters]
        self._changes = changes or itertools.count().__next__
        self._looked_at = -1
        self.is_joint = False
        # By name of a state and position of its parameter, that of all members, and its rows.
        self._kept: dict[tuple[str, int], tuple[Tensor, Sequence[Tensor]]] = {}
        # By member, the groups of its optimizer that the joint ones are made of, and the steps that it had taken then.
        self._groups: list[_Groups] = []
        self._num_steps: list[int] = []
        self._joint: _Groups | None = None

    def drop(self, number: int) -> None:
        """Let go of a member that has left, whose optimizer keeps what it has.

        Its row takes the values of the first member's: what has diverged would else move on in it.
        """
        problem, self._problems[number] = self._problems[number], None
        there = [each for each, other in enumerate(self._problems) if other is not None]
        for (name, place), (_, rows) in self._kept.items():
            if problem is not None and problem.optimizer is not None:
                state = problem.optimizer.state.get(problem.own[place], {})
                if state.get(name) is rows[number]:
                    state[name] = rows[number].clone()
            for each in set(range(len(rows))).difference(there) if there else ():
                rows[each].copy_(rows[there[0]])

    def __call__(
        self,
        numbers: Sequence[int],
        stacked: Stacked,
        hyperparameters: Sequence[Sequence[Hyperparameters] | None],
        contexts: Sequence[AbstractContextManager[None]] | None = None,
    ) -> Stepped:
        """Take one step of some members.

        Args:
            numbers: which.
            stacked: the gradients of all.
            hyperparameters: of each of these members, those that another problem gives.
            contexts: of each of these members, in which its step is taken by itself; None where no optimizer draws
                random numbers.
        """
        gradient = [each for each in stacked.gradient if each is not None]
        # The rows of members that do not step are to stay.
        are_all = len(numbers) == sum(problem is not None for problem in self._problems)
        is_plain = contexts is None and not any(hyperparameters) and len(gradient) == len(stacked.gradient)
        groups = self._joint_groups(numbers) if is_plain and are_all else None
        self.is_joint = groups is not None
        if groups is not None:
            slopes = [[gradient[position] for position in group.positions] for group in groups]
            take_steps([(group, self._parts(own, group.positions)) for group, own in zip(groups, slopes, strict=True)])
            return [_advanced(self._problem(number)) for number in numbers]
        rows, norms = stacked.gradients(), Stepped()
        for place, number in enumerate(numbers):
            try:
                with nullcontext() if contexts is None else contexts[place]:
                    norms.append(stepped(self._problem(number), rows[number], hyperparameters[place]))
            except Exception as error:
                norms.append(error)
        return norms

    def _problem(self, number: int) -> Problem:
        problem = self._problems[number]
        assert problem is not None
        return problem

    def _joint_groups(self, numbers: Sequence[int]) -> _Groups | None:
        """Return the groups that step all members at once; None where each has groups of its own."""
        problems = [self._problem(number) for number in numbers]
        changes, groups, is_known = self._changes(), self._groups, len(problems) == len(self._groups)
        if changes != self._looked_at or not is_known:
            groups = [each for problem in problems if (each := problem.optimizer_step.kernel_groups()) is not None]
            if len(groups) < len(problems):
                return None
            # A member's list is another one where its optimizer, or what that keeps, has been replaced.
            is_known = is_known and all(map(operator.is_, groups, self._groups))
            self._looked_at = changes
        # Some may have taken steps by themselves since, by which an optimizer may count.
        since = map(operator.sub, [problem.num_steps for problem in problems], self._num_steps)
        if not is_known or len(set(since)) > 1:
            self._groups, self._num_steps = groups, [problem.num_steps for problem in problems]
            joint = (
                [self._group(numbers, alike) for alike in zip(*groups, strict=True)] if _are_alike(groups) else [None]
            )
            self._joint = None if None in joint else joint  # type: ignore[assignment]
        elif self._joint is not None and not _are_alike(groups):
            # A scheduler, or who else sets rates, has moved some of them.
            return None
        return self._joint

    def _group(self, numbers: Sequence[int], groups: Sequence[KernelGroup]) -> KernelGroup | None:
        """Return the group of all members; None where they have taken different numbers of steps."""
        first, one = groups[0], numbers[0]
        kept = {
            name: [self._stacked(name, place, numbers, groups) for place in range(len(first.positions))]
            for name in first.vectors
        }
        counts = kept.pop(COUNTER, [])
        if any(bool((count != count[one])[list(numbers)].any()) for count in counts):
            return None
        vectors = {name: self._parts(tensors, first.positions) for name, tensors in kept.items()}
        if counts:
            # A kernel takes one count a tensor.
            sizes = [1 if self._are_whole[position] else len(self._problems) for position in first.positions]
            vectors[COUNTER] = [count[one] for count, size in zip(counts, sizes, strict=True) for _ in range(size)]
        parameters = self._parts([self._parameters[position] for position in first.positions], first.positions)
        return replace(first, parameters=parameters, vectors=vectors, counts=counts)

    def _stacked(self, name: str, place: int, numbers: Sequence[int], groups: Sequence[KernelGroup]) -> Tensor:
        """Return what the members' optimizers keep as one tensor, whose rows are what they keep from now on.

        Args:
            name: of the state.
            place: of its parameter in the groups.
            numbers: the members.
            groups: of each of them.
        """
        key = name, groups[0].positions[place]
        tensors = [group.vectors[name][place] for group in groups]
        whole, rows = self._kept.get(key, (None, ()))
        if whole is None or any(tensor is not rows[number] for number, tensor in zip(numbers, tensors, strict=True)):
            by_number = dict(zip(numbers, tensors, strict=True))
            whole = torch.stack([by_number.get(number, tensors[0]) for number in range(len(self._problems))])
            self._kept[key] = whole, (rows := whole.unbind())
            for number, group in zip(numbers, groups, strict=True):
                optimizer = self._problem(number).optimizer
                assert optimizer is not None
                group.vectors[name][place] = rows[number]
                optimizer.state[group.parameters[place]][name] = rows[number]
        return whole

    def _parts(self, tensors: Sequence[Tensor], positions: Sequence[int]) -> list[Tensor]:
        """Return tensors of all members, one a parameter at some position, or their rows."""
        parts: list[Tensor] = []
        for tensor, position in zip(tensors, positions, strict=True):
            whole = tensor.contiguous()
            parts += [whole] if self._are_whole[position] else whole.unbind()
        return parts


def _are_alike(groups: Sequence[_Groups]) -> bool:
    """Return whether the optimizers of members have the same settings now, for the same parameters."""
    return len({tuple((each.kind(), *each.positions) for each in own) for own in groups}) == 1


def _advanced(problem: Problem) -> Exception | None:
    try:
        problem.advance()
    except Exception as error:
        return error
    return None
