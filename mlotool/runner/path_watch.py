"""Warnings about shared spaces and what decides in them: candidates that were never drawn, decisions made too early."""

import warnings
from collections.abc import Mapping, Sequence

from mlotool.problem.rank_mean import Reduce, identity_reduce
from mlotool.program import Problem
from mlotool.spaces.shared.architecture import AbstractArchitecture
from mlotool.spaces.shared.shared_space import SharedSpace

SURE = 0.99
"""The probability of a candidate from which on its decision is made."""

EARLY = 0.5
"""The part of a run in which not all decisions should be made."""

MAX_NAMED = 8
"""Candidates that a message names."""


class PathWatch:
    """Looks at shared spaces and architectures of a run, and warns of each once.

    Args:
        problems: of the program, by name.
        max_ticks: of the run.
        reduce: a mean over ranks, each of which may draw paths of its own.
    """

    def __init__(self, problems: Mapping[str, Problem], max_ticks: int, reduce: Reduce = identity_reduce) -> None:
        modules = {name: each.module for name, each in problems.items()}
        self._architectures = {name: each for name, each in modules.items() if isinstance(each, AbstractArchitecture)}
        self._spaces = {name: each for name, each in modules.items() if isinstance(each, SharedSpace)}
        self._problems, self._max_ticks, self._reduce = problems, max_ticks, reduce
        self._told: set[str] = set()

    def look(self, tick: int) -> None:
        """Warn where all decisions of an architecture are made though much of the run is left.

        Args:
            tick: the last one done.

        Cost: a transfer from the device an architecture, until half of the run is over.
        """
        if tick >= EARLY * self._max_ticks:
            return
        for name, each in self._architectures.items():
            if name in self._told or not each.is_made(SURE):
                continue
            self._told.add(name)
            warnings.warn(
                f"problems.{name}: found a probability of at least {SURE:g} for one candidate of each decision at tick "
                f"{tick} of {self._max_ticks}; expected decisions that are open for half of the run, as what is not "
                f"drawn is not compared any more. {self._opening(name)}",
                stacklevel=2,
            )

    def end(self) -> None:
        """Warn of candidates that no training step has computed; all ranks call it."""
        for name, each in self._spaces.items():
            [counts] = self._reduce([each.counts.double()])
            deciding = self._deciding_on(each)
            if not bool(counts.any()) or not (each.draws or deciding):
                # Nothing was trained, or one path alone.
                continue
            never = [
                f"{decision}: {value}"
                for decision, found in each.named_counts(counts).items()
                for value, count in found.items()
                if count == 0 and decision in each.differing
            ]
            if never:
                more = f" and {len(never) - MAX_NAMED} more" if len(never) > MAX_NAMED else ""
                warnings.warn(
                    f"problems.{name}.module: found candidates that no training step has computed: "
                    f"{', '.join(never[:MAX_NAMED])}{more}; expected each of them in some, as their weights are those "
                    f"of the start. Train for longer (runner.max_ticks). {self._drawing(deciding)}",
                    stacklevel=2,
                )

    def _deciding_on(self, space: SharedSpace) -> list[str]:
        """Return the problems that learn which paths of a space are run: their decisions have its names."""
        names = [each.name for each in space.table]
        return [name for name, each in self._architectures.items() if [one.name for one in each.table] == names]

    def _drawing(self, deciding: Sequence[str]) -> str:
        """Return what makes more candidates be drawn, where problems decide or, if there is none, `paths`."""
        if not deciding:
            return "Or draw each equally often: paths: {_target_: mlotool.spaces.FairPaths}."
        return " ".join(map(self._opening, deciding))

    def _opening(self, name: str) -> str:
        """Return what keeps the decisions of an architecture open."""
        optimizer = self._problems[name].optimizer
        rate = None if optimizer is None else optimizer.param_groups[0].get("lr")
        value = "" if rate is None else f" ({float(rate):g} now)"
        return (
            f"Lower problems.{name}.optimizer.lr{value}, or set problems.{name}.loss.entropy=0.01, which keeps its "
            "decisions open."
        )
