"""`mlotool show`: a recipe as it will run, without running any of it."""

from collections.abc import Sequence
from typing import Any

from mlotool.cli.arguments import recipe_parser

DESCRIPTION = """A recipe with all its defaults and overrides resolved, as YAML, and its graph as mermaid text
behind it, in comments. No target is called.

  mlotool show mwn hypergradient=cg
  mlotool show mwn --graph                      the mermaid text alone
"""


def main(words: Sequence[str]) -> int:
    """Print the resolved config and the graph."""
    parser = recipe_parser("show", DESCRIPTION)
    parser.add_argument("--graph", action="store_true", help="print the graph alone")
    arguments = parser.parse(words)
    from mlotool.cli.recipes import compose_request

    _, config = compose_request(arguments.words, "show", arguments.trust)
    graph = mermaid(config)
    if arguments.graph:
        print(graph)
        return 0
    from omegaconf import OmegaConf

    from mlotool.config.composition import config_errors

    with config_errors():
        print(OmegaConf.to_yaml(config, resolve=True))
    print("# graph:\n" + "\n".join(f"#   {line}" for line in graph.splitlines()))
    return 0


def mermaid(config: Any) -> str:
    """Return the graph of a config as mermaid text."""
    from omegaconf import OmegaConf

    from mlotool.program.graph import Graph

    edges: Any = OmegaConf.to_container(config.graph, resolve=True)
    return Graph(**edges).mermaid().rstrip()
