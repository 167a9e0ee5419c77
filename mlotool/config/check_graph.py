"""The graph between problems: edges that fit the roles of losses, and point the right way."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlotool.config.optimizer_roles import optimizer_roles
from mlotool.core.errors import ConfigError
from mlotool.problem.node import ProblemNode
from mlotool.program.graph import Graph

Values = Mapping[str, Any]


def graph_faults(values: Values) -> Iterator[str]:
    """Yield the edges that no loss reads, and the roles that no edge leads to."""
    nodes = {
        name: ProblemNode(dict(_played(problem)), _other_uses(problem)) for name, problem in values["problems"].items()
    }
    try:
        Graph(**values["graph"]).validate(nodes)
    except ConfigError as error:
        yield from str(error).splitlines()


def direction_faults(values: Values) -> Iterator[str]:
    """Yield the problems that can learn nothing as the edges point, and how the edges would be right."""
    graph = Graph(**values["graph"])
    for name, problem in values["problems"].items():
        players = {other for _, other in _played(problem)}
        if not players or name in players or graph.lowers(name):
            continue
        advice = " ".join(
            f"Write graph.upper_to_lower.{name}: [{other}] and graph.lower_to_upper.{other}: [{name}]."
            for other in sorted(players & {*graph.readers(name), *graph.uppers(name)})
        )
        yield (
            f"graph: '{name}' reads no problem's solution, and its loss does not use its own module, so that it cannot "
            "learn; expected a role for itself, or edges that make it the upper problem. "
            + (f"The edges are the wrong way round? {advice}" if advice else f"Add a role for '{name}' to its loss.")
        )


def _other_uses(problem: Values) -> dict[str, str]:
    uses = {f"optimizer.{key}": name for key, name in optimizer_roles(problem.get("optimizer")).items()}
    start = problem.get("reset_to")
    return uses if not isinstance(start, str) or start == "initial" else {**uses, "reset_to": start}


def _played(problem: Values) -> Iterator[tuple[str, str]]:
    loss = problem.get("loss")
    roles = loss.get("roles") if isinstance(loss, Mapping) else None
    for role, value in roles.items() if isinstance(roles, Mapping) else ():
        name = value.get("problem") if isinstance(value, Mapping) else value
        if isinstance(name, str):
            yield role, name
