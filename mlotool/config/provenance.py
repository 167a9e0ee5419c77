"""Where a run came from: provenance.json."""

import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlotool

FILE = "provenance.json"
PACKAGES = (
    "torch",
    "torchvision",
    "torchmetrics",
    "pytorch-lightning",
    "hydra-core",
    "omegaconf",
    "numpy",
    "scikit-learn",
    "wandb",
)


@dataclass(frozen=True)
class Origin:
    """Where a config came from.

    Args:
        command: the command line, or the function that was called.
        overrides: of the command line.
        recipe_path: the recipe's file.
        sweep: name of the sweep's folder, where the run is a job of one.
    """

    command: str
    overrides: tuple[str, ...]
    recipe_path: Path | None
    sweep: str | None = None


def write_provenance(run_dir: Path | str, config: Any, origin: Origin) -> None:
    """Write provenance.json at the start of a run. Environment variables stay out of it: they hold secrets.

    Args:
        run_dir: the run folder.
        config: the run's config.
        origin: where it came from.
    """
    device = config.runner.accelerator
    record = {
        "command": origin.command,
        "overrides": list(origin.overrides),
        "recipe_path": None if origin.recipe_path is None else str(origin.recipe_path),
        "git": {**_git(Path.cwd()), "mlotool": _git(Path(mlotool.__file__).parent)},
        "versions": {"mlotool": mlotool.__version__, **{name: _version(name) for name in PACKAGES}},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": _device(device),
        "seed": config.seed,
        "started": _now().isoformat(timespec="seconds"),
        "finished": None,
        "duration_s": None,
    }
    _write(Path(run_dir), record)


def finish_provenance(run_dir: Path | str) -> None:
    """Add the end and the duration to provenance.json."""
    path = Path(run_dir) / FILE
    if not path.is_file():
        return
    record = json.loads(path.read_text(encoding="utf-8"))
    finished = _now()
    started = datetime.fromisoformat(record["started"])
    record["finished"] = finished.isoformat(timespec="seconds")
    record["duration_s"] = round((finished - started).total_seconds(), 1)
    _write(Path(run_dir), record)


def _write(run_dir: Path, record: dict[str, Any]) -> None:
    (run_dir / FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _now() -> datetime:
    return datetime.now().astimezone()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(folder: Path) -> dict[str, Any]:
    """Return the commit that a folder is at, and whether it was changed since; nulls outside a repository."""
    commit = _git_output(folder, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "dirty": None}
    status = _git_output(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _git_output(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _device(accelerator: str) -> str:
    # Whoever runs has imported torch; who only writes this file need not.
    torch = sys.modules.get("torch")
    if accelerator != "cpu" and torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(0))
    return platform.processor() or platform.machine()
