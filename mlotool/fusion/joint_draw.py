"""What the gradients of one problem of all members are taken on."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from mlotool.fusion.feed import JointBatch, JointStream
from mlotool.fusion.joint_unrolls import joint_steps
from mlotool.fusion.stacking import NotJointError, stacked
from mlotool.program import Program
from mlotool.program.solution_plan import all_plans
from mlotool.program.traced_function import Traced


class JointDraw:
    """Draws what the gradient of one problem takes, for all members.

    Args:
        traced: the problem, of the first member.
        programs: the members; None has left.
        streams: by name of the problem.
    """

    def __init__(self, traced: Traced, programs: Sequence[Program | None], streams: Mapping[str, JointStream]) -> None:
        first = next(each for each in programs if each is not None)
        self._name = traced.problem.name
        self._count = traced.problem.settings.accumulate_batches
        self._programs, self._streams = programs, streams
        plans = [*all_plans(first.engine.solutions[traced.number])]
        self._below = [
            (plan.problem.name, "peek" if plan.algorithm.batch == "fresh" else "last")
            for plan in plans
            if not plan.algorithm.sees_steps
        ]
        self._unrolled = list(dict.fromkeys(plan.problem.name for plan in plans if plan.algorithm.sees_steps))

    def steps(self, live: Sequence[bool]) -> dict[str, JointBatch]:
        """Return by problem the recorded steps that the gradient differentiates.

        Args:
            live: which members take part.

        Raises:
            NotJointError: they differ in more than tensors and numbers.
        """
        there = [program for program, is_live in zip(self._programs, live, strict=True) if is_live]
        members = [each if is_live else there[0] for each, is_live in zip(self._programs, live, strict=True)]
        return {
            name: joint_steps([program.problems[name] for program in members if program is not None])
            for name in self._unrolled
        }

    def __call__(self, live: Sequence[bool], steps: Mapping[str, JointBatch]) -> list[dict[str, Any]]:
        """Return, for each batch that the gradient is averaged over, that batch and those of its pullbacks, by problem.

        A `JointBatch`, or a list with one of each member, or its error, where they cannot be stacked; None without a
        stream.

        Args:
            live: which members take part.
            steps: what `steps` has returned, which goes along.
        """
        found = []
        for _ in range(self._count):
            entry = {self._name: self._joint(self._name, "next", live), **steps}
            for name, how in self._below:
                if name not in entry:
                    entry[name] = self._joint(name, how, live)
            found.append(entry)
        return found

    def _joint(self, name: str, how: str, live: Sequence[bool]) -> JointBatch | list[Any] | None:
        stream = self._streams.get(name)
        if stream is None:
            return None
        try:
            found: JointBatch = getattr(stream, how)(live)
        except Exception:
            # They do not fit together, or one of them cannot be read: no stream has gone on.
            members = zip(self._programs, live, strict=True)
            return [_own(program, name, how) if is_live else None for program, is_live in members]
        return found

    def without(self, entries: Sequence[Mapping[str, Any]], live: Sequence[bool]) -> list[dict[str, Any]]:
        """Return what was drawn, without the batches of members that are not live any more.

        In their places are those of the first live one, so that what is computed of the others is what it is where
        they had left before.

        Args:
            entries: what was drawn.
            live: which members are left.
        """
        found: dict[int, Any] = {}
        for entry in entries:
            for name, batch in entry.items():
                # A batch that stands in two places is one.
                if id(batch) not in found:
                    found[id(batch)] = self._left(name, batch, live)
        return [{name: found[id(batch)] for name, batch in entry.items()} for entry in entries]

    def _left(self, name: str, batch: JointBatch | list[Any] | None, live: Sequence[bool]) -> Any:
        first = live.index(True)
        if isinstance(batch, list):
            if self._streams[name].shares:
                return JointBatch(batch[first], is_shared=True)
            try:
                own = [each if is_live else batch[first] for each, is_live in zip(batch, live, strict=True)]
                return JointBatch(stacked(own), is_shared=False)
            except NotJointError:
                return batch
        if batch is None or batch.is_shared:
            return batch
        places = [number if is_live else first for number, is_live in enumerate(live)]
        value = tree_map_only(Tensor, lambda tensor: tensor[places], batch.value)
        return JointBatch(value, is_shared=False)


def _own(program: Program | None, name: str, how: str) -> Any:
    """Return a member's own batch, or the error that it raises."""
    assert program is not None
    try:
        return getattr(program.problems[name].stream, how)()
    except Exception as error:
        return error
