"""What `mlotool show RECIPE --nodes PROBLEM` prints: the graph of a problem's model, and its decisions."""

import contextlib
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from mlotool.cli.job import plain_console
from mlotool.cli.show_sweep import FittedColumn, fitted_table
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
        names = [str(each) for each in config.problems]
        raise ConfigError(
            f"--nodes: found '{name}'; expected a problem of the recipe, one of {', '.join(names)}."
            f"{did_you_mean(name, names)} Correct it."
        )
    for warning in check(config, targets=True):
        print(f"mlotool: warning: {escape(warning)}", file=sys.stderr)
    from mlotool.config.building import decided_module
    from mlotool.spaces.decisions import by_mapping
    from mlotool.spaces.summary import nodes_of_spaces

    module, decisions = decided_module(config, name, by_mapping(dict(config.decisions)))
    nodes = nodes_of_spaces(module) or _traced(config, name, module)
    console = plain_console()
    console.width = min(console.width, WIDTH)
    count = sum(each.numel() for each in module.parameters())
    console.print(escape(f"problems.{name}.module: {_title(module)}, {len(nodes)} nodes, {count:,} parameters\n"))
    console.print(nodes_table(nodes))
    if len(nodes) > MAX_ROWS:
        console.print(f"{len(nodes) - MAX_ROWS} more nodes are not shown.")
    console.print()
    if not decisions.made:
        console.print("decisions: none; this model is the only one.")
        return
    console.print(decisions_table(list(decisions.made.values())))
    console.print(escape(f"\n{len(decisions.made)} decisions{_by_hand(config, decisions, words)}"), soft_wrap=True)
    console.print(escape(f"size: {_size(config, name, decisions.made)}"), soft_wrap=True)
    strange = [each for each in config.decisions if each not in decisions.made]
    if strange:
        console.print(escape(f"decisions of other problems: {', '.join(strange)}"), soft_wrap=True)


def nodes_table(nodes: "Sequence[NodeSummary]") -> Table:
    """Return a row a node; what it reads are the numbers of other rows."""
    numbers = {each.id: str(number) for number, each in enumerate(nodes)}
    shown = nodes[:MAX_ROWS]
    columns = [
        FittedColumn("#", list(numbers.values())[:MAX_ROWS], is_right=True, is_needed=True),
        FittedColumn("id", [each.id for each in shown]),
        FittedColumn("kind", [each.kind for each in shown]),
        FittedColumn("shape", [_shape(each.shape) for each in shown], is_needed=True),
        FittedColumn("inputs", [_listed([numbers.get(one, "?") for one in each.inputs], 8) for each in shown]),
        FittedColumn("changed by", [each.mutator or "" for each in shown]),
    ]
    return fitted_table(columns, WIDTH, drop_first=())[0]


def decisions_table(decisions: "Sequence[Decision]") -> Table:
    """Return a row for decisions one after the other that have the same candidates and the same value."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), width=WIDTH)
    table.add_column("decision", overflow="fold")
    table.add_column("taken", overflow="fold")
    table.add_column("candidates", overflow="fold")
    for name, found in alike(decisions):
        candidates = _listed([str(one) for one in found[0].candidates], MAX_CANDIDATES)
        table.add_row(*(escape(text) for text in (name, str(found[0].value), candidates)))
    return table


def _by_hand(config: Any, decisions: "Decisions", words: Sequence[str]) -> str:
    """Say how one of them is taken by hand."""
    free = [each for each in decisions.made.values() if each.name not in config.decisions and len(each.candidates) > 1]
    if not free:
        return ""
    trusting = [word for package in trusted_packages() for word in ("--trust", package)]
    taken = f"decisions.{free[0].name}={free[0].candidates[-1]}"
    return f"; by hand: {shlex.join(['mlotool', 'run', *words, *trusting, taken])}"


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
            with _evaluating(module):
                Shapes([list(shape)]).infer(graph, module, is_base=True)
        except InfeasibleModelError:
            # It is called with something else than images: nothing is known.
            for node in graph.nodes:
                node.meta.pop(VALUE, None)
    return summaries(graph, module, ())


@contextlib.contextmanager
def _evaluating(module: "nn.Module") -> Iterator[None]:
    modes = {each: each.training for each in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for each, mode in modes.items():
            each.training = mode


def _size(config: Any, name: str, taken: "Mapping[str, Decision]") -> str:
    from mlotool.config.building import decided_module
    from mlotool.config.drawing import WithoutValues
    from mlotool.spaces.size import space_size

    without_values = WithoutValues()

    def build(decide: "Decide") -> "Decisions":
        return without_values(lambda: decided_module(config, name, decide)[1])

    return str(space_size(build, taken))


def _shape(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else " x ".join(map(str, shape)) or "scalar"


def _listed(texts: Sequence[str], most: int) -> str:
    left = len(texts) - most
    return ", ".join(texts) if left <= 0 else f"{', '.join(texts[:most])}, .. ({left} more)"
