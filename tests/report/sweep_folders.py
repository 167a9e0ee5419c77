"""Sweeps as their jobs would have left them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.report.run_folders import write_metrics

FIXED = ("+recipe=mwn", "runner.max_ticks=60")


def write_job(
    folder: Path,
    *words: str,
    status: str | None = "finished",
    value: float | None = None,
    key: str = "val/loss",
    mode: str = "min",
    curve: Sequence[float] = (),
    metrics: Mapping[str, float] | None = None,
    error: str | None = None,
) -> Path:
    """Write the folder of a job that ended; without a status, that of one that has begun."""
    folder.mkdir(parents=True)
    (folder / "overrides.txt").write_text("\n".join((*FIXED, *words)))
    if curve:
        write_metrics(folder, [(10 * (index + 1), key, each) for index, each in enumerate(curve)])
    if status is not None:
        summary: dict[str, Any] = {"status": status, "objective": {"key": key, "value": value, "mode": mode}}
        summary |= {"metrics": dict(metrics or {}), "error": error, "num_ticks": 60, "training_s": 1.5}
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "report.html").write_text("<p>a job's page</p>")
    return folder


def write_begun(folder: Path, *words: str) -> Path:
    """Write the folder of a job whose process has only begun."""
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"words": [*FIXED, *words]}))
    return folder


def write_plan(folder: Path, num_jobs: int, *, log_keys: Sequence[str] = (), **num_values: int) -> None:
    """Write what the sweep was asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = {key: {"num_values": count, "is_log": False} for key, count in num_values.items()}
    keys |= {key: {"num_values": 0, "is_log": True} for key in log_keys}
    content = {"objective": "val/loss", "mode": "min", "num_jobs": num_jobs, "keys": keys}
    (folder / "plan.json").write_text(json.dumps(content))
