"""`mlotool validate`: every fault of a recipe at once, without running any of it."""

import sys
from collections.abc import Sequence

from mlotool.cli.arguments import recipe_parser
from mlotool.core.printable import printable

DESCRIPTION = """Check a recipe: keys, names, graph, roles, and the arguments of mlotool's own targets, read from
source. No target is called. Exit code 2 where something is wrong.

  mlotool validate mwn hypergradient=cg
  mlotool validate recipes/mine.yaml --targets  third-party targets as well, which imports them
"""


def main(words: Sequence[str]) -> int:
    """Print warnings; raise ConfigError with every fault."""
    parser = recipe_parser("validate", DESCRIPTION)
    parser.add_argument("--targets", action="store_true", help="also import third-party targets; takes seconds")
    arguments = parser.parse(words)
    from mlotool import config
    from mlotool.cli.recipes import compose_request

    request, composed = compose_request(arguments.words, "validate", arguments.trust)
    warnings = config.check(composed, targets=arguments.targets)
    for warning in warnings:
        print(f"mlotool: warning: {printable(warning)}", file=sys.stderr)
    print(f"{printable(str(request.recipe))} is valid" + (f", with {len(warnings)} warning(s)" if warnings else ""))
    return 0
