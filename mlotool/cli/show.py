"""`mlotool show`: what a recipe sets, or all of it as it will run, without running any of it."""

import shlex
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from mlotool.cli.arguments import Request, recipe_parser
from mlotool.cli.terminal import warn
from mlotool.core.errors import ConfigError
from mlotool.core.messages import escape

DESCRIPTION = """What a recipe sets, with the recipes that it inherits, the options that it chooses and the overrides:
YAML with resolved references, and behind it the graph as mermaid text, in comments. No target is called, but with
--nodes, which builds a problem's module as a run does, and --parallel, which takes a few ticks of it.

  mlotool show mwn hypergradient=cg
  mlotool show mwn --all                        every key, defaults included: the config of a run
  mlotool show mwn --graph                      the mermaid text alone
  mlotool show mwn --nodes classifier           the nodes of a problem's model, its decisions, the size of its space
  mlotool show layerparallel_resnet --parallel  the balance of its stages, and how much faster they are at most
"""
_WIDTH = 100


def main(words: Sequence[str]) -> int:
    """Print what the recipe sets, or the whole config, and the graph."""
    parser = recipe_parser("show", DESCRIPTION)
    parser.add_argument("--all", action="store_true", help="every key, defaults included")
    parser.add_argument("--graph", action="store_true", help="print the graph alone")
    parser.add_argument("--nodes", metavar="PROBLEM", help="the nodes and decisions of a problem's model; builds it")
    parser.add_argument("--parallel", action="store_true", help="what layer-parallel training promises; takes ticks")
    arguments = parser.parse(words)
    from mlotool.cli.arguments import compose_request
    from mlotool.config.resolve import limit_expansion

    request, config = compose_request(arguments.words, "show", arguments.trust)
    limit_expansion(config)
    if arguments.nodes is not None:
        from mlotool.cli.show_nodes import show_nodes

        show_nodes(config, arguments.nodes, arguments.words)
        return 0
    if arguments.parallel:
        show_parallel(config)
        return 0
    graph = mermaid(config)
    if arguments.graph:
        print(graph)
        return 0
    from omegaconf import OmegaConf

    from mlotool.config.hydra_errors import config_errors

    with config_errors():
        if arguments.all:
            text = OmegaConf.to_yaml(config, resolve=True)
        else:
            text = summary(request, OmegaConf.to_container(config, resolve=True), arguments.words)
    print(escape(text))
    if parallel_problems(OmegaConf.to_container(config.problems, resolve=False)):
        print(f"# how fast layer-parallel training is to be expected to be: {shlex.join(_show(words, '--parallel'))}")
    print("# graph:\n" + "\n".join(f"#   {line}" for line in graph.splitlines()))
    return 0


def _show(words: Sequence[str], option: str) -> list[str]:
    return ["mlotool", "show", *(word for word in words if word != "--all"), option]


def summary(request: Request, config: Any, words: Sequence[str]) -> str:
    """Return what a recipe sets as YAML, below comments that say what it is made of."""
    import yaml

    from mlotool.config.composition import set_parts

    parts = set_parts(request.hydra_words(), [] if request.file is None else [request.file.parent])
    lines = [f"# What the recipe sets; for the defaults too: {' '.join(shlex.join(_show(words, '--all')).split())}"]
    for label, names in (("inherits", parts.inherited), ("options", parts.options)):
        if names:
            lines += wrap(f"{label}: {', '.join(names)}", _WIDTH, initial_indent="# ", subsequent_indent="#   ")
    values = parts.values(config)
    # A mapping of plain values is one line, as in the recipes.
    body = yaml.safe_dump(values, default_flow_style=None, sort_keys=False, allow_unicode=True, width=_WIDTH)
    return "\n".join([*lines, body])


def mermaid(config: Any) -> str:
    """Return the graph of a config as mermaid text."""
    from omegaconf import OmegaConf

    from mlotool.config.schema import is_identifier
    from mlotool.program.graph import Graph

    edges: Any = OmegaConf.to_container(config.graph, resolve=True)
    names = [name for ends in edges.values() for start, others in ends.items() for name in (start, *others)]
    for name in names:
        # In mermaid's text anything else could be markup.
        if not is_identifier(name):
            raise ConfigError(
                f"graph: found the name {name!r}; expected a problem's: letters, digits and '_', not beginning with a "
                "digit. Correct the name."
            )
    return Graph(**edges).mermaid().rstrip()


NUM_TICKS = 3


def show_parallel(config: Any) -> None:
    """Build a recipe, train it for a few ticks in this process, and print what its `parallel:` nodes promise.

    Args:
        config: a composed one; all that a run checks of it is checked here.

    Raises:
        ConfigError: no problem is layer-parallel, or the recipe cannot be built.
    """
    from omegaconf import OmegaConf, open_dict

    from mlotool import config as configs
    from mlotool.config.checks import build
    from mlotool.program import Schedule

    names = parallel_problems(OmegaConf.to_container(config.problems, resolve=False))
    if not names:
        raise ConfigError(
            "--parallel: found no problem with a parallel setting; expected one. Add one, as in "
            f"+parallel@problems.{next(iter(config.problems))}.parallel=penalty, or leave --parallel out."
        )
    warn(*configs.check(config, targets=True))
    for name in names:
        node = config.problems[name].parallel
        if str(node.get("_target_")).rpartition(".")[2] == "Auxiliary":
            with open_dict(node):
                node.record = NUM_TICKS
    program = build(config).program
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
    return [name for name, problem in problems.items() if isinstance(problem, Mapping) and problem.get("parallel")]
