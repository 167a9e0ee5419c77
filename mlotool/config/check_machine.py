"""What a config needs of this machine: a GPU, folders and files; only `validate --targets` asks."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlotool.config.finished_run import finished_run, folder_of
from mlotool.config.reading import leaves
from mlotool.core.errors import ConfigError
from mlotool.core.files import at_home

PLACES = ("root", "folder", "tokenizer", "parameters_file")
"""Keys of nodes that name files or folders which have to be there."""


def machine_faults(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what this machine lacks.

    Args:
        values: the config, as plain values.
    """
    if values["runner"]["accelerator"] == "gpu":
        import torch

        if not torch.cuda.is_available():
            yield (
                "runner.accelerator: found gpu, and torch sees no GPU here; expected a machine with one. Set "
                "runner.accelerator=auto, or see `mlotool doctor`."
            )
    if isinstance(values["inherit"], str):
        try:
            finished_run("inherit", folder_of(Path(values["inherit"])))
        except ConfigError as error:
            yield str(error)
    nodes = {"data": values["data"]}
    nodes |= {f"problems.{name}.module": problem["module"] for name, problem in values["problems"].items()}
    for place, node in nodes.items():
        if not isinstance(node, Mapping) or node.get("download") is True:
            continue
        for key, value in leaves(node, place):
            is_place = key.rpartition(".")[2] in PLACES and isinstance(value, str)
            if is_place and not at_home(value).exists():
                yield (
                    f"{key}: found '{value}', which is not there; expected a file or folder. Put the data there, or "
                    f"name another place: {key}=.."
                )
