"""Shared spaces beside other settings of problems and runs: what they compute is the same, or they are refused."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from mlotool.core.errors import ConfigError
from mlotool.fusion import stacked_gradients
from mlotool.hypergradient import FirstOrder, Identity, Implicit
from mlotool.losses import path_cross_entropy
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.spaces import BinaryPaths, Operator, PathPolicy, PathWeights, SharedSpace, UniformPaths
from tests.fusion.members import NUM_FEATURES, Blobs, compared, network, plain_loss


def space(**settings: Any) -> SharedSpace:
    torch.manual_seed(1)
    activation = Operator("activation", {"type": "Tanh"}, {"tanh": None, "relu": nn.ReLU})
    given = [{"shape": [NUM_FEATURES], "dtype": "float64"}]
    return SharedSpace(network, [activation], inputs=given, seed=3, **settings)


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def drawn(number: int = 0, *, trace: str | None = None, **settings: Any) -> Program:
    """A space that draws its paths."""
    torch.manual_seed(number)
    how: dict[str, Any] = {"stream": Stream(Blobs(40, number), 8, seed=number), "optimizer": SGD, **settings}
    problem = Problem("net", space(paths=UniformPaths()), plain_loss, roles={"model": "net"}, **how)
    return Program([problem], Graph(), **({} if trace is None else {"trace": trace}))


def searched(
    number: int = 0, kind: Any = PathWeights, *, trace: str | None = None, hypergradient: Any = None, **settings: Any
) -> Program:
    """A space whose paths another problem gives."""
    torch.manual_seed(number)
    streams = [Stream(Blobs(40, number + each), 8, seed=number) for each in range(2)]
    how = [{"roles": {"model": "net", "paths": "paths"}, "stream": stream, "optimizer": SGD} for stream in streams]
    algorithm = hypergradient or Implicit(Identity(0.1))
    net = Problem("net", space(), path_cross_entropy, hypergradient=algorithm, **how[0], **settings)
    paths = Problem("paths", kind(space).double(), path_cross_entropy, **how[1])
    given = {} if trace is None else {"trace": trace}
    return Program([net, paths], Graph({"paths": ["net"]}, {"net": ["paths"]}), **given)


MAKERS = {
    "drawn": drawn,
    "mixture": searched,
    "binary": partial(searched, kind=BinaryPaths),
    "policy": partial(searched, kind=PathPolicy),
}


def trained(made: Program, ticks: int) -> tuple[list[float], Any]:
    schedule, losses = Schedule(made), []
    with warnings.catch_warnings():
        # That a round is not traced.
        warnings.simplefilter("ignore")
        for _ in range(ticks):
            losses += [float(each.loss) for each in schedule.tick().values()]
    return losses, made.problems["net"].module.path_counts


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MAKERS)
def test_traces_and_remat_leave_what_is_computed_and_counted(name: str) -> None:
    expected, counts = trained(MAKERS[name](), 4)
    for settings in ({"trace": "eager"}, {"remat": ["0"]}):
        found, counted = trained(MAKERS[name](**settings), 4)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
        assert counted == counts


@pytest.mark.parametrize("name", MAKERS)
def test_bf16_is_near(name: str) -> None:
    def single(**settings: Any) -> list[float]:
        made = MAKERS[name](**settings)
        for each in made.problems.values():
            each.module.float()
            each.stream.to(dtype=torch.float32)
        return trained(made, 3)[0]

    found, expected = single(precision="bf16"), single()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert found != expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MAKERS)
def test_runs_in_one_process_compute_what_they_compute_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # One program of all members counts as the faster way.
    monkeypatch.setattr(stacked_gradients, "_fastest", lambda take, before: (before(), (0.0, take()))[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = compared(MAKERS[name], 2, 4)
    assert not found.failures
    assert found.error < 1e-9
    # Which path is taken is a value, which a program of several runs does not know.
    assert bool(found.reasons) == (name != "mixture")


class Episodes(Blobs):
    def __getitem__(self, number: int) -> Any:
        return {key: torch.stack([each] * 4) for key, each in super().__getitem__(number).items()}


@pytest.mark.parametrize("kind", [PathWeights, BinaryPaths, PathPolicy])
def test_tasks_take_mixtures_and_no_draws(kind: Any) -> None:
    made = searched(kind=kind, tasks=8, hypergradient=FirstOrder())
    for each in made.problems.values():
        each.stream = Stream(Episodes(40, 0), 8, seed=0)
    if kind is PathWeights:
        assert all(map(torch.isfinite, map(torch.tensor, trained(made, 3)[0])))
        return
    with pytest.raises(ConfigError, match="tasks: found a path that is drawn in a loss of several tasks"):
        trained(made, 1)
