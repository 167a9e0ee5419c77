"""What a result file says of where its numbers come from."""

import datetime
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent.parent / "results"


def surroundings(packages: Sequence[str] = ("torch", "numpy")) -> dict[str, Any]:
    """Return versions, machine, date and command."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", *_module_and_arguments()]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "versions": {package: metadata.version(package) for package in packages},
        "commit": _commit(),
    }


def write(name: str, content: dict[str, Any], path: Path | None = None) -> Path:
    """Write `content` as JSON to `path`, or to results/<name>.json, and return where."""
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def peak_memory() -> float:
    """Return the most memory that this process has had resident, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def _module_and_arguments() -> list[str]:
    spec = sys.modules["__main__"].__spec__
    module = spec.name if spec is not None else sys.argv[0]
    # The clone's place is the machine's own business.
    return [module, *("PATH" if Path(each).is_absolute() else each for each in sys.argv[1:])]


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit_of(folder: Path) -> str:
    """Return the commit that a folder has checked out; empty where it is no checkout."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return result.stdout.strip()


def _commit() -> str | None:
    found = commit_of(RESULTS.parent)
    # A copy of the tree without its repository: `make gpu-kit` has noted it.
    noted = RESULTS.parent.parent / "gpu-kit" / "commit"
    return found or (noted.read_text().strip() if noted.is_file() else None)
