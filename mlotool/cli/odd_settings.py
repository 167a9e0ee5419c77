"""Settings of Hydra's and of sweeps that would not do what they say in this command."""

import sys
from collections.abc import Sequence
from pathlib import Path

from mlotool.config.sweep_plan import SweepPlan
from mlotool.core.errors import ConfigError
from mlotool.core.messages import escape

_OF_OPTUNA = (
    "num_trials",
    "second_objective",
    "seed",
    "sampler",
    "sampler_options",
    "pruner",
    "pruner_options",
    "storage",
)


def check_settings(words: Sequence[str], *, is_sweep: bool) -> None:
    """Refuse `hydra.job.chdir=true`; warn of settings that act in a sweep only, or only without one.

    Raises:
        ConfigError: paths would count from another folder than the one the command is called in.
    """
    values = {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in words)}
    if values.get("hydra.job.chdir", "").lower() in ("true", "yes", "on", "1"):
        raise ConfigError(
            "hydra.job.chdir: found true; expected false, as the paths of recipes and data count from the working "
            "folder. Leave it out."
        )
    if not is_sweep and any(word.startswith(("sweep=", "sweep.")) for word in words):
        _warn("found sweep settings, which act in a sweep only; add -m, or leave them out.")
    idle, meant = ("hydra.run.dir", "hydra.sweep.dir") if is_sweep else ("hydra.sweep.dir", "hydra.run.dir")
    if idle in values:
        where = "with -m" if is_sweep else "without -m"
        _warn(f"{idle}: found {values[idle]} {where}, where it does nothing; expected {meant}. Write {meant}=..")


def check_sweep(plan: SweepPlan, words: Sequence[str], *, is_resumed: bool) -> None:
    """Refuse the folder of another sweep; warn of settings of a search where nothing is searched.

    Raises:
        ConfigError: the folder that is named holds a sweep, whose results would be taken for those of this one.
    """
    given = [key for key in _OF_OPTUNA if any(word.startswith(f"sweep.{key}=") for word in words)]
    if plan.settings["method"] == "grid" and given:
        _warn(
            f"sweep.{given[0]}: found it in a grid, which runs every combination and ignores it; expected it with "
            "sweep=optuna. Add sweep=optuna, or leave it out."
        )
    is_named = any(word.startswith("hydra.sweep.dir=") for word in words)
    if is_named and not is_resumed and (plan.folder / "multirun.yaml").is_file():
        raise ConfigError(
            f"hydra.sweep.dir: found {_nearby(plan.folder)}, which holds a sweep already; expected a new folder. Name "
            f"another one, or go on with that sweep: resume={_nearby(plan.folder)}."
        )


def _warn(text: str) -> None:
    print(f"mlotool: warning: {escape(text)}", file=sys.stderr)


def _nearby(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
