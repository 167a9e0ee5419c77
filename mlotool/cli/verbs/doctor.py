"""`mlotool doctor`: what this machine has, and what is missing for a run."""

import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from mlotool import __version__
from mlotool.cli.arguments import VerbParser
from mlotool.config import recipes, schema
from mlotool.core.messages import escape

OPTIONAL = {
    "tensorboard": "logger=tensorboard; pip install mlotool[tensorboard]",
    "optuna": "sweep=optuna; pip install mlotool[optuna]",
    "submitit": "sweep.launcher=slurm; pip install mlotool[slurm]",
    "ray": "sweep.launcher=ray; pip install mlotool[ray]",
}
GOOD, NOTE, BAD = "ok", "note", "FAULT"
Finding = tuple[str, str, str]


def main(words: list[str]) -> int:
    """Print the findings; 1 where a run could not work."""
    VerbParser("doctor", "Versions, devices, writable folders, W&B and optional extras.").parse(words)
    faults = 0
    for status, name, text in _findings():
        print(escape(f"{status:<6} {name:<18} {text}"))
        faults += status == BAD
    print(f"\n{faults} fault(s)" if faults else "\nnothing is missing")
    return 1 if faults else 0


def _findings() -> Iterator[Finding]:
    yield GOOD, "mlotool", f"{__version__} at {Path(__file__).parents[1]}"
    yield GOOD, "python", f"{platform.python_version()} at {sys.executable}"
    yield GOOD, "platform", f"{platform.platform()}, {os.cpu_count()} CPUs"
    for requirement in filter(lambda text: "extra ==" not in text, requires("mlotool") or ()):
        yield _package(re.split(r"[^\w-]", requirement)[0], None)
    for name, purpose in OPTIONAL.items():
        yield _package(name, purpose)
    yield from _devices()
    yield from _options()
    yield _folder("outputs", Path("outputs"))
    yield _folder("temporary files", Path(tempfile.gettempdir()))
    key = "WANDB_API_KEY is set" if os.environ.get("WANDB_API_KEY") else "which needs `wandb login`"
    yield GOOD, "W&B", f"off unless logger=wandb, or logger.mode=online; {key}"


def _package(name: str, purpose: str | None) -> Finding:
    try:
        return GOOD, name, version(name)
    except PackageNotFoundError:
        if purpose is not None:
            return NOTE, name, f"not installed; for {purpose}"
        return BAD, name, f"not installed; run: {sys.executable} -m pip install {name}"


def _options() -> Iterator[Finding]:
    """Say where `data=..` and the like are looked for, and what in ./conf will not be found."""
    groups = schema.OPTION_GROUPS
    own = {group: recipes.own_options(group) for group in groups} if recipes.options_folder() else {}
    listed = ", ".join(f"{group} ({len(names)})" for group, names in own.items() if names)
    yield GOOD, "options", f"{recipes.package_dir('conf')}; yours in ./conf/<group>/<name>.yaml: {listed or 'none'}"
    for folder in recipes.surplus_folders():
        yield NOTE, "options", f"{folder} belongs to no group; expected {', '.join(groups)}"
    pairs = [(group, name) for group, names in own.items() for name in names]
    for group, name in filter(lambda pair: recipes.built_in_option(*pair), pairs):
        yield NOTE, "options", f"conf/{group}/{name}.yaml has the name of a built-in option; rename it"


def _devices() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:
        yield BAD, "torch", f"cannot be imported: {error}; install it again"
        return
    yield GOOD, "cpu", f"{torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield GOOD, f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    elif torch.backends.mps.is_available():
        yield GOOD, "mps", "Apple GPU"
    else:
        yield NOTE, "gpu", "none; runs use the CPU"


def _folder(name: str, folder: Path) -> Finding:
    # The nearest parent that exists decides: a run makes the rest.
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            return GOOD, name, f"{folder.absolute()} is writable"
    except OSError as error:
        return BAD, name, f"{folder.absolute()} is not writable ({error.strerror}); work in another folder"
