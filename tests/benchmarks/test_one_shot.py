"""Searches are compared by models that are all trained once more, also random search's."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.exploration import headers, one_shot

VAL = [0.5, 0.9, 0.7, 0.95, 0.95]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Take the place of commands, which write runs; return their words."""
    ran: list[list[str]] = []

    def write(folder: Path, test: float, val: float = 0.5) -> None:
        folder.mkdir(parents=True)
        objective = {"key": "val/accuracy", "mode": "max", "value": val}
        metrics = {"val/accuracy": val, "test/accuracy": test}
        (folder / "summary.json").write_text(
            json.dumps({"status": "finished", "objective": objective, "metrics": metrics})
        )

    def whole_command(words: Sequence[str], folder: Path) -> dict[str, float]:
        ran.append([*words])
        values = dict(word.split("=", 1) for word in words if "=" in word)
        place = folder / values.get("hydra.run.dir", values.get("hydra.sweep.dir", "outputs/mine/multirun"))
        if "-m" in words:
            for number, val in enumerate(VAL):
                write(place / str(number), 0.99, val)  # the test value of what was selected is too good
        else:
            # Of what is trained once more: its number.
            number = values.get("decisions", "0").rpartition("/")[2]
            write(place, 0.1 * int(number) if number.isdigit() else 0.6)
        return {"cpu_s": 1.0}

    monkeypatch.setattr(one_shot, "whole_command", whole_command)
    monkeypatch.setattr(headers, "whole_command", whole_command)
    return ran


@pytest.mark.parametrize(("count", "expected"), [(1, 0.0), (2, 0.1), (3, 0.1), (4, 0.3), (40, 0.3)])
def test_what_random_search_finds_is_trained_once_more(commands: list[list[str]], count: int, expected: float) -> None:
    row = one_shot.measured("random", 200)
    assert one_shot.best_of(row, count) == pytest.approx(expected) and row["cpu_s"] == 2.0
    [search, *again] = commands
    assert "seed=200" in search and len(again) == 3 and all("seed=1200" in words for words in again)


@pytest.mark.parametrize(("way", "expected"), [("base", 0.0), ("spos", 0.6), ("darts", 0.6)])
def test_so_are_the_finds_of_the_others(commands: list[list[str]], way: str, expected: float) -> None:
    assert one_shot.best_of(one_shot.measured(way, 201), 40) == pytest.approx(expected)
    assert "seed=1201" in commands[-1]


@pytest.mark.parametrize(("way", "expected"), [("search", 0.3), ("random", 0.3), ("base", 0.0)])
def test_so_is_what_a_recipes_search_finds(commands: list[list[str]], way: str, expected: float) -> None:
    assert headers.score("explore_mwn", way, 202)["test/accuracy"] == pytest.approx(expected)
    assert "seed=1202" in commands[-1] and "-m" not in commands[-1]
