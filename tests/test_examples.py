"""Each example runs, for a few ticks, and prints what its header says."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlotool.runner import run_config

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, ticks: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run an example in this process; return what it prints."""
    monkeypatch.setattr(sys, "argv", [name, str(ticks)])
    module: Any = importlib.util.spec_from_file_location("__main__", EXAMPLES / f"{name}.py")
    module.loader.exec_module(importlib.util.module_from_spec(module))
    return capsys.readouterr().out.strip().splitlines()[-1]


# Of few ticks there is much to warn of.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "ticks", "words"),
    [
        ("reweighting", 10, ("test accuracy with equal weights 0.", "with learned weights 0.")),
        ("weight_decay_and_augmentation", 20, ("weight decay 0.", "noise 0.", "without both")),
        ("maml", 5, ("learned initialization ", "random initialization ")),
        ("lora_mixture", 10, ("digits 0.", "letters 0.", "noise 0.")),
        ("own_loop", 3, ("weight decay 0.", "validation error 0.", "without it 0.")),
    ],
)
def test_an_example_prints_its_result(
    name: str,
    ticks: int,
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run(name, ticks, monkeypatch, capsys)
    assert [word for word in words if word not in printed] == [], printed


def test_two_processes_come_to_what_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", EXAMPLES / "distributed.py", "12"]
    two = subprocess.Popen(
        [sys.executable, *map(str, words)],
        env={**run_config._shared_environment(2), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    one = run("distributed", 12, monkeypatch, capsys)
    assert two.communicate(timeout=600)[0].strip() == one.replace("processes 1", "processes 2")
    assert one.startswith("processes 1, validation error ")


def test_every_example_is_short_and_says_how_it_is_run() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert len(files) == 6
    for file in files:
        lines = file.read_text().splitlines()
        assert len(lines) < 80, file
        assert all(any(line.startswith(word) for line in lines) for word in ("Command:", "It prints:")), file
