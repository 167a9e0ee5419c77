"""`mlotool show`: a recipe as it will run, without running any of it."""

from collections.abc import Sequence
from typing import Any

from mlotool.cli.arguments import recipe_parser
from mlotool.core.printable import printable

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
    from mlotool.config.resolve import limit_expansion

    _, config = compose_request(arguments.words, "show", arguments.trust)
    limit_expansion(config)
    graph = mermaid(config)
    if arguments.graph:
        print(graph)
        return 0
    from omegaconf import OmegaConf

    from mlotool.config.composition import config_errors

    with config_errors():
        print(printable(OmegaConf.to_yaml(config, resolve=True)))
    print("# graph:\n" + "\n".join(f"#   {line}" for line in graph.splitlines()))
    return 0


def mermaid(config: Any) -> str:
    """Return the graph of a config as mermaid text."""
    from omegaconf import OmegaConf

    from mlotool.config.names import is_identifier
    from mlotool.core.errors import ConfigError
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
