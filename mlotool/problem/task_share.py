"""Tasks that are divided among ranks: each has an equal part of them, and what is kept of a task where that task is.

Tasks share none of their parameters, so a problem of tasks takes the same steps as in one process, and no rank asks
another one. A checkpoint has all tasks, in the form of one process.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mlotool.core.private import tree_map_only
from mlotool.distributed.collectives import Ranks

if TYPE_CHECKING:
    from mlotool.problem.problem import Problem

# `(problem, tensors) -> tensor`: those of one place in its state, by rank; None of a rank that has nothing there.
_Join = Callable[[str, Sequence[Tensor | None]], Tensor]


States = Mapping[str, Mapping[str, Any]]


def gathered_tasks(states: States, problems: Mapping[str, "Problem"], ranks: Ranks) -> dict[str, Any]:
    """Return states of problems with all tasks, from each rank's own; called by all.

    Args:
        states: by problem, what `Program.state_dict` or `Problem.snapshot` returned.
        problems: by name.
        ranks: those of the run.
    """
    parts = ranks.gather(tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), dict(states)))

    def join(name: str, tensors: Sequence[Tensor | None]) -> Tensor:
        like = next(tensor for tensor in tensors if tensor is not None)
        # Which parameters a loss reads may depend on the task; nothing is kept of one that no task here has used.
        return torch.cat([torch.zeros_like(like) if tensor is None else tensor for tensor in tensors])

    return _Mapped(problems, join, is_whole=False)(parts)


def own_tasks(states: States, problems: Mapping[str, "Problem"]) -> dict[str, Any]:
    """Return states of problems with this rank's tasks, from states with all of them. Arguments as above."""

    def join(name: str, tensors: Sequence[Tensor | None]) -> Tensor:
        [whole], share = tensors, problems[name].task_share
        assert whole is not None and share is not None
        return share.part(whole).clone()

    return _Mapped(problems, join, is_whole=True)([states])


class _Mapped:
    """Joins the states of a program's problems where they are those of tasks; all else is the first one's.

    Args:
        problems: by name; some are divided.
        join: the tensors of one place.
        is_whole: whether the states have the tasks of all ranks.
    """

    def __init__(self, problems: Mapping[str, "Problem"], join: _Join, *, is_whole: bool) -> None:
        self._problems, self._join = problems, join
        self._shapes = {
            name: {torch.Size([share.num_tasks, *x.shape[1:]]) if is_whole else x.shape for x in problem.own}
            for name, problem in problems.items()
            if (share := problem.task_share) is not None
        }

    def __call__(self, parts: Sequence[States]) -> dict[str, Any]:
        """Return the states of problems, by name."""
        return {name: self._problem(name, [part[name] for part in parts]) for name in parts[0]}

    def _problem(self, name: str, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        state = dict(parts[0])
        if name in self._shapes:
            named = self._problems[name].module.named_parameters(remove_duplicate=False)
            trained = {key for key, tensor in named if tensor.requires_grad}
            modules, optimizers = ([part[key] for part in parts] for key in ("module", "optimizer"))
            state["module"] = {
                key: self._join(name, [module[key] for module in modules]) if key in trained else value
                for key, value in modules[0].items()
            }
            kept = self._tree(name, [optimizer["state"] for optimizer in optimizers])
            state["optimizer"] = {**optimizers[0], "state": kept}
        if "hypergradient" in state:
            state["hypergradient"] = self._tree(name, [part["hypergradient"] for part in parts])
        if "trajectory" in state:
            steps = self._steps(name, [part["trajectory"]["steps"] for part in parts])
            state["trajectory"] = {**state["trajectory"], "steps": steps}
        return state

    def _steps(self, name: str, parts: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """Return recorded steps, with what they have read of other problems."""
        steps = []
        for records in zip(*parts, strict=True):
            own = {key: self._tree(name, [step[key] for step in records]) for key in ("theta", "state", "gradient")}
            readings = {}
            for other, first in records[0]["readings"].items():
                read = [step["readings"][other] for step in records]
                theta, inner = self._tree(other, [part["theta"] for part in read]), [part["steps"] for part in read]
                readings[other] = {**first, "theta": theta, "steps": self._steps(other, inner)}
            steps.append({**records[0], **own, "readings": readings})
        return steps

    def _tree(self, name: str, parts: Sequence[Any]) -> Any:
        first, shapes = next((part for part in parts if part is not None), None), self._shapes.get(name)
        if shapes is None:
            return parts[0]
        if isinstance(first, Mapping):
            keys = dict.fromkeys(key for part in parts for key in part or ())
            return {key: self._tree(name, [(part or {}).get(key) for part in parts]) for key in keys}
        if isinstance(first, list | tuple):
            columns = zip(*[part or [None] * len(first) for part in parts], strict=True)
            return type(first)([self._tree(name, column) for column in columns])
        return self._join(name, parts) if isinstance(first, Tensor) and first.shape in shapes else first
