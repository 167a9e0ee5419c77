"""Where a run came from: provenance.json."""

import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import mlotool
from mlotool.folders import hub
from mlotool.folders.run_folder import RunFolder

PACKAGES = (
    *("torch", "torchvision", "torchmetrics", "pytorch-lightning", "hydra-core", "omegaconf", "numpy"),
    *("scikit-learn", "wandb"),
)
# What a repository may set without a program of its choice being run: no filters, no monitor, no fetching.
_HARMLESS_GIT = re.compile(
    r"core\.(repositoryformatversion|filemode|bare|logallrefupdates|ignorecase|precomposeunicode|symlinks|autocrlf|eol)"
    r"|(user|branch|pull|push|gc|color|init|commit|submodule|rebase|advice)\..+"
    r"|remote\..+\.(url|pushurl|fetch|tagopt|prune)|extensions\.(worktreeconfig|objectformat)"
)


@dataclass(frozen=True)
class Origin:
    """Where a config came from.

    Args:
        command: the command line, or the function that was called.
        overrides: of the command line.
        recipe_path: the recipe's file.
        git: what `repositories` says; None: it is asked where the run begins.
    """

    command: str
    overrides: tuple[str, ...]
    recipe_path: Path | None
    git: Mapping[str, Any] | None = None

    def trusting(self, packages: Iterable[str]) -> "Origin":
        """Return it with a command line that trusts these packages, also for who has not remembered them.

        Example:
            >>> Origin("mlotool run mine.yaml", (), None).trusting(["mypackage"]).command
            'mlotool run mine.yaml --trust mypackage'
        """
        if not self.command.startswith("mlotool "):
            # A call from Python says it by itself.
            return self
        words = shlex.split(self.command)
        missing = [name for name in packages if name not in words and f"--trust={name}" not in words]
        more = [word for name in missing for word in ("--trust", name)]
        return replace(self, command=" ".join([self.command, *more]))


def write_provenance(folder: RunFolder, config: Any, origin: Origin) -> None:
    """Write provenance.json at the start of a run. Environment variables stay out of it: they hold secrets.

    Args:
        folder: of the run.
        config: the run's config.
        origin: where it came from.
    """
    device = config.runner.accelerator
    named = hub.names_in(OmegaConf.to_container(config)) if hub.is_allowed() else ()
    record = {
        "command": origin.command,
        "overrides": list(origin.overrides),
        **{key: config[key] for key in ("inherit", "decisions_from") if config.get(key) is not None},
        # Each with its commit.
        **({"hub": names} if (names := sorted({name for _, name in named})) else {}),
        "recipe_path": None if origin.recipe_path is None else str(origin.recipe_path),
        "git": origin.git or repositories(),
        **_surroundings(device),
        "seed": config.seed,
        "started": _now().isoformat(timespec="seconds"),
        "finished": None,
        "duration_s": None,
    }
    folder.write_json(folder.PROVENANCE, record)


def repositories() -> dict[str, Any]:
    """Return what git says of the working folder and of mlotool; that takes as long as all else of a run's start."""
    return {**_git(Path.cwd()), "mlotool": _git_of_mlotool()}


@cache
def _git_of_mlotool() -> dict[str, Any]:
    """Ask once: what this process has imported stays as it is, whatever becomes of the files."""
    return _git(Path(mlotool.__file__).parent)


def finish_provenance(folder: RunFolder) -> None:
    """Add the end and the duration to provenance.json."""
    if not folder.has_inputs:
        return
    record, finished = folder.provenance(), _now()
    record["finished"] = finished.isoformat(timespec="seconds")
    # A folder that the run found here may say anything.
    with suppress(KeyError, TypeError, ValueError):
        record["duration_s"] = round((finished - datetime.fromisoformat(record["started"])).total_seconds(), 1)
    folder.write_json(folder.PROVENANCE, record)


def note_resume(folder: RunFolder, config: Any, origin: Origin, tick: int) -> list[str]:
    """Add a resume to provenance.json: when, at which tick, by what command, with which versions.

    Returns:
        What is another version, python or device than at the start, in words.
    """
    if not folder.has_inputs:
        write_provenance(folder, config, origin)
    record = folder.provenance()
    now, earlier, versions = _surroundings(config.runner.accelerator), record.get("resumes"), record.get("versions")
    entry = {"date": _now().isoformat(timespec="seconds"), "tick": tick, "command": origin.command, **now}
    record["resumes"] = earlier if isinstance(earlier, list) else []
    record["resumes"].append({**entry, "overrides": list(origin.overrides)})
    record["finished"] = record["duration_s"] = None
    folder.write_json(folder.PROVENANCE, record)
    before, after = {**(versions if isinstance(versions, dict) else {}), **record}, {**now["versions"], **now}
    changed = [key for key in ("mlotool", "torch", "device") if before.get(key) != after[key]]
    return [f"{key} {before.get(key)} then, {after[key]} now" for key in changed]


def _surroundings(accelerator: str) -> dict[str, Any]:
    return {
        "versions": {"mlotool": mlotool.__version__, **{name: _version(name) for name in PACKAGES}},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": _device(accelerator),
    }


def _now() -> datetime:
    return datetime.now().astimezone()


@cache
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
    if _runs_programs(folder):
        return {"commit": commit, "dirty": None}
    status = _git_output(folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _runs_programs(folder: Path) -> bool:
    """Say whether `git status` could run what the repository's own configuration names; it may be anybody's."""
    settings = _git_output(folder, "config", "--show-scope", "--name-only", "--list")
    if settings is None:
        return True
    scopes = [line.lower().partition("\t")[::2] for line in settings.splitlines()]
    return not all(_HARMLESS_GIT.fullmatch(name) for scope, name in scopes if scope in ("local", "worktree"))


def _git_output(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _device(accelerator: str) -> str:
    # Whoever runs has imported torch; who only writes this file need not.
    torch = sys.modules.get("torch")
    if accelerator != "cpu" and torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(0))
    return platform.processor() or platform.machine()
