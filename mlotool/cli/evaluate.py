"""`mlotool evaluate`: a finished run's metrics on any split."""

from collections.abc import Sequence
from pathlib import Path

from mlotool.cli.arguments import VerbParser, add_trust
from mlotool.core.messages import escape


def main(words: Sequence[str]) -> int:
    """Print `<split>/<metric> value`, one a line."""
    parser = VerbParser("evaluate", "The metrics of a run's checkpoint on a split of its data.")
    parser.add_argument("run", metavar="RUN", type=Path, help="the run folder")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*",
        help="values of its config.yaml, where data lies elsewhere, or that a folder may not choose: data.root=/data",
    )  # fmt: skip
    parser.add_argument("--split", required=True, help="a split of the recipe's data: val, test, ...")
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="which one; best by default")
    add_trust(parser)
    arguments = parser.parse(words)
    from mlotool import config

    for package in arguments.trust:
        config.trust(package)
    config.load_run_config(arguments.run, arguments.overrides)  # no folder of a run: said before torch is imported
    from mlotool import runner

    found = runner.evaluate(arguments.run, arguments.split, arguments.checkpoint, overrides=arguments.overrides)
    for key, value in found.items():
        print(f"{escape(key)} {value:.6g}")
    return 0
