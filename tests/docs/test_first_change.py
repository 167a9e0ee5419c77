"""The contributor's walk through one change works, in a copy of the repository."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import run_page

ROOT = Path(__file__).parents[2]
COPIED = ("mlotool", "conf", "recipes", "tests/core", "tests/hypergradient")


@pytest.mark.slow
def test_its_blocks_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", *(f"tests/{name}.py" for name in ("__init__", "conftest", "forked", "preparation"))):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

    def call(*words: str) -> tuple[int, str, str]:
        # From the copy, which `-m` puts before the installed package.
        command = [sys.executable, "-m", "mlotool", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    assert run_page(ROOT / "docs" / "first_change.md", call) > 5
    assert "HeavyBall" in call("show", "logistic_hpo", "hypergradient=heavy_ball")[1]
