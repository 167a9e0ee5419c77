"""`mlotool evaluate`: a finished run's metrics on any split."""

from collections.abc import Sequence
from pathlib import Path

from mlotool.cli.arguments import VerbParser, add_trust


def main(words: Sequence[str]) -> int:
    """Print `<split>/<metric> value`, one a line."""
    parser = VerbParser("evaluate", "The metrics of a run's checkpoint on a split of its data.")
    parser.add_argument("run", metavar="RUN", type=Path, help="the run folder")
    parser.add_argument("--split", required=True, help="a split of the recipe's data: val, test, ...")
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="which one; best by default")
    add_trust(parser)
    arguments = parser.parse(words)
    from mlotool import config

    for package in arguments.trust:
        config.trust(package)
    config.load_run_config(arguments.run)  # no folder of a run: said before torch is imported
    from mlotool import runner

    for key, value in runner.evaluate(arguments.run, arguments.split, arguments.checkpoint).items():
        print(f"{key} {value:.6g}")
    return 0
