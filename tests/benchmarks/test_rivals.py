"""The rivals of Meta-Weight-Net do the same steps as the bare loop."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.betty import bare, ours
from benchmarks.betty.rival import Rival
from benchmarks.betty.task import ALGORITHMS, Task

TASKS = [Task("mlp", algorithm, dtype=torch.float64) for algorithm in ALGORITHMS]
SLOW_TASKS = [Task("resnet", algorithm, dtype=torch.float64) for algorithm in ALGORITHMS]
each_task = pytest.mark.parametrize(
    "task",
    [*TASKS, *(pytest.param(task, marks=pytest.mark.slow) for task in SLOW_TASKS)],
    ids=lambda task: f"{task.model}-{task.algorithm}",
)

pytestmark = pytest.mark.filterwarnings("ignore:problems.classifier:UserWarning")
"""Of finite differences, about the losses that are detached and about the radius: the task wants both."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """On small tensors, threads that share busy cores wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def jax_rival(task: Task, **choices: Any) -> Rival:
    pytest.importorskip("jax")
    from benchmarks.betty import jaxed

    return jaxed.build(task, **choices)


def ends(rival: Rival, num_cycles: int = 4) -> dict[str, Tensor]:
    """Return parameters and buffers after some cycles."""
    for _ in range(num_cycles):
        rival.cycle()
    rival.write_back()
    found = {**rival.classifier.state_dict(prefix="classifier."), **rival.weight_net.state_dict(prefix="weight_net.")}
    return {name: tensor.clone() for name, tensor in found.items()}


def parameters(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what is trained: in mlotool the passes of a hypergradient leave running statistics as they are."""
    return {name: tensor for name, tensor in found.items() if "running" not in name and "tracked" not in name}


def close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@each_task
def test_the_jax_loop(task: Task) -> None:
    close(ends(jax_rival(task)), ends(bare.build(task)))


def test_the_exact_product_is_the_limit_of_frozen_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare, "RADIUS", 1e-6)
    task = TASKS[0]
    assert task.algorithm == "fd"
    close(ends(jax_rival(task, is_exact=True)), ends(bare.build(task, frozen_constants=True)), 1e-6)


# A trace of the conjugate gradients is long.
@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, marks=pytest.mark.slow) if task in SLOW_TASKS or task.algorithm == "cg" else task
        for task in (*TASKS, *SLOW_TASKS)
    ],
    ids=lambda task: f"{task.model}-{task.algorithm}",
)
def test_traced_gradients(task: Task) -> None:
    close(parameters(restarted(ours.build(task, trace="eager"))), parameters(ends(bare.build(task))))


def test_the_jax_loop_restarts() -> None:
    restarted(jax_rival(Task("mlp", "fd")))


def restarted(rival: Rival) -> dict[str, Tensor]:
    """Return the ends, which are the same bits after a restart."""
    first = ends(rival)
    assert rival.restart is not None
    rival.restart()
    close(ends(rival), first, 0.0)
    return first
