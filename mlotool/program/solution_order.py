"""Which solutions depend on which parameters, and in what order their nodes are made. No torch.

A solution theta*_p is a function of its inputs: every problem that shapes p, and every lower solution that p
reads but does not influence. A lower problem that p both influences and reads is eliminated inside p, so what
that one depends on is an input of p as well. The same holds of all that p reads where p is differentiated through
several steps: each of them read another solution.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mlotool.core.errors import ConfigError
from mlotool.program.graph import Graph


@dataclass(frozen=True)
class SolutionNode:
    """One solution node to make.

    Args:
        problem: whose solution it is.
        inputs: the problems whose tensors it takes.
        constants: those inputs through which no gradient passes (the partial rule cuts them).
        inner: the nodes to make inside it, each time its loss is evaluated.
    """

    problem: str
    inputs: tuple[str, ...]
    constants: frozenset[str]
    inner: "tuple[SolutionNode, ...]" = ()


class SolutionOrder:
    """Answers what the solutions of a graph depend on.

    Args:
        graph: a valid graph.
        partial: problems whose stationarity holds the lower solutions fixed (`curvature: partial`).
        stepwise: problems that are differentiated step by step, each of which reads solutions as they were then: all
            that such a problem reads is eliminated inside it.
    """

    def __init__(self, graph: Graph, partial: Iterable[str] = (), stepwise: Iterable[str] = ()) -> None:
        self._graph = graph
        self._partial = frozenset(partial)
        self._stepwise = frozenset(stepwise)
        self._influenced: dict[str, frozenset[str]] = {}
        self._inputs: dict[str, tuple[str, ...]] = {}

    def influenced(self, name: str) -> frozenset[str]:
        """Return the problems below `name` whose solutions depend on its parameters."""
        if name not in self._influenced:
            below, found = self._graph.below(name), set[str]()
            while new := {lower for lower in below - found if self._reached(lower, name, found)}:
                found |= new
            self._influenced[name] = frozenset(found)
        return self._influenced[name]

    def inputs(self, name: str) -> tuple[str, ...]:
        """Return the problems whose tensors the solution of `name` takes."""
        if name not in self._inputs:
            eliminated = self._eliminated(name)
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

    def steps_of(self, name: str) -> tuple[SolutionNode, ...]:
        """Return the solution nodes that the loss of `name` needs, each after its inputs."""
        return self._order(self._graph.lowers(name), self.influenced(name), name)

    def steps_to(self, name: str) -> tuple[SolutionNode, ...]:
        """Return the solution nodes that the solution of `name` needs, itself last."""
        return self._order((name,), frozenset(self._graph.below(name) | {name}), None)

    def read_by(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what an evaluation of the loss of `name` reads that may move on later.

        Returns:
            Problems that are constants there, or inputs of its solution; and those whose nodes are made inside.
        """
        solved: dict[str, None] = {}
        read = dict.fromkeys(self._graph.lowers(name))

        def visit(steps: Iterable[SolutionNode]) -> None:
            # What depends on nothing carries no gradient.
            for step in (each for each in steps if each.inputs):
                solved[step.problem] = None
                # The steps of a stepwise one hold what they read themselves.
                if step.problem not in self._stepwise:
                    read.update(dict.fromkeys(self._graph.lowers(step.problem)))
                    visit(step.inner)

        visit(self.steps_to(name)[-1].inner)
        read.update(dict.fromkeys(self.inputs(name)))
        apart = {name, *self._graph.uppers(name), *solved}
        return tuple(other for other in read if other not in apart), tuple(solved)

    def _eliminated(self, name: str) -> frozenset[str]:
        if name in self._partial:
            return frozenset()
        return frozenset(self._graph.below(name)) if name in self._stepwise else self.influenced(name)

    def _inner(self, name: str, solved: frozenset[str]) -> tuple[SolutionNode, ...]:
        """Return the nodes inside the solution of `name`, where the solutions of `solved` carry a gradient."""
        if name in self._partial:
            return ()
        if name not in self._stepwise:
            return self.steps_of(name)
        inside = self.influenced(name) | (solved & self._eliminated(name))
        return self._order(self._graph.lowers(name), inside, name, outside=solved)

    def _reached(self, lower: str, owner: str, found: set[str]) -> bool:
        return any(
            source == owner or (source in found and not self._cut(source, lower, found))
            for source in self.inputs(lower)
        )

    def _cut(self, source: str, lower: str, solved: Iterable[str]) -> bool:
        # The owner of a scope is never cut: its own total gradient passes through all it influences.
        return source in self._partial and source in solved and lower in self._graph.below(source)

    def _order(
        self, targets: Iterable[str], solved: frozenset[str], owner: str | None, outside: frozenset[str] = frozenset()
    ) -> tuple[SolutionNode, ...]:
        steps: dict[str, SolutionNode] = {}
        open_: list[str] = []

        def visit(name: str) -> None:
            if name in steps or name not in solved or name == owner:
                return
            if name in open_:
                self._refuse_circle([*open_[open_.index(name) :], name])
            open_.append(name)
            inputs = self.inputs(name)
            constants = frozenset(other for other in inputs if self._cut(other, name, solved | outside))
            for other in inputs:
                if other not in constants:
                    visit(other)
            open_.pop()
            steps[name] = SolutionNode(name, inputs, constants, self._inner(name, solved | outside))

        for target in targets:
            visit(target)
        return tuple(steps.values())

    def _refuse_circle(self, circle: list[str]) -> None:
        found = f"graph: the solutions {' -> '.join(circle)} depend on each other; expected one above the other"
        raise ConfigError(f"{found}. Join them into one problem, or add a lower_to_upper edge between them.")
