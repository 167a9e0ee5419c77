"""The pages name what is there, and a line of a recipe is few files away from its equation: counted by running it."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mlotool.config import build, compose
from mlotool.hypergradient import ConjugateGradient
from mlotool.problem.settings import ProblemSettings
from mlotool.program import Schedule
from mlotool.program.schedule import TickOrder

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / "architecture.md", *sorted((ROOT / "docs" / "internals").glob("*.md"))]


def named(text: str) -> list[tuple[str, str]]:
    """Return what stands in backquotes as `folder/file.py` or `folder/file.py: name`, a pair each."""
    return re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.(?:py|yaml|md))(?:: (\w+)[^`]*)?`", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page: Path) -> None:
    missing = []
    for path, name in named(page.read_text()):
        places = [ROOT / path, ROOT / "mlotool" / path, ROOT / "mlotool" / "layerparallel" / path, page.parent / path]
        found = next((place for place in places if place.is_file()), None)
        if found is None or (name and not re.search(rf"^\s*(def|class) {name}\b|^{name}\b", found.read_text(), re.M)):
            missing.append(f"{path}: {name}")
    assert not missing


def stack() -> list[str]:
    """Return the files of mlotool that are on the way to where this is called, the nearest last."""
    frame, files = sys._getframe(2), list[str]()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "mlotool"):
            files.append(path.relative_to(ROOT / "mlotool").as_posix())
        frame = frame.f_back  # type: ignore[assignment]
    return files[::-1]


def files_to(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """Return a list that has, once a method has been called, the files on the way to its last call."""
    files, method = list[str](), getattr(owner, name)

    def noting(*arguments: Any, **settings: Any) -> Any:
        files[:] = stack()
        return method(*arguments, **settings)

    monkeypatch.setattr(owner, name, noting)
    return files


def ticks(*words: str) -> None:
    """Build the recipe `mwn` with overrides, and take a few ticks of it without a trace."""
    schedule = Schedule(
        build(compose("mwn", ["problems.classifier.warmup_steps=0", "runner.trace=false", *words])).program
    )
    for _ in range(3):
        schedule.tick()


def after(files: list[str], first: str) -> set[str]:
    """Return the files of a way from the last one of a name on."""
    return set(files[len(files) - 1 - files[::-1].index(first) :])


def test_the_way_from_cg_to_its_update(monkeypatch: pytest.MonkeyPatch) -> None:
    made = files_to(monkeypatch, ConjugateGradient, "__init__")
    solved = files_to(monkeypatch, ConjugateGradient, "solve")
    ticks("hypergradient=cg")
    way = {*made, *solved, "hypergradient/solvers/conjugate_gradient.py"}
    assert "hypergradient/implicit.py" in way
    assert len(way) <= 9, way


def test_the_way_from_unroll_steps_to_where_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made, counted = files_to(monkeypatch, ProblemSettings, "of"), files_to(monkeypatch, TickOrder, "_rounds")
    ticks("problems.classifier.unroll_steps=5")
    way = {*made, "problem/settings.py", *after(counted, "program/schedule.py"), "program/schedule.py"}
    assert len(way) <= 5, way


def test_the_way_from_precision_to_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    made, entered = files_to(monkeypatch, ProblemSettings, "of"), files_to(monkeypatch, torch, "autocast")
    ticks("problems.classifier.precision=bf16")
    way = {*made, "problem/settings.py", *after(entered, "problem/problem.py")}
    assert "core/gradient.py" in way
    assert len(way) <= 5, way
