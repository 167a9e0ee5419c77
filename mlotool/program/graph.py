"""The graph of a program: who shapes whom and who reads whose solution. No torch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import Any

from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean, shown
from mlotool.problem.settings import ProblemNode

Edges = Mapping[str, Iterable[str]]

_KEYS = ("upper_to_lower", "lower_to_upper")


@dataclass(frozen=True)
class Graph:
    """The edges between problems: which problem shapes which, and which problem reads whose solution.

    Args:
        upper_to_lower: for each upper problem, the names of the lower problems whose solutions depend on its
            parameters.
        lower_to_upper: for each lower problem, the names of the upper problems whose losses read its solution.

    Raises:
        ConfigError: the edges are not given as a list of names for each name.

    Example:
        >>> graph = Graph({"reweight": ["classifier"]}, {"classifier": ["reweight"]})
        >>> graph.lowers("reweight"), graph.uppers("classifier"), graph.leaves(["reweight", "classifier"])
        (('classifier',), ('reweight',), ('classifier',))
    """

    upper_to_lower: Edges = field(default_factory=dict)
    lower_to_upper: Edges = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in _KEYS:
            edges = {} if getattr(self, key) is None else getattr(self, key)
            if not isinstance(edges, Mapping) or not all(isinstance(start, str) for start in edges):
                text = f"found {shown(edges)}; expected a list of problems for each problem. Write {key}: {{a: [b]}}."
                raise ConfigError(f"graph.{key}: {text}")
            lists = {start: _names(f"graph.{key}.{start}", ends) for start, ends in edges.items()}
            object.__setattr__(self, key, lists)

    def uppers(self, name: str) -> tuple[str, ...]:
        """Return the problems whose parameters shape the solution of `name`."""
        return tuple(upper for upper, lowers in self.upper_to_lower.items() if name in lowers)

    def lowers(self, name: str) -> tuple[str, ...]:
        """Return the problems whose solutions `name` reads."""
        return tuple(lower for lower, uppers in self.lower_to_upper.items() if name in uppers)

    def readers(self, name: str) -> tuple[str, ...]:
        """Return the problems that read the solution of `name`."""
        return tuple(self.lower_to_upper.get(name, ()))

    def leaves(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of `names` that read no other problem's solution: the lowest level."""
        return tuple(name for name in names if not self.lowers(name))

    def below(self, name: str) -> set[str]:
        """Return every problem below `name`, from which a path of lower_to_upper edges leads to it."""
        reached, waiting = set[str](), {*self.lowers(name)}
        while waiting := waiting - reached:
            reached |= waiting
            waiting = {lower for other in waiting for lower in self.lowers(other)}
        return reached

    def mermaid(self) -> str:
        """Return the graph as mermaid text: solid edges are upper_to_lower, dashed edges lower_to_upper."""
        arrows = {"upper_to_lower": "-->|shapes|", "lower_to_upper": "-.->|solution|"}
        lines = [f"    {start} {arrows[key]} {end}" for key, start, end in self._edges()]
        return "\n".join(["graph TD", *lines]) + "\n"

    def validate(self, problems: Mapping[str, ProblemNode]) -> None:
        """Check the graph against the problems.

        Raises:
            ConfigError: the graph has errors; the message lists all of them, each with its YAML key and what to write.
        """
        checks = (
            self._cycle_faults(),
            self._return_faults(),
            self._role_faults(problems),
            self._unused_faults(problems),
        )
        if faults := [*self._name_faults(problems)] or [*chain(*checks)]:
            raise ConfigError("\n".join(faults))

    def _edges(self) -> Iterator[tuple[str, str, str]]:
        for key in _KEYS:
            for start, ends in getattr(self, key).items():
                yield from ((key, start, end) for end in ends)

    def _name_faults(self, problems: Iterable[str]) -> Iterator[str]:
        known = list(problems)
        lists = [(key, start, ends) for key in _KEYS for start, ends in getattr(self, key).items()]
        for key, name in dict.fromkeys((key, name) for key, start, ends in lists for name in (start, *ends)):
            if name not in known:
                yield _unknown(f"graph.{key}", name, known)
        for key, start, end in self._edges():
            if start == end:
                fault = f"graph.{key}.{start}: an edge from '{start}' to itself; expected another problem. Remove it"
                yield f"{fault} (a problem may use its own module as a role without an edge)."

    def _cycle_faults(self) -> Iterator[str]:
        sorter = TopologicalSorter({name: self.lowers(name) for _, *ends in self._edges() for name in ends})
        try:
            sorter.prepare()
        except CycleError as error:
            fault = (
                f"graph.lower_to_upper: a cycle {' -> '.join(error.args[1])}; expected edges from lower to upper "
                "problems"
            )
            yield f"{fault} only. Remove one edge; a problem that shapes a lower one stands in graph.upper_to_lower."

    def _return_faults(self) -> Iterator[str]:
        for key, upper, lower in self._edges():
            if key == "upper_to_lower" and lower not in self.below(upper):
                fault = f"'{upper}' shapes '{lower}', but no edges lead back from '{lower}' to '{upper}'"
                advice = f"Write graph.lower_to_upper.{lower}: [{upper}]"
                if lower in self.readers(upper):
                    fault = f"the edge to '{lower}' is also in graph.lower_to_upper.{upper}"
                    advice += f", or graph.upper_to_lower.{lower}: [{upper}]"
                yield f"graph.upper_to_lower.{upper}: {fault}; expected edges in opposite directions. {advice}."

    def _role_faults(self, problems: Mapping[str, ProblemNode]) -> Iterator[str]:
        for name, node in problems.items():
            roles = [(f"loss.roles.{role}", other) for role, other in node.roles.items()]
            for use, other in (*roles, *node.other_uses.items()):
                key, is_role = f"problems.{name}.{use}", use.startswith("loss.roles.")
                shapes = f"graph.upper_to_lower.{other}: [{name}]"
                if other not in problems:
                    yield _unknown(key, other, problems)
                elif other == name and not is_role:
                    advice = "Write initial" if use == "reset_to" else "See `mlotool show learned_lr`"
                    yield f"{key}: found '{name}', the problem itself; expected another problem. {advice}."
                elif is_role and other not in (name, *self.uppers(name), *self.lowers(name)):
                    fault = (
                        f"{key}: '{other}' fills a role in the loss of '{name}', but there is no edge between them; "
                        "expected"
                    )
                    reads = f"graph.lower_to_upper.{other}: [{name}] if '{name}' reads its solution"
                    yield f"{fault} one. Write {reads}, or {shapes} if '{other}' shapes '{name}'."
                elif not is_role and other not in self.uppers(name):
                    yield f"{key}: '{other}' shapes '{name}' here, but no edge says so; expected one. Write {shapes}."

    def _unused_faults(self, problems: Mapping[str, ProblemNode]) -> Iterator[str]:
        for key, start, end in self._edges():
            node = problems[end]
            if start not in (*node.roles.values(), *node.other_uses.values()):
                fault = f"graph.{key}.{start}: nothing uses the edge to '{end}'; expected a role for '{start}' in"
                yield f"{fault} the loss of '{end}'. Write problems.{end}.loss.roles.<role>: {start}, or remove it."


def _unknown(key: str, name: str, known: Iterable[str]) -> str:
    fault = f"{key}: unknown problem '{name}'; expected one of {', '.join(known)}.{did_you_mean(name, known)}"
    return f"{fault} Correct the name, or add problems.{name}."


def _names(key: str, ends: Any) -> tuple[str, ...]:
    is_list = isinstance(ends, Iterable | None) and not isinstance(ends, str | bytes | Mapping)
    names = tuple(() if ends is None else ends) if is_list else (ends,)
    if is_list and all(isinstance(name, str) for name in names):
        # An edge counts once, however often it is written.
        return tuple(dict.fromkeys(names))
    written = ends if isinstance(ends, str) else "<name>"
    given = shown(list(names) if is_list else ends)
    raise ConfigError(f"{key}: found {given}; expected a list of problems' names. Write {key}: [{written}].")
