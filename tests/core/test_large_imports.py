"""In which order large packages are imported."""

import subprocess
import sys
from pathlib import Path

import pytest

import mlotool

SCRIPT = """
import sys
from mlotool.core.process import import_torch

import_torch(with_wandb={with_wandb})
names = [*sys.modules]
print([name for name in names if name in ("wandb.sdk.launch", "torch")])
"""


@pytest.mark.parametrize(("with_wandb", "expected"), [(True, ["wandb.sdk.launch", "torch"]), (False, ["torch"])])
def test_wandb_comes_before_torch_where_it_is_wanted(with_wandb: bool, expected: list[str]) -> None:
    script = SCRIPT.format(with_wandb=with_wandb)
    environment = {"PYTHONPATH": str(Path(mlotool.__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == f"{expected}\n"
