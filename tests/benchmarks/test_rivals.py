"""The rivals of Meta-Weight-Net do the same steps as the bare loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.betty import bare, ours
from benchmarks.betty.rival import Rival
from benchmarks.betty.task import ALGORITHMS, MODELS, Task

EXACT = [Task(model, algorithm, dtype=torch.float64) for model in MODELS for algorithm in ALGORITHMS]
NAMES = [f"{task.model}-{task.algorithm}" for task in EXACT]

pytestmark = pytest.mark.filterwarnings("ignore:problems.classifier:UserWarning")
"""Of finite differences, about the losses that are detached and about the radius: the task wants both."""


def ends(rival: Rival, num_cycles: int = 4) -> dict[str, Tensor]:
    """Return parameters and buffers after some cycles."""
    for _ in range(num_cycles):
        rival.cycle()
    rival.write_back()
    found = {**rival.classifier.state_dict(prefix="classifier."), **rival.weight_net.state_dict(prefix="weight_net.")}
    return {name: tensor.clone() for name, tensor in found.items()}


def parameters(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what is trained: Betty and mlotool do not count the passes of a hypergradient in running statistics."""
    return {name: tensor for name, tensor in found.items() if "running" not in name and "tracked" not in name}


def close(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("task", EXACT, ids=NAMES)
def test_the_jax_loop(task: Task) -> None:
    pytest.importorskip("jax")
    from benchmarks.betty import jaxed

    close(ends(jaxed.build(task)), ends(bare.build(task)))


def test_the_exact_product_is_the_limit_of_frozen_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    from benchmarks.betty import jaxed

    monkeypatch.setattr(bare, "RADIUS", 1e-6)
    task = Task("mlp", "fd", dtype=torch.float64)
    close(ends(jaxed.build(task, is_exact=True)), ends(bare.build(task, frozen_constants=True)), 1e-6)


@pytest.mark.parametrize("task", EXACT, ids=NAMES)
def test_traced_gradients(task: Task) -> None:
    found = ends(ours.build(task, trace="eager"))
    close(parameters(found), parameters(ends(bare.build(task))))


@pytest.mark.slow
def test_compiled_gradients() -> None:
    task = Task("mlp", "neumann", dtype=torch.float64)
    close(ends(ours.build(task, trace="inductor")), ends(bare.build(task)))


def jax_rival(task: Task) -> Rival:
    pytest.importorskip("jax")
    from benchmarks.betty import jaxed

    return jaxed.build(task)


def traced_rival(task: Task) -> Rival:
    return ours.build(task, trace="eager")


@pytest.mark.parametrize("make", [jax_rival, traced_rival])
def test_a_restart_does_the_same_again(make: Callable[[Task], Rival]) -> None:
    rival = make(Task("resnet", "neumann"))
    first = ends(rival)
    assert rival.restart is not None
    rival.restart()
    close(ends(rival), first, 0.0)
