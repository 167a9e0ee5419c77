"""How long a run goes on, and whether there is more to do where it is to go on for longer. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlotool.core.run_files import read_json


def max_ticks(config: Mapping[str, Any]) -> int:
    """Return the last tick of a plain config.

    Example:
        >>> max_ticks({"runner": {"max_ticks": 100}, "debug": {"limit_ticks": 20}})
        20
    """
    limit = (config.get("debug") or {}).get("limit_ticks")
    ticks: int = config["runner"]["max_ticks"]
    return ticks if limit is None else min(ticks, limit)


def has_finished(summary: Mapping[str, Any], old: Mapping[str, Any], last_tick: int) -> bool:
    """Say whether a run has nothing left to do.

    Args:
        summary: its summary.json.
        old: its config, as a plain one.
        last_tick: until where it is wanted.
    """
    if summary.get("status") != "finished":
        return False
    num_ticks = summary.get("num_ticks")
    if not isinstance(num_ticks, int):
        return False
    has_stopped_early = num_ticks < max_ticks(old)
    return has_stopped_early or num_ticks >= last_tick


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return summary.json; empty where there is none.

    Raises:
        RunFileError: it is none that a run wrote.
    """
    return read_json(run_dir, "summary.json") or {}
