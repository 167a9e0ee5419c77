"""Write the model of a finished run into a folder, for use without mlotool and for model hubs.

  mlotool export outputs/mwn/2026-01-31_12-00-00
  mlotool export RUN --problem reweight --out weights_net --checkpoint last

The folder has model.safetensors, config.yaml, recipe.yaml, decisions of spaces (nodes.json), and README.md, which says
what the model is, its metrics, how it was made, and how to load it with plain torch. A module of Hugging Face
(transformers, PEFT) is saved by its own `save_pretrained` instead.
"""

from pathlib import Path
from typing import Any

from mlotool import config
from mlotool.cli.arguments import VerbParser, add_trust, take_trust
from mlotool.cli.terminal import nearby, say
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.core.process import import_large, import_torch
from mlotool.folders.files import at_home, write_text
from mlotool.folders.run_folder import RunFolder

DEFAULT_FOLDER = "export"


def main(words: list[str]) -> int:
    """Write the folder."""
    parser = VerbParser("export", __doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="the run folder")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*",
        help="values of its config.yaml, where data lies elsewhere, or that a folder may not choose: data.root=/data",
    )  # fmt: skip
    parser.add_argument("--problem", metavar="NAME", help="whose module; the evaluated one by default")
    parser.add_argument("--out", metavar="DIR", help="the folder, new or empty; export/NAME_PROBLEM by default")
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="which one; best by default")
    add_trust(parser)
    arguments = parser.parse(words)
    take_trust(arguments.trust)
    # No folder of a run: said before torch is imported.
    values = config.load_run_config(arguments.run, arguments.overrides)
    problem = _problem(values, arguments.problem)
    folder = _folder(arguments.out or f"{DEFAULT_FOLDER}/{values.name}_{problem}")
    import_torch(with_wandb=False)
    import_large("mlotool.runner")
    from mlotool.report import model_card
    from mlotool.runner.exporting import export

    module = export(arguments.run, problem, folder, arguments.checkpoint, overrides=arguments.overrides)
    for name, text in model_card.copied_files(RunFolder(arguments.run)).items():
        write_text(folder / name, text)
    size = sum(tensor.numel() for tensor in module.parameters())
    card = model_card.model_card(arguments.run, problem, folder, arguments.checkpoint, size)
    write_text(folder / model_card.FILE, card)
    print(nearby(folder))
    say("read README.md and config.yaml before you publish them: they hold the command and the places of your data")
    return 0


def _problem(values: Any, name: str | None) -> str:
    names = list(values.problems)
    if name is None:
        name = names[0] if values.evaluate is None and len(names) == 1 else values.evaluate and values.evaluate.problem
    if name not in names:
        found = "no problem" if name is None else f"'{name}'"
        hint = did_you_mean(str(name), names)
        raise ConfigError(f"--problem: found {found}; expected one of {', '.join(names)}.{hint} Name one of them.")
    return str(name)


def _folder(name: str) -> Path:
    folder = at_home(name)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError(f"--out: found '{folder}', which is not empty; expected a new folder. Name another one.")
    return folder
