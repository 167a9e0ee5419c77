"""Which solutions depend on which parameters, and in what order their nodes are made. No torch.

A solution theta*_p is a function of its inputs: every problem that shapes p, and every lower solution that p
reads but does not influence. A lower problem that p both influences and reads is eliminated inside p, so what
that one depends on is an input of p as well.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mlotool.core.errors import ConfigError
from mlotool.program.graph import Graph


@dataclass(frozen=True)
class SolutionStep:
    """One solution node to make.

    Args:
        problem: whose solution it is.
        inputs: the problems whose tensors it takes.
        constants: those inputs through which no gradient passes (the partial rule cuts them).
    """

    problem: str
    inputs: tuple[str, ...]
    constants: frozenset[str]


class Dependence:
    """Answers what the solutions of a graph depend on.

    Args:
        graph: a valid graph.
        partial: problems whose stationarity holds the lower solutions fixed (`curvature: partial`).
    """

    def __init__(self, graph: Graph, partial: Iterable[str] = ()) -> None:
        self._graph = graph
        self._partial = frozenset(partial)
        self._influenced: dict[str, frozenset[str]] = {}
        self._inputs: dict[str, tuple[str, ...]] = {}

    def influenced(self, name: str) -> frozenset[str]:
        """Return the problems below `name` whose solutions depend on its parameters."""
        if name not in self._influenced:
            below = self._graph.below(name)
            found: set[str] = set()
            grew = True
            while grew:
                new = {lower for lower in below - found if self._reached(lower, name, found)}
                found |= new
                grew = bool(new)
            self._influenced[name] = frozenset(found)
        return self._influenced[name]

    def inputs(self, name: str) -> tuple[str, ...]:
        """Return the problems whose tensors the solution of `name` takes."""
        if name not in self._inputs:
            eliminated = frozenset() if name in self._partial else self.influenced(name)
            # A dict keeps the order of discovery, so that runs are reproducible.
            inputs = dict.fromkeys(self._graph.uppers(name))
            stack, seen = list(self._graph.lowers(name)), set()
            while stack:
                other = stack.pop()
                if other in seen or other == name:
                    continue
                seen.add(other)
                if other in eliminated:
                    stack.extend(self.inputs(other))
                else:
                    inputs[other] = None
            self._inputs[name] = tuple(inputs)
        return self._inputs[name]

    def steps_of(self, name: str) -> tuple[SolutionStep, ...]:
        """Return the solution nodes that the loss of `name` needs, each after its inputs."""
        return self._order(self._graph.lowers(name), self.influenced(name), name)

    def steps_to(self, name: str) -> tuple[SolutionStep, ...]:
        """Return the solution nodes that the solution of `name` needs, itself last."""
        return self._order((name,), frozenset(self._graph.below(name) | {name}), None)

    def _reached(self, lower: str, owner: str, found: set[str]) -> bool:
        return any(
            source == owner or (source in found and not self._cut(source, lower, found))
            for source in self.inputs(lower)
        )

    def _cut(self, source: str, lower: str, solved: Iterable[str]) -> bool:
        # The owner of a scope is never cut: its own total gradient passes through all it influences.
        return source in self._partial and source in solved and lower in self._graph.below(source)

    def _order(self, targets: Iterable[str], solved: frozenset[str], owner: str | None) -> tuple[SolutionStep, ...]:
        steps: dict[str, SolutionStep] = {}
        open_: list[str] = []

        def visit(name: str) -> None:
            if name in steps or name not in solved or name == owner:
                return
            if name in open_:
                self._refuse_circle([*open_[open_.index(name) :], name])
            open_.append(name)
            inputs = self.inputs(name)
            constants = frozenset(other for other in inputs if self._cut(other, name, solved))
            for other in inputs:
                if other not in constants:
                    visit(other)
            open_.pop()
            steps[name] = SolutionStep(name, inputs, constants)

        for target in targets:
            visit(target)
        return tuple(steps.values())

    def _refuse_circle(self, circle: list[str]) -> None:
        raise ConfigError(
            f"graph: the solutions {' -> '.join(circle)} depend on each other (they shape a common lower problem, "
            "and a problem above reads both); expected that one of them is above the other. Join them into one "
            "problem, or add a lower_to_upper edge between them."
        )
