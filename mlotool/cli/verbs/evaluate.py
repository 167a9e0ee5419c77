"""`mlotool evaluate`: a finished run's metrics on any split."""

from pathlib import Path

from mlotool import config
from mlotool.cli.arguments import VerbParser, add_trust, take_trust
from mlotool.core.messages import escape


def main(words: list[str]) -> int:
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
    take_trust(arguments.trust)
    config.load_run_config(arguments.run, arguments.overrides)  # no folder of a run: said before torch is imported
    from mlotool import runner

    metrics = runner.evaluate(arguments.run, arguments.split, arguments.checkpoint, overrides=arguments.overrides)
    for key, value in metrics.items():
        print(f"{escape(key)} {value:.6g}")
    return 0
