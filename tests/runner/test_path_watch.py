"""Warnings and errors of runs whose models share their weights."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.core.errors import NonFiniteLossError, NonFiniteParametersError
from mlotool.hypergradient import FirstOrder
from mlotool.losses import path_cross_entropy
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.runner.finiteness import check_parameters, explain
from mlotool.runner.records import PathWatch
from mlotool.runner.values import Window
from mlotool.spaces import Operator, PathWeights, SharedSpace, UniformPaths
from tests.runner.tiny import Blobs


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


def space(candidates: Any = None, **settings: Any) -> SharedSpace:
    activation = Operator("activation", {"type": "ReLU"}, candidates or {"relu": None, "tanh": nn.Tanh})
    torch.manual_seed(0)
    base = lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))  # noqa: E731
    return SharedSpace(base, [activation], inputs=[4], **settings)


def cross_entropy(batch: Any, *, model: Any) -> Tensor:
    return F.cross_entropy(model(batch["input"]), batch["target"])


def alone(module: SharedSpace, loss: Any = cross_entropy) -> Program:
    stream = Stream(Blobs(40, 0), 8, seed=0)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return Program([Problem("net", module, loss, roles={"model": "net"}, stream=stream, optimizer=optimizer)], Graph())


def told(watch: PathWatch, *ticks: int) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for tick in ticks:
            watch.look(tick)
        watch.end()
    return [str(each.message) for each in found]


def test_a_candidate_that_was_never_drawn_is_told_at_the_end() -> None:
    torch.manual_seed(3)
    made = alone(space(paths=UniformPaths()))
    Schedule(made).tick()
    watch = PathWatch(made.problems, 1)
    [message] = told(watch)
    never = [
        f"{name}: {value}"
        for name, each in made.problems["net"].module.path_counts.items()
        for value, count in each.items()
        if not count
    ]
    assert len(never) == 2
    assert message.startswith(f"problems.net.module: found candidates that no training step has computed: {never[0]}")
    assert never[1] in message
    assert "FairPaths" in message
    schedule = Schedule(made)
    for _ in range(30):
        schedule.tick()
    assert told(PathWatch(made.problems, 31)) == []


def test_counts_of_all_ranks_count() -> None:
    made = alone(space(paths=UniformPaths()))
    Schedule(made).tick()
    assert told(PathWatch(made.problems, 1, lambda values: [each + 1 for each in values])) == []


def searched(lr: float = 0.1) -> Program:
    def weights() -> PathWeights:
        return PathWeights(space)

    roles = {"model": "net", "paths": "paths"}
    optimizer = partial(torch.optim.SGD, lr=lr)
    streams = [Stream(Blobs(40, seed), 8, seed=0) for seed in range(2)]
    net = Problem(
        "net",
        space(),
        path_cross_entropy,
        roles=roles,
        stream=streams[0],
        optimizer=optimizer,
        hypergradient=FirstOrder(),
    )
    paths = Problem("paths", weights(), path_cross_entropy, roles=roles, stream=streams[1], optimizer=optimizer)
    return Program([net, paths], Graph({"paths": ["net"]}, {"net": ["paths"]}))


def test_an_architecture_that_has_decided_early_is_told_once() -> None:
    made = searched()
    logits = made.problems["paths"].module.logits
    with torch.no_grad():
        logits["activation_0"][1] = 9.0
        assert told(PathWatch(made.problems, 100), 10) == []
        logits["activation_1"][0] = 9.0
    assert told(PathWatch(made.problems, 100), 60) == []
    [message] = told(PathWatch(made.problems, 100), 10, 20)
    assert "problems.paths: found a probability of at least 0.99 for one candidate of each decision" in message
    assert "at tick 10 of 100" in message
    assert "Lower problems.paths.optimizer.lr (0.1 now), or set problems.paths.loss.entropy=0.01" in message


def test_the_entropy_weight_keeps_decisions_open() -> None:
    made = searched()
    module = made.problems["paths"].module
    with torch.no_grad():
        module.logits["activation_0"][1] = 3.0
    batch = {"input": torch.randn(8, 4), "target": torch.randint(3, (8,))}
    roles = {"model": made.problems["net"].module, "paths": made.problems["paths"].pure(None, None)}
    plain, kept = (path_cross_entropy(batch, **roles, entropy=each).loss for each in (0.0, 0.5))
    assert torch.allclose(plain - kept, 0.5 * module.entropy())


def test_a_bad_loss_names_the_path_and_the_candidate() -> None:
    given = {"activation_0": "relu", "activation_1": "root"}
    made = alone(
        space({"relu": None, "root": Root}),
        lambda batch, *, model: F.cross_entropy(model(batch["input"], path=given), batch["target"]),
    )
    window = Window(explain=lambda name, traces: explain(name, made.problems, traces))
    window.append(Schedule(made).tick())
    with pytest.raises(NonFiniteLossError) as caught:
        window.check()
    text = str(caught.value)
    assert "The loss of problem 'net' became nan at tick 1" in text
    assert "In the shared space of 'net': On the path activation_0: relu, activation_1: root the result of" in text
    assert "'3@root' (root of activation_1) was the first that is not finite." in text
    with pytest.raises(NonFiniteParametersError, match=r"In the shared space of 'net': On the path"):
        check_parameters(made, 1)
