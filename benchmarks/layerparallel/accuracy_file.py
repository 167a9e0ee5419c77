"""The result file of `layerparallel.accuracy`: runs that a later call adds to, replaces or leaves alone."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import record
from benchmarks.layerparallel.accuracy_rows import DATA
from benchmarks.layerparallel.training import Run
from mlotool import layerparallel


class AccuracyFile:
    """Runs by row and seed, and tries of settings, of one data set.

    Args:
        data: a name of accuracy_rows.DATA.
    """

    def __init__(self, data: str) -> None:
        self._name = f"layerparallel_accuracy_{data}"

    @property
    def runs(self) -> list[dict[str, Any]]:
        """What was measured, read anew each time: another call may have added to it."""
        found: list[dict[str, Any]] = self._content().get("runs", [])
        return found

    def has(self, run: Run, *, is_code_compared: bool = True) -> bool:
        """Say whether a run stands there that was made with the same settings and, where it is compared, code."""
        wanted = made_with(run)
        if not is_code_compared:
            del wanted["code"]
        return any(_key(each) == (run.row.name, run.seed) and each.items() >= wanted.items() for each in self.runs)

    def put(self, found: dict[str, Any], order: Sequence[str]) -> None:
        """Write down a run, in place of one of the same row and seed.

        Args:
            found: the run.
            order: names of rows; those of others come behind.
        """
        runs = [*(each for each in self.runs if _key(each) != _key(found)), found]
        places = {name: place for place, name in enumerate(order)}
        runs.sort(key=lambda run: (places.get(run["row"], len(places)), *_key(run)))
        self._write({"runs": runs})

    def put_try(self, found: dict[str, Any]) -> None:
        """Write down a run by which settings were chosen."""
        self._write({"tries": [*self._content().get("tries", []), found]})

    def _content(self) -> dict[str, Any]:
        path = self._path
        return json.loads(path.read_text()) if path.exists() else {}

    def _write(self, new: dict[str, Any]) -> None:
        record.write(self._name, {**self._content(), **new, **record.surroundings()}, self._path)

    @property
    def _path(self) -> Path:
        return record.RESULTS / f"{self._name}.json"


def made_with(run: Run) -> dict[str, Any]:
    """Return the settings and the code of a run, as a result file has them."""
    return {
        "settings": None if run.row.settings is None else list(run.row.settings),
        "overrides": run.row.overrides(DATA[run.data]),
        "ticks": run.num_ticks,
        "code": CODE,
    }


def _key(run: dict[str, Any]) -> tuple[str, int]:
    return run["row"], run["seed"]


def _digest() -> str:
    folder = Path(layerparallel.__file__).parent
    files = sorted(path for name in ("auxiliary", "partition") for path in (folder / name).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


CODE = _digest()
"""Of what stages are trained by, as it is when a process starts; multigrid takes no part in it."""
