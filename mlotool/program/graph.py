"""The graph of a program: who shapes whom and who reads whose solution. No torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean, shown
from mlotool.problem.node import ProblemNode

Edges = Mapping[str, Iterable[str]]


@dataclass(frozen=True)
class Graph:
    """Two kinds of edges between problems.

    Args:
        upper_to_lower: by upper problem, those whose solution its parameters shape.
        lower_to_upper: by lower problem, those that read its solution.

    Example:
        >>> graph = Graph({"reweight": ["classifier"]}, {"classifier": ["reweight"]})
        >>> graph.lowers("reweight"), graph.uppers("classifier"), graph.leaves(["reweight", "classifier"])
        (('classifier',), ('reweight',), ('classifier',))
    """

    upper_to_lower: Edges = field(default_factory=dict)
    lower_to_upper: Edges = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("upper_to_lower", "lower_to_upper"):
            edges = getattr(self, key)
            edges = {} if edges is None else edges
            if not isinstance(edges, Mapping) or not all(isinstance(start, str) for start in edges):
                found, advice = shown(edges), f"Write {key}: {{a: [b]}}."
                raise ConfigError(f"graph.{key}: found {found}; expected lists of problems by problem. {advice}")
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
        """Return those of `names` that read no other problem's solution."""
        return tuple(name for name in names if not self.lowers(name))

    def level(self, name: str) -> int:
        """Return the longest chain of solutions below `name`; 0 for a leaf."""
        order = self._reading_order()
        levels: dict[str, int] = {}
        for each in order:
            levels[each] = max((levels[lower] + 1 for lower in self.lowers(each)), default=0)
        return levels.get(name, 0)

    def below(self, name: str) -> set[str]:
        """Return every problem whose solution reaches `name` along lower_to_upper edges."""
        lowers: dict[str, list[str]] = {}
        for lower, uppers in self.lower_to_upper.items():
            for upper in uppers:
                lowers.setdefault(upper, []).append(lower)
        found: set[str] = set()
        stack = list(lowers.get(name, ()))
        while stack:
            lower = stack.pop()
            if lower not in found:
                found.add(lower)
                stack.extend(lowers.get(lower, ()))
        return found

    def mermaid(self) -> str:
        """Return the graph as mermaid text: solid edges shape, dashed ones carry a solution."""
        lines = ["graph TD"]
        lines += [f"    {upper} -->|shapes| {lower}" for upper, ends in self.upper_to_lower.items() for lower in ends]
        lines += [
            f"    {lower} -.->|solution| {upper}" for lower, ends in self.lower_to_upper.items() for upper in ends
        ]
        return "\n".join(lines) + "\n"

    def validate(self, problems: Mapping[str, ProblemNode]) -> None:
        """Check the graph against the problems.

        Raises:
            ConfigError: with every fault found, the YAML key it stands at and what to write.
        """
        faults = self._name_faults(problems) or [
            *self._cycle_faults(),
            *self._return_faults(),
            *self._role_faults(problems),
            *self._use_faults(problems),
        ]
        if faults:
            raise ConfigError("\n".join(faults))

    def _name_faults(self, problems: Iterable[str]) -> list[str]:
        known = list(problems)
        faults = []
        for key in ("upper_to_lower", "lower_to_upper"):
            for start, ends in getattr(self, key).items():
                for name in dict.fromkeys((start, *ends)):
                    if name not in known:
                        faults.append(
                            f"graph.{key}: unknown problem '{name}'; expected one of {', '.join(known)}."
                            f"{did_you_mean(name, known)} Correct the name, or add problems.{name}."
                        )
                if start in ends:
                    faults.append(
                        f"graph.{key}.{start}: an edge from '{start}' to itself; expected another problem. "
                        f"Remove '{start}' from the list (a problem may use its own module as a role without an edge)."
                    )
        return faults

    def _cycle_faults(self) -> list[str]:
        try:
            self._reading_order()
        except CycleError as error:
            cycle = " -> ".join(error.args[1])
            return [
                f"graph.lower_to_upper: a cycle {cycle}; expected that solutions flow upwards only. "
                "Remove one of these edges; a problem that shapes a lower one stands in graph.upper_to_lower."
            ]
        return []

    def _return_faults(self) -> list[str]:
        faults = []
        for upper, lowers in self.upper_to_lower.items():
            below = self.below(upper)
            for lower in lowers:
                if lower not in below and lower in self.lower_to_upper.get(upper, ()):
                    faults.append(
                        f"graph.upper_to_lower.{upper}: the edge from '{upper}' to '{lower}' stands in "
                        f"graph.lower_to_upper.{upper} as well; expected the two edges of a pair in opposite "
                        "directions: an upper problem shapes a lower one and reads its solution. Write "
                        f"graph.lower_to_upper.{lower}: [{upper}] if '{upper}' is the upper one, or "
                        f"graph.upper_to_lower.{lower}: [{upper}] if '{lower}' is."
                    )
                elif lower not in below:
                    faults.append(
                        f"graph.upper_to_lower.{upper}: '{upper}' shapes '{lower}', but no solution comes back from "
                        f"'{lower}' to '{upper}'; expected a path of lower_to_upper edges. "
                        f"Write graph.lower_to_upper.{lower}: [{upper}]."
                    )
        return faults

    def _role_faults(self, problems: Mapping[str, ProblemNode]) -> list[str]:
        faults = []
        for name, node in problems.items():
            linked = {*self.uppers(name), *self.lowers(name)}
            for role, other in node.roles.items():
                key = f"problems.{name}.loss.roles.{role}"
                if other not in problems:
                    faults.append(
                        f"{key}: unknown problem '{other}'; expected one of {', '.join(problems)}."
                        f"{did_you_mean(other, problems)} Correct the name, or add problems.{other}."
                    )
                elif other != name and other not in linked:
                    faults.append(
                        f"{key}: '{other}' plays a role in the loss of '{name}', but no edge joins them; expected one. "
                        f"Write graph.lower_to_upper.{other}: [{name}] if '{name}' reads its solution, "
                        f"or graph.upper_to_lower.{other}: [{name}] if '{other}' shapes '{name}'."
                    )
            for use, other in node.other_uses.items():
                key = f"problems.{name}.{use}"
                if other not in problems:
                    faults.append(
                        f"{key}: unknown problem '{other}'; expected one of {', '.join(problems)}."
                        f"{did_you_mean(other, problems)} Correct the name, or add problems.{other}."
                    )
                elif other == name:
                    faults.append(f"{key}: {_itself(name, use)}")
                elif other not in self.uppers(name):
                    faults.append(
                        f"{key}: '{other}' shapes '{name}' here, but no edge says so; expected one. "
                        f"Write graph.upper_to_lower.{other}: [{name}]."
                    )
        return faults

    def _use_faults(self, problems: Mapping[str, ProblemNode]) -> list[str]:
        faults = []
        for key in ("upper_to_lower", "lower_to_upper"):
            for start, ends in getattr(self, key).items():
                for end in ends:
                    node = problems[end]
                    if start not in node.roles.values() and start not in node.other_uses.values():
                        faults.append(
                            f"graph.{key}.{start}: nothing uses the edge to '{end}'; expected that the loss of '{end}' "
                            f"has a role for '{start}', or its optimizer or reset_to names it. Write "
                            f"problems.{end}.loss.roles.<role>: {start}, or remove the edge."
                        )
        return faults

    def _reading_order(self) -> list[str]:
        sorter: TopologicalSorter[str] = TopologicalSorter()
        for upper, lowers in self.upper_to_lower.items():
            sorter.add(upper)
            for lower in lowers:
                sorter.add(lower)
        for lower, uppers in self.lower_to_upper.items():
            for upper in uppers:
                sorter.add(upper, lower)
        return list(sorter.static_order())


def _itself(name: str, use: str) -> str:
    if use == "reset_to":
        return (
            f"found '{name}', the problem itself; expected initial or another problem, as there each unroll begins. "
            "Write initial, or remove it."
        )
    return (
        f"found '{name}', the problem whose optimizer this is; expected another problem, whose module gives the value "
        f"when it is called without arguments, as in `mlotool show learned_lr`. Add problems.rate, and write "
        f"{{problem: rate}} here, graph.upper_to_lower.rate: [{name}] and graph.lower_to_upper.{name}: [rate]."
    )


def _names(key: str, ends: Any) -> tuple[str, ...]:
    is_list = isinstance(ends, Iterable | None) and not isinstance(ends, str | bytes | Mapping)
    names = tuple(() if ends is None else ends) if is_list else (ends,)
    if is_list and all(isinstance(each, str) for each in names):
        # An edge counts once, however often it is written.
        return tuple(dict.fromkeys(names))
    written = ends if isinstance(ends, str) else "<name>"
    found = shown(list(names) if is_list else ends)
    raise ConfigError(f"{key}: found {found}; expected a list of problems' names. Write {key}: [{written}].")
