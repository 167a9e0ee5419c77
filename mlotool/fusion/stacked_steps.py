"""Optimizer steps of the same problem of several members, by as few calls of a kernel as they have settings."""

import itertools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mlotool.fusion.stacked_gradients import Stacked
from mlotool.problem.optimizers.fused_step import KernelGroup, KernelStep, take_steps
from mlotool.problem.optimizers.rule import COUNTER, Hyperparameters
from mlotool.problem.problem import Problem
from mlotool.program.gradient_plan import Gradient
from mlotool.program.prepared_step import stepped

OwnStep = tuple[Problem, Gradient, Sequence[Hyperparameters] | None]
"""A problem, its gradient before clipping, and hyperparameters by parameter, where another problem gives some."""

Stepped = list[Tensor | Exception | None]
"""Of each member, the norm of its gradient where that is clipped, or the error of its step."""

_Groups = list[KernelGroup]
"""Those of one optimizer."""

_VECTOR_BYTES = 64
"""A multiple of the size of a CPU's vector registers."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a kernel that is a step of a group of all members' optimizers.

    Args:
        group: with tensors of all members.
        are_whole: by parameter, whether it is one tensor of all members, or one for each.
    """

    group: KernelGroup
    are_whole: list[bool]

    def along(self, gradient: Sequence[Tensor]) -> KernelStep:
        """Return the step along a gradient, (members, ...) each."""
        given = [gradient[position] for position in self.group.positions]
        return self.group, _parts(given, self.are_whole)


class StackedSteps:
    """Takes the steps of one problem of all members of a stack, with the bits of `Problem.step`.

    Where all have one kind of optimizer with the same settings, their parameters and what the optimizers keep are rows
    of one tensor each, and a kernel is called once on these, however many members there are. Else it is called with
    the tensors of each member, once for all that have the same settings.

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
        self._changes = changes or itertools.count().__next__
        self._looked_at = -1
        self.is_joint = False
        self._kept: dict[tuple[str, int], tuple[Tensor, Sequence[Tensor]]] = {}
        # By member, the groups of its optimizer that the calls are made of.
        self._groups: list[_Groups] = []
        self._calls: list[_Call] | None = None
        # By member, the steps that it had taken when they were made.
        self._num_steps: list[int] = []

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
        given: Sequence[Sequence[Hyperparameters] | None],
        contexts: Sequence[AbstractContextManager[None]] | None = None,
    ) -> Stepped:
        """Take one step of some members.

        Args:
            numbers: which.
            stacked: the gradients of all.
            given: of each of these members, hyperparameters that another problem gives.
            contexts: of each of these members, in which its step is taken by itself; None where no optimizer draws
                random numbers.
        """
        gradient = [each for each in stacked.gradient if each is not None]
        is_plain = contexts is None and not any(given) and len(gradient) == len(stacked.gradient)
        calls = self._joint(numbers) if is_plain else None
        self.is_joint = calls is not None
        if calls is not None:
            take_steps([call.along(gradient) for call in calls])
            return [_advanced(self._problem(number)) for number in numbers]
        rows = stacked.gradients()
        steps = [(self._problem(number), rows[number], own) for number, own in zip(numbers, given, strict=True)]
        return step_together(steps, contexts)

    def _problem(self, number: int) -> Problem:
        found = self._problems[number]
        assert found is not None
        return found

    def _joint(self, numbers: Sequence[int]) -> list[_Call] | None:
        """Return the calls that step all members at once; None where each has calls of its own."""
        if len(numbers) < sum(each is not None for each in self._problems):
            # The rows of the others are to stay.
            return None
        problems = [self._problem(number) for number in numbers]
        changes, groups, is_known = self._changes(), self._groups, len(problems) == len(self._groups)
        if changes != self._looked_at or not is_known:
            groups = [found for each in problems if (found := each.optimizer_step.kernel_groups()) is not None]
            if len(groups) < len(problems):
                return None
            # A member's list is another one where its optimizer, or what that keeps, has been replaced.
            is_known = is_known and all(map(operator.is_, groups, self._groups))
            self._looked_at = changes
        # Some may have taken steps by themselves since, by which an optimizer may count.
        since = map(operator.sub, [each.num_steps for each in problems], self._num_steps)
        if not is_known or len(set(since)) > 1:
            self._groups, self._calls = groups, self._found(numbers, groups)
            self._num_steps = [each.num_steps for each in problems]
        elif self._calls is not None and not _are_alike(groups):
            # A scheduler, or who else sets rates, has moved some of them.
            return None
        return self._calls

    def _found(self, numbers: Sequence[int], groups: Sequence[_Groups]) -> list[_Call] | None:
        calls: list[_Call] = []
        if not _are_alike(groups):
            return None
        for alike in zip(*groups, strict=True):
            if (group := self._group(numbers, alike)) is None:
                return None
            calls.append(_Call(group, self._are_whole(group)))
        return calls

    def _group(self, numbers: Sequence[int], groups: Sequence[KernelGroup]) -> KernelGroup | None:
        """Return the group of all members; None where they have taken different numbers of steps."""
        first, one = groups[0], numbers[0]
        kept = {
            name: [self._rows(name, position, numbers, groups) for position in range(len(first.positions))]
            for name in first.vectors
        }
        counts = [whole for whole, _ in kept.get(COUNTER, [])]
        if any(bool((count != count[one])[list(numbers)].any()) for count in counts):
            return None
        are_whole = self._are_whole(first)
        parameters = [self._parameters[position] for position in first.positions]
        vectors = {
            name: _parts([whole for whole, _ in found], are_whole) for name, found in kept.items() if name != COUNTER
        }
        if counts:
            # A kernel takes one count a tensor.
            sizes = [1 if is_whole else len(self._problems) for is_whole in are_whole]
            vectors[COUNTER] = [count[one] for count, size in zip(counts, sizes, strict=True) for _ in range(size)]
        return replace(first, parameters=_parts(parameters, are_whole), vectors=vectors, counts=counts)

    def _are_whole(self, group: KernelGroup) -> list[bool]:
        """Return by parameter whether rows fill vector registers, so that no bit depends on their neighbours.

        A kernel may round what does not fill one in another way.
        """
        rows = [self._parameters[position][0] for position in group.positions]
        return [row.numel() * row.element_size() % _VECTOR_BYTES == 0 for row in rows]

    def _rows(
        self, name: str, position: int, numbers: Sequence[int], groups: Sequence[KernelGroup]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return what the members' optimizers keep as one tensor, and its rows, which are what they keep from now on.

        Args:
            name: of the state.
            position: of its parameter in the groups.
            numbers: the members.
            groups: of each of them.
        """
        place = groups[0].positions[position]
        own = [group.vectors[name][position] for group in groups]
        if (name, place) in self._kept:
            whole, rows = self._kept[name, place]
            if all(tensor is rows[number] for number, tensor in zip(numbers, own, strict=True)):
                return whole, rows
        by_number = dict(zip(numbers, own, strict=True))
        whole = torch.stack([by_number.get(number, own[0]) for number in range(len(self._problems))])
        rows = whole.unbind()
        for number, group in zip(numbers, groups, strict=True):
            optimizer = self._problem(number).optimizer
            assert optimizer is not None
            group.vectors[name][position] = rows[number]
            optimizer.state[group.parameters[position]][name] = rows[number]
        self._kept[name, place] = whole, rows
        return whole, rows


