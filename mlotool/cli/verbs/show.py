"""Show what a recipe sets, with the recipes that it inherits, the options that it chooses and the overrides.

The output is YAML with resolved references, followed by the graph as mermaid text, in comments. Nothing is built,
except with --nodes, which builds a problem's module as a run does, and --parallel, which also runs a few ticks.

  mlotool show mwn hypergradient=cg
  mlotool show mwn --all                        every key, defaults included: the config of a run
  mlotool show mwn --graph                      only the mermaid text
  mlotool show mwn --nodes classifier           the nodes of a problem's model, its decisions, the size of its space
  mlotool show layerparallel_resnet --parallel  the balance of its stages, and the largest possible speed-up
"""

import shlex
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import OmegaConf, open_dict

from mlotool import config as configuration
from mlotool.cli.arguments import Request, compose_request, recipe_parser, trust_words
from mlotool.cli.terminal import plain_console, print_lines, print_table, warn
from mlotool.config import building, composition, resolve
from mlotool.config.security import trusted
from mlotool.config.sources import unfit_choices
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean, escape
from mlotool.sweep import drawing

if TYPE_CHECKING:
    from mlotool.spaces.summary import NodeSummary

_WIDTH = 100


def main(words: list[str]) -> int:
    """Print what the recipe sets, or the whole config, and the graph."""
    parser = recipe_parser("show", __doc__)
    parser.add_argument("--all", action="store_true", help="every key, defaults included")
    parser.add_argument("--graph", action="store_true", help="print the graph alone")
    parser.add_argument("--nodes", metavar="PROBLEM", help="the nodes and decisions of a problem's model; builds it")
    parser.add_argument(
        "--parallel", action="store_true", help=("the speed-up to expect of layer-parallel training; runs some ticks")
    )
    arguments = parser.parse(words)
    request, config = compose_request(arguments.words, "show", arguments.trust)
    resolve.limit_expansion(config)
    if arguments.nodes is not None:
        show_nodes(config, arguments.nodes, arguments.words)
        return 0
    if arguments.parallel:
        show_parallel(config)
        return 0
    graph = mermaid(config)
    if arguments.graph:
        print(graph)
        return 0
    with configuration.config_errors():
        if arguments.all:
            text = OmegaConf.to_yaml(config, resolve=True)
        else:
            text = summary(request, OmegaConf.to_container(config, resolve=True), arguments.words)
    print(escape(text))
    if parallel_problems(OmegaConf.to_container(config.problems, resolve=False)):
        print(f"# the speed-up to expect of layer-parallel training: {shlex.join(_show(words, '--parallel'))}")
    print("# graph:\n" + "\n".join(f"#   {line}" for line in graph.splitlines()))
    return 0


def _show(words: list[str], option: str) -> list[str]:
    return ["mlotool", "show", *(word for word in words if word != "--all"), option]


def summary(request: Request, config: Any, words: list[str]) -> str:
    """Return what a recipe sets as YAML, below comments that say what it is made of."""
    parts = composition.set_parts(request.hydra_words(), [] if request.file is None else [request.file.parent])
    lines = [f"# What the recipe sets; for the defaults too: {' '.join(shlex.join(_show(words, '--all')).split())}"]
    for label, names in (("inherits", parts.inherited), ("options", parts.options)):
        if names:
            lines += wrap(f"{label}: {', '.join(names)}", _WIDTH, initial_indent="# ", subsequent_indent="#   ")
    values = parts.values(config)
    if unfit := [f"override /{group}: null" for group in unfit_choices(values)]:
        lines.append(f"defaults: [_self_, {', '.join(unfit)}]")
    # A mapping of plain values is one line, as in the recipes.
    body = yaml.safe_dump(values, default_flow_style=None, sort_keys=False, allow_unicode=True, width=_WIDTH)
    return "\n".join([*lines, body])


def mermaid(config: Any) -> str:
    """Return the graph of a config as mermaid text."""
    from mlotool.program.graph import Graph

    edges: Any = OmegaConf.to_container(config.graph, resolve=True)
    return Graph(**edges).mermaid().rstrip()


NUM_TICKS = 3


def show_parallel(config: Any) -> None:
    """Build a recipe, train it for a few ticks in this process, and print what its `parallel:` nodes promise.

    Args:
        config: a composed one; all that a run checks of it is checked here.

    Raises:
        ConfigError: no problem is layer-parallel, or the recipe cannot be built.
    """
    from mlotool.program import Schedule

    names = parallel_problems(OmegaConf.to_container(config.problems, resolve=False))
    if not names:
        raise ConfigError(
            "--parallel: found no problem with a parallel setting; expected one. Add one, as in "
            f"+parallel@problems.{next(iter(config.problems))}.parallel=penalty, or leave --parallel out."
        )
    warn(*configuration.check(config, targets=True))
    for name in names:
        node = config.problems[name].parallel
        if str(node.get("_target_")).rpartition(".")[2] == "Auxiliary":
            with open_dict(node):
                node.record = NUM_TICKS
    program = configuration.build(config).program
    schedule = Schedule(program)
    for _ in range(NUM_TICKS):
        schedule.tick()
    for name in names:
        parallel = program.problems[name].parallel
        for line in () if parallel is None else parallel.forecast():
            print(escape(f"{name}: {line}"))


