"""`mlotool check`: a recipe's hypergradients beside the most exact ones, and beside finite differences."""

import sys
from collections.abc import Sequence

from mlotool.cli.arguments import recipe_parser
from mlotool.core.errors import ConfigError
from mlotool.core.messages import escape

DESCRIPTION = """Build a recipe, train it for some ticks, and compare its hypergradient, at the parameters and batches
that it has then, with the most exact one that fits into memory, with every option of conf/hypergradient, and with
finite differences of the solved program. All in float64, on the CPU; the run folder and the loggers are not touched.

  mlotool check mwn
  mlotool check mwn --ticks 500 hypergradient=cg
"""


def main(words: Sequence[str]) -> int:
    """Print a table for each problem that shapes others."""
    parser = recipe_parser("check", DESCRIPTION)
    parser.add_argument("--ticks", type=int, default=0, help="ticks of training before the comparison; 0 by default")
    arguments = parser.parse(words)
    if arguments.ticks < 0:
        raise ConfigError(f"--ticks: found {arguments.ticks}; expected a whole number of at least 0. Correct it.")
    from mlotool import config
    from mlotool.cli.recipes import compose_request

    request, composed = compose_request(arguments.words, "check", arguments.trust)
    for warning in config.check(composed, targets=True):
        print(f"mlotool: warning: {escape(warning)}", file=sys.stderr)
    from mlotool.cli.show_check import show_check
    from mlotool.runner.checking import check_hypergradients

    show_check(check_hypergradients(composed, ticks=arguments.ticks), request.recipe or composed.name)
    return 0