def _are_alike(groups: Sequence[_Groups]) -> bool:
    """Return whether the optimizers of members have the same settings now, for the same parameters."""
    return len({tuple((each.kind(), *each.positions) for each in found) for found in groups}) == 1


def _parts(tensors: Sequence[Tensor], are_whole: Sequence[bool]) -> list[Tensor]:
    """Return tensors of all members, or their rows."""
    found: list[Tensor] = []
    for tensor, is_whole in zip(tensors, are_whole, strict=True):
        whole = tensor if tensor.is_contiguous() else tensor.contiguous()
        found += [whole] if is_whole else whole.unbind()
    return found


def _advanced(problem: Problem) -> Exception | None:
    try:
        problem.advance()
    except Exception as error:
        return error
    return None


def step_together(
    steps: Sequence[OwnStep],
    contexts: Sequence[AbstractContextManager[None]] | None = None,
) -> Stepped:
    """Take one step of each problem, with the bits of `Problem.step`.

    Args:
        steps: of several members.
        contexts: of each, in which its step is taken by itself; None where no optimizer draws random numbers.
    """
    found: Stepped = []
    calls: list[KernelStep] = []
    waiting = []
    for place, (problem, gradient, given) in enumerate(steps):
        step = problem.optimizer_step
        try:
            if contexts is not None or given is not None or not step.is_plain:
                with nullcontext() if contexts is None else contexts[place]:
                    found.append(stepped(problem, gradient, given))
                continue
            clipped, norm = step.clip(step.hooked(gradient))
            calls += step.begin(clipped)
        except Exception as error:
            found.append(error)
        else:
            found.append(norm)
            waiting.append(place)
    take_steps(calls)
    for place in waiting:
        try:
            steps[place][0].advance()
        except Exception as error:
            found[place] = error
    return found
