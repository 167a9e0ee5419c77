"""A run on the device that stops and goes on ends bit by bit as the one that was not interrupted."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlotool import EvolutionStrategies
from tests.runner import test_resume as on_the_cpu
from tests.runner.algorithms import ALGORITHMS, tiny
from tests.runner.tiny import Built

pytestmark = pytest.mark.gpu

go, at_every_tick = on_the_cpu.go, on_the_cpu.at_every_tick

# All have a layer of dropout; the steps that are recorded are in the middle of an unroll at tick 13.
CASES: dict[str, tuple[Callable[[], Built], dict[str, Any]]] = {
    **{
        name: ALGORITHMS[name]
        for name in (
            "finite_difference",
            "cg_with_warm_start",
            "unrolled",
            "unrolled_with_kept_graphs",
            "penalty",
            "saba",
            "roll_back",
            "tasks",
        )
    },
    "persistent_evolution": (tiny(lambda: EvolutionStrategies(num_pairs=2, persistent=True), unroll_steps=2), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_resumes_bit_identically(
    go: Callable[..., Any], tmp_path: Path, at_every_tick: dict[str, Any], name: str, accelerator: str
) -> None:
    build, changes = CASES[name]
    changes = {**changes, "runner.accelerator": accelerator}
    whole = go("whole", changes, build=build).output_dir
    dense = go("dense", {**changes, **at_every_tick}, build=build).output_dir
    on_the_cpu.assert_same(dense, whole)
    parts = tmp_path / "parts"
    shutil.copytree(dense, parts)
    (parts / "summary.json").unlink()
    go(None, changes, build=build, resume=parts / "checkpoints/tick_13.ckpt")
    on_the_cpu.assert_same(parts, whole)
