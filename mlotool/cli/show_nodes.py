"""What `mlotool show RECIPE --nodes PROBLEM` prints: the graph of a problem's model, and its decisions."""

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from mlotool.cli.terminal import TableColumn, fitted_table, plain_console, print_lines, warn
from mlotool.config.trusted import trusted_packages
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean, escape
from mlotool.report.models import alike

if TYPE_CHECKING:
    from torch import nn

    from mlotool.spaces.decisions import Decide, Decision, Decisions
    from mlotool.spaces.summary import NodeSummary

WIDTH = 100
MAX_ROWS = 1_000
MAX_CANDIDATES = 50


def show_nodes(config: Any, name: str, words: Sequence[str]) -> None:
    """Build the module of a problem, and print its nodes, its decisions and the size of its space.

    Args:
        config: a composed one; all that a run checks of it is checked here.
        name: of the problem.
        words: recipe and overrides, for the command that is printed.

    Raises:
        ConfigError: there is no such problem, the module cannot be built, or what it computes cannot be followed.
    """
    from mlotool.config import check

    if name not in config.problems:
        names = [str(problem) for problem in config.problems]
        raise ConfigError(
            f"--nodes: found '{name}'; expected a problem of the recipe, one of {', '.join(names)}."
            f"{did_you_mean(name, names)} Correct it."
        )
    warn(*check(config, targets=True))
    from mlotool.config.building import decided_module
    from mlotool.spaces.decisions import by_mapping
    from mlotool.spaces.summary import nodes_of_spaces

    module, decisions = decided_module(config, name, by_mapping(dict(config.decisions)))
    nodes = nodes_of_spaces(module) or _traced(config, name, module)
    console = plain_console()
    console.width = min(console.width, WIDTH)
    count = sum(parameter.numel() for parameter in module.parameters())
    console.print(escape(f"problems.{name}.module: {_title(module)}, {len(nodes)} nodes, {count:,} parameters\n"))
    console.print(nodes_table(nodes))
    if len(nodes) > MAX_ROWS:
        console.print(f"{len(nodes) - MAX_ROWS} more nodes are not shown.")
    console.print()
    made = decisions.made
    if not made:
        console.print("decisions: none; this model is the only one.")
        return
    console.print(decisions_table(list(made.values())))
    by_hand = ""
    free = [one for one in made.values() if one.name not in config.decisions and len(one.candidates) > 1]
    if free:
        trusting = [word for package in trusted_packages() for word in ("--trust", package)]
        taken = f"decisions.{free[0].name}={free[0].candidates[-1]}"
        by_hand = f"; by hand: {shlex.join(['mlotool', 'run', *words, *trusting, taken])}"
    strange = ", ".join(str(other) for other in config.decisions if other not in made)
    console.print()
    print_lines(console, [f"{len(made)} decisions{by_hand}", f"size: {_size(config, name, made)}",
                          f"decisions of other problems: {strange}" if strange else ""])  # fmt: skip


def nodes_table(nodes: "Sequence[NodeSummary]") -> Table:
    """Return a row a node; what it reads are the numbers of other rows."""
    numbers = {node.id: str(number) for number, node in enumerate(nodes)}
    shown = nodes[:MAX_ROWS]
    inputs = [_listed([numbers.get(name, "?") for name in node.inputs], 8) for node in shown]
    columns = [
        TableColumn("#", list(numbers.values())[:MAX_ROWS], is_right=True, is_needed=True),
        TableColumn("id", [node.id for node in shown]),
        TableColumn("kind", [node.kind for node in shown]),
        TableColumn("shape", [_shape(node.shape) for node in shown], is_needed=True),
        TableColumn("inputs", inputs),
        TableColumn("changed by", [node.mutator or "" for node in shown]),
    ]
    return fitted_table(columns, WIDTH)[0]


def decisions_table(decisions: "Sequence[Decision]") -> Table:
    """Return a row for decisions one after the other that have the same candidates and the same value."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), width=WIDTH)
    table.add_column("decision", overflow="fold")
    table.add_column("taken", overflow="fold")
    table.add_column("candidates", overflow="fold")
    for name, decision in alike(decisions):
        candidates = _listed([str(candidate) for candidate in decision.candidates], MAX_CANDIDATES)
        table.add_row(*(escape(text) for text in (name, str(decision.value), candidates)))
    return table


def _title(module: "nn.Module") -> str:
    base = vars(module).get("_own_type")
    return f"{type(module).__name__} of {base.__name__}" if isinstance(base, type) else type(module).__name__


def _traced(config: Any, name: str, module: "nn.Module") -> "tuple[NodeSummary, ...]":
    """Return the nodes of a module that is no space; their shapes where the data says what it is called with."""
    from mlotool.core.errors import InfeasibleModelError
    from mlotool.spaces.shapes import VALUE, Shapes
    from mlotool.spaces.summary import summaries
    from mlotool.spaces.tracing import traced

    try:
        graph = traced(module, ())
    except ConfigError as error:
        raise ConfigError(f"problems.{name}.module: {error}") from error
    shape = dict(config.data).get("image_shape") if isinstance(config.data, Mapping) else None
    if shape is not None and sum(node.op == "placeholder" for node in graph.nodes) == 1:
        try:
            Shapes([list(shape)]).infer(graph, module.eval(), is_base=True)
        except InfeasibleModelError:
            # It is called with something else than images: nothing is known.
            for node in graph.nodes:
                node.meta.pop(VALUE, None)
    return summaries(graph, module, ())


def _size(config: Any, name: str, taken: "Mapping[str, Decision]") -> str:
    from mlotool.config.building import decided_module
    from mlotool.config.drawing import WithoutValues
    from mlotool.spaces.summary import space_size

    without_values = WithoutValues()

    def build(decide: "Decide") -> "Decisions":
        return without_values(lambda: decided_module(config, name, decide)[1])

    return str(space_size(build, taken))


def _shape(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else " x ".join(map(str, shape)) or "scalar"


def _listed(texts: Sequence[str], most: int) -> str:
    left = len(texts) - most
    return ", ".join(texts) if left <= 0 else f"{', '.join(texts[:most])}, .. ({left} more)"
