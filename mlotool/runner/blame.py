"""Which problems may have made a number that is not finite.

A loss is NaN because of its batch, or of parameters that were bad before it was computed: its own, or those of problems
whose modules it calls, which another problem's step may have spoiled. So the problem where it shows is rarely the one
whose learning rate is too large. What is known are the losses of the ticks before and who had stepped by then.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils._pytree import tree_leaves

from mlotool.core.described import described
from mlotool.problem.batches import Share
from mlotool.program import Problem, Stream
from mlotool.spaces.shared.shared_space import SharedSpace

MAX_BATCHES = 100
"""Of the last ones, which are looked at for numbers that are not finite."""

EXPLODED = 1e3
"""Of a finite loss over the smallest before it, from which on it is said to have grown."""


@dataclass
class Trace:
    """The finite losses of one problem.

    Args:
        smallest: the least magnitude so far.
        last: the last one.
        tick: of the last one.
    """

    smallest: float
    last: float
    tick: int

    @property
    def has_grown(self) -> bool:
        """Whether the last loss is far from what it was."""
        return abs(self.last) > EXPLODED * max(self.smallest, 1e-3)


class Traces:
    """The losses of all problems, as far as they have been read from the device.

    Args:
        is_resumed: whether there were ticks before.
    """

    def __init__(self, *, is_resumed: bool = False) -> None:
        self.is_resumed = is_resumed
        self.by_problem: dict[str, Trace] = {}

    def add(self, problem: str, tick: int, value: float) -> None:
        """Take a loss; those that are not finite tell nothing."""
        if not math.isfinite(value):
            return
        trace = self.by_problem.setdefault(problem, Trace(abs(value), value, tick))
        trace.smallest, trace.last, trace.tick = min(trace.smallest, abs(value)), value, tick


def unsound_batch(problem: Problem) -> str | None:
    """Return in whole sentences which of a problem's last batches has numbers that are not finite; None where none.

    Cost: up to `MAX_BATCHES` of them are made again.
    """
    if not isinstance(problem.stream, Stream):
        return None
    try:
        batches = problem.stream.recent(MAX_BATCHES)
    except Exception:
        # A data set that now fails is not what is to be told.
        return None
    for shared in batches:
        batch, _ = Share.opened(shared)
        numbers = [each for each in tree_leaves(batch) if isinstance(each, Tensor) and each.is_floating_point()]
        if not all(bool(each.isfinite().all()) for each in numbers):
            return (
                f"One of the last batches of '{problem.name}' holds numbers that are not finite: "
                f"{described(batch)}. Correct the samples, or leave them out of the data set."
            )
    return None


def explain(problem: str, problems: Mapping[str, Problem], traces: Traces) -> str:
    """Return, in whole sentences, what may have made the loss of `problem` not finite, and what to do.

    Args:
        problem: whose loss was the first that is not finite.
        problems: of the program, by name.
        traces: the losses before it, in the order in which a tick computes them.
    """
    unsound = unsound_batch(problems[problem])
    if unsound is not None:
        return unsound
    sources = list(related(problem, problems))
    paths = [told for name in sources if (told := unsound_path(problems[name])) is not None]
    if paths:
        return " ".join([*paths, _of_parameters(problem, problems, traces, sources)])
    return _of_parameters(problem, problems, traces, sources)


def unsound_path(problem: Problem) -> str | None:
    """Return on which path of a shared space a result was first not finite; None where nothing is known of one."""
    module = problem.module
    if not isinstance(module, SharedSpace) or module.unsound is None:
        return None
    return f"In the shared space of '{problem.name}': {module.unsound}"


def _of_parameters(problem: str, problems: Mapping[str, Problem], traces: Traces, sources: Sequence[str]) -> str:
    stepped = [name for name in sources if traces.is_resumed or name in traces.by_problem]
    narrow = _narrow(problems[problem])
    if not stepped:
        return (
            f"Nothing that it depends on had been changed before, so that no learning rate is the reason: look for "
            f"NaN in the data of '{problem}' and in its initial parameters, and for log, sqrt or a division at "
            f"zero in its loss.{narrow}"
        )
    grown = [name for name in stepped if (trace := traces.by_problem.get(name)) is not None and trace.has_grown]
    sentences = [_growth(name, traces.by_problem[name]) for name in grown]
    # A loss grows with what it depends on: a weight decay that another problem learns, say.
    suspects = [name for name in dict.fromkeys(_sources(grown, problems)) if name in stepped] or stepped
    if len(stepped) == 1:
        [name] = stepped
        whose = "its own parameters" if name == problem else f"the parameters of '{name}'"
        sentences.append(f"Of all that it depends on only {whose} had been changed before.")
    elif len(suspects) > 1:
        whose = f"That loss depends on the parameters of {_quoted(suspects)}" if len(grown) == 1 else ""
        whose = whose or f"It depends on the parameters of {_quoted(suspects)}"
        sentences.append(f"{whose}, all of which had been changed before.")
    guilty = advice(problems[name] for name in suspects)
    return " ".join([*sentences, guilty, f"Else look for NaN in the data of '{problem}'.{narrow}"])


def advice(suspects: Iterable[Problem]) -> str:
    """Return what to lower, with its value."""
    problems = list(suspects)
    keys = [_rate(each) for each in problems]
    if len(keys) == 1:
        return f"Lower {keys[0]}, or set problems.{problems[0].name}.gradient_clip_norm=1.0."
    return (
        f"Lower the one that is too large of {', '.join(keys[:-1])} and {keys[-1]}, or set that problem's "
        "gradient_clip_norm=1.0."
    )


def _growth(name: str, trace: Trace) -> str:
    return f"The loss of '{name}' had grown from {trace.smallest:.3g} to {trace.last:.3g} by tick {trace.tick}."


def related(name: str, problems: Mapping[str, Problem]) -> Iterable[str]:
    """Return the problem and all whose parameters its own depend on, the nearest first."""
    found, waiting = {name: None}, [name]
    while waiting:
        node = problems[waiting.pop(0)].node
        for other in (*node.roles.values(), *node.other_uses.values()):
            if other in problems and other not in found:
                found[other] = None
                waiting.append(other)
    return found


def _sources(names: Iterable[str], problems: Mapping[str, Problem]) -> Iterator[str]:
    for name in names:
        yield from related(name, problems)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _narrow(problem: Problem) -> str:
    """Return what fp16 may have to do with it."""
    if problem.settings.precision != "fp16":
        return ""
    return (
        f" '{problem.name}' computes in fp16, whose numbers end at 65,504: problems.{problem.name}.precision=bf16 has "
        "the range of fp32."
    )


def _rate(problem: Problem) -> str:
    """Return the key of the learning rate, with its value; one that another problem learns has that problem's name."""
    if "lr" in problem.settings.optimizer_roles:
        return f"the learning rate that '{problem.settings.optimizer_roles['lr']}' gives '{problem.name}'"
    rate = None if problem.optimizer is None else problem.optimizer.param_groups[0].get("lr")
    return f"problems.{problem.name}.optimizer.lr" + ("" if rate is None else f" ({float(rate):g} now)")