def parallel_problems(problems: Any) -> list[str]:
    """Return the names of the problems that have a `parallel:` node.

    Args:
        problems: the config's, as plain values.

    Example:
        >>> parallel_problems({"a": {"parallel": {"stages": 2}}, "b": {"parallel": None}})
        ['a']
    """
    return [name for name, problem in problems.items() if isinstance(problem, dict) and problem.get("parallel")]


MAX_ROWS = 1_000
MAX_CANDIDATES = 50


def show_nodes(config: Any, name: str, words: list[str]) -> None:
    """Build the module of a problem, and print its nodes, its decisions and the size of its space.

    Args:
        config: a composed one; all that a run checks of it is checked here.
        name: of the problem.
        words: recipe and overrides, for the command that is printed.

    Raises:
        ConfigError: there is no such problem, the module cannot be built, or what it computes cannot be followed.
    """
    if name not in config.problems:
        names = [str(problem) for problem in config.problems]
        raise ConfigError(
            f"--nodes: found '{name}'; expected a problem of the recipe, one of {', '.join(names)}."
            f"{did_you_mean(name, names)} Correct it."
        )
    warn(*configuration.check(config, targets=True))
    from mlotool.report.models import alike
    from mlotool.spaces import decisions as deciding
    from mlotool.spaces import summary as summaries

    module, decisions = building.decided_module(config, name, deciding.by_mapping(dict(config.decisions)))
    nodes = summaries.nodes_of_spaces(module) or _traced(name, module)
    console = plain_console()
    console.width = min(console.width, _WIDTH)
    count = sum(parameter.numel() for parameter in module.parameters())
    console.print(escape(f"problems.{name}.module: {_title(module)}, {len(nodes)} nodes, {count:,} parameters\n"))
    print_table(console, _node_columns(nodes))
    if len(nodes) > MAX_ROWS:
        console.print(f"{len(nodes) - MAX_ROWS} more nodes are not shown.")
    console.print()
    made = decisions.made
    if not made:
        console.print("decisions: none; this model is the only one.")
        return
    families = list(alike(list(made.values())))
    candidates = [_listed([str(choice) for choice in decision.candidates], MAX_CANDIDATES) for _, decision in families]
    taken = [str(decision.value) for _, decision in families]
    print_table(console, [("decision", [name for name, _ in families], False), ("taken", taken, False),
                          ("candidates", candidates, False)])  # fmt: skip
    by_hand = ""
    free = [one for one in made.values() if one.name not in config.decisions and len(one.candidates) > 1]
    if free:
        trusting = trust_words(trusted.trusted_packages())
        change = f"decisions.{free[0].name}={free[0].candidates[-1]}"
        by_hand = f"; by hand: {shlex.join(['mlotool', 'run', *words, *trusting, change])}"
    without_values = drawing.WithoutValues()

    def build(decide: Any) -> Any:
        return without_values(lambda: building.decided_module(config, name, decide)[1])

    strange = ", ".join(str(other) for other in config.decisions if other not in made)
    console.print()
    print_lines(console, [f"{len(made)} decisions{by_hand}", f"size: {summaries.space_size(build, made)}",
                          f"decisions of other problems: {strange}" if strange else ""])  # fmt: skip


def _node_columns(nodes: "tuple[NodeSummary, ...]") -> list[tuple[str, list[str], bool]]:
    """Return a table with a row a node; what it reads are the numbers of other rows."""
    numbers = {node.id: str(number) for number, node in enumerate(nodes)}
    shown = nodes[:MAX_ROWS]
    inputs = [_listed([numbers.get(name, "?") for name in node.inputs], 8) for node in shown]
    shapes = ["" if node.shape is None else " x ".join(map(str, node.shape)) or "scalar" for node in shown]
    return [
        ("#", list(numbers.values())[:MAX_ROWS], True),
        ("id", [node.id for node in shown], False),
        ("kind", [node.kind for node in shown], False),
        ("shape", shapes, True),
        ("inputs", inputs, False),
        ("changed by", [node.mutator or "" for node in shown], False),
    ]


def _title(module: object) -> str:
    base = vars(module).get("_own_type")
    return f"{type(module).__name__} of {base.__name__}" if isinstance(base, type) else type(module).__name__


def _traced(name: str, module: Any) -> "tuple[NodeSummary, ...]":
    """Return the nodes of a module that is no space, without their shapes."""
    from mlotool.spaces import summary, tracing

    try:
        graph = tracing.traced(module, ())
    except ConfigError as error:
        raise ConfigError(f"problems.{name}.module: {error}") from error
    return summary.summaries(graph, module, ())


def _listed(texts: list[str], most: int) -> str:
    left = len(texts) - most
    return ", ".join(texts) if left <= 0 else f"{', '.join(texts[:most])}, .. ({left} more)"
