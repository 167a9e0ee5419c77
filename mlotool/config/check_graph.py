"""The graph between problems: edges that fit the roles of losses, and point the right way."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlotool.config.parameter_groups import optimizer_roles
from mlotool.config.resolve import is_known
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.problem.settings import ProblemNode
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


def stream_faults(values: Values) -> Iterator[str]:
    """Yield what names a problem without a stream, or a split that the data have not."""
    problems = values["problems"]
    for name, problem in problems.items():
        other = problem.get("same_batch_as")
        streaming = [each for each, node in problems.items() if node.get("stream") and each != name]
        if isinstance(other, str) and problem.get("stream"):
            advice = f"Write problems.{name}.stream: null, or remove same_batch_as."
            yield (
                f"problems.{name}.same_batch_as: found '{other}' beside a stream; expected one of the two, as the "
                f"problem sees the batches of '{other}' or its own. "
                f"{advice if other in streaming else 'Remove same_batch_as.'}"
            )
        elif isinstance(other, str) and other not in streaming:
            yield (
                f"problems.{name}.same_batch_as: found '{other}'; expected another problem, one that has a stream: "
                f"{', '.join(streaming) or 'there is none'}.{did_you_mean(other, streaming)} Correct it, or remove it."
            )
    sizes = values["data"].get("sizes") if isinstance(values["data"], Mapping) else None
    if not isinstance(sizes, Mapping):
        return
    splits = [name for name, size in sizes.items() if size]
    used = {
        f"problems.{name}.stream.split": problem["stream"].get("split")
        for name, problem in values["problems"].items()
        if problem.get("stream")
    }
    used.update({f"evaluate.splits.{name}": name for name in (values["evaluate"] or {}).get("splits", ())})
    for name, analysis in values["analyses"].items():
        if isinstance(analysis, Mapping):
            used[f"analyses.{name}.split"] = analysis.get("split", "train")
    for key, split in used.items():
        if is_known(split) and split not in splits:
            yield (
                f"{key}: found '{split}'; expected a split of the data: {', '.join(splits)}."
                f"{did_you_mean(split, splits)} Correct it, or set data.sizes.{split}=100."
            )
