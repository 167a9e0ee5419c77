"""Each example runs, for a few ticks, and prints what its header says."""

import contextlib
import importlib.util
import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runner.processes import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, ticks: int) -> str:
    """Run an example in this process, as its file would; return the last line that it prints."""
    spec: Any = importlib.util.spec_from_file_location("__main__", EXAMPLES / f"{name}.py")
    before, sys.argv = sys.argv, [name, str(ticks)]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
    finally:
        sys.argv = before
    return (printed.getvalue().strip().splitlines() or [""])[-1]


def one_rank(folder: Path) -> None:
    """Run an example on a rank, with what torchrun sets in its environment."""
    os.chdir(folder)
    torch.save(run("distributed", 12), folder / f"rank_{os.environ['RANK']}.pt")


# Of few ticks there is much to warn of.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "ticks", "words"),
    [
        ("reweighting", 10, ("test accuracy with equal weights 0.", "with learned weights 0.")),
        ("weight_decay_and_augmentation", 20, ("weight decay 0.", "noise 0.", "initially")),
        ("maml", 5, ("learned initialization ", "random initialization ")),
        ("lora_mixture", 10, ("digits 0.", "letters 0.", "noise 0.")),
        ("own_loop", 3, ("weight decay 0.", "validation error 0.", "without it 0.")),
    ],
)
def test_an_example_prints_its_result(
    name: str, ticks: int, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run(name, ticks)
    assert [word for word in words if word not in printed] == [], printed


def test_two_processes_come_to_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = run_ranks(one_rank, 2, tmp_path, meanwhile=lambda: run("distributed", 12))
    assert one.startswith("processes 1, validation error ")
    assert two == [one.replace("processes 1", "processes 2"), ""]


def test_every_example_is_short_and_says_how_it_is_run() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert len(files) == 6
    for file in files:
        lines = file.read_text().splitlines()
        assert len(lines) < 80, file
        assert all(any(line.startswith(word) for line in lines) for word in ("Command:", "It prints:")), file
