from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.data.splits import InMemoryTensors
from mlotool.distributed.collectives import Ranks
from mlotool.hypergradient import ConjugateGradient, Implicit
from mlotool.layerparallel import BlockLayers, Multigrid, MultigridResidual
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.runner.checkpoint import put_own, random_states
from tests.layerparallel.multigrid.test_residual import Wave, dense


class Network(nn.Module):
    """An opening, layers, a closing."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.opening, self.residual, self.closing = nn.Linear(2, 3), layers, nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.closing(self.residual(self.opening(inputs)))
        return result


def samples(size: int = 12) -> InMemoryTensors:
    generator = torch.Generator().manual_seed(3)
    return InMemoryTensors({"input": torch.randn(size, 2, dtype=torch.float64, generator=generator)})


def squares(batch: dict[str, Tensor], *, model: Any) -> Tensor:
    target = batch["input"].prod(1, keepdim=True)
    return (model(batch["input"]) - target).square().mean()


def decayed(batch: dict[str, Tensor], *, model: Any, decay: Any) -> Tensor:
    return squares(batch, model=model) + decay().exp().sum() * sum(each.square().sum() for each in model.parameters())


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((1,), -3.0, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.value


def network(layers: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return Network(Wave(16, h=0.1) if layers is None else layers).double()


def problem(parallel: Multigrid | None, module: nn.Module | None = None, **settings: Any) -> Problem:
    settings = {"optimizer": partial(torch.optim.Adam, lr=0.01), **settings}
    stream = Stream(samples(), settings.pop("batch_size", 4), seed=0)
    loss, roles = settings.pop("loss", squares), {"model": "net", **settings.pop("roles", {})}
    return Problem("net", module or network(), loss, roles=roles, stream=stream, parallel=parallel, **settings)


def train(problem: Problem, steps: int) -> list[float]:
    schedule = Schedule(Program([problem], Graph()))
    return [float(schedule.tick()["net"].loss) for _ in range(steps)]


MODULES = {
    "stacked layers": lambda: network(),
    "a multigrid part": lambda: network(MultigridResidual(Wave(16, h=0.1), cycles=0)),
    "blocks": lambda: network(BlockLayers([dense() for _ in range(16)], 0.1)),
    "a sequential": lambda: network(nn.Sequential(*[dense() for _ in range(16)])),
    "the layers alone": lambda: nn.Sequential(nn.Linear(2, 3), Wave(16, h=0.1), nn.Linear(3, 1)).double(),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODULES)
def test_training_is_that_of_the_serial_layers_at_convergence(name: str) -> None:
    torch.manual_seed(0)
    module, other = MODULES[name](), MODULES[name]()
    other.load_state_dict(module.state_dict())
    if name == "a multigrid part":
        other.residual.serial()
    parallel = Multigrid(cycles=2)
    mine, serial = train(problem(parallel, module), 6), train(problem(None, other), 6)
    assert mine == pytest.approx(serial, rel=1e-9)
    for found, expected in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    assert len(parallel.statistics()) == 6


def test_hypergradients_do_not_see_it() -> None:
    gradients = []
    for parallel in (Multigrid(cycles=0), None):
        hypergradient = Implicit(ConjugateGradient(5, damping=5.0))
        low = problem(parallel, loss=decayed, roles={"decay": "decay"}, hypergradient=hypergradient)
        high = Problem("decay", Vector(), squares, roles={"model": "net"}, stream=Stream(samples(), 4, seed=1))
        program = Program([low, high], Graph({"decay": ["net"]}, {"net": ["decay"]}))
        for each in (low, high):
            assert each.stream is not None
            each.stream.next()
        gradients.append(program.gradient("decay")["value"])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    assert gradients[0].abs() > 1e-6


@pytest.mark.parametrize(
    ("settings", "statistic"),
    [
        ({"cycles": 1, "relaxation": "F", "warm_start": True}, "net/gradient_bias"),
        ({"cycles": "auto", "workers": 64}, "net/layers_in_a_row"),
    ],
)
def test_it_goes_on_bit_by_bit(settings: dict[str, Any], statistic: str) -> None:
    def make() -> Program:
        parallel = Multigrid(guard_every=3, guard_threshold=10.0, **settings)
        return Program([problem(parallel, network(Wave(64, h=0.02)))], Graph())

    whole, other = make(), make()
    schedules = [Schedule(whole), Schedule(other)]
    for _ in range(4):
        schedules[0].tick()
    state, times = whole.state_dict(), schedules[0].state_dict()
    other.load_state_dict(state)
    schedules[1].load_state_dict(times)
    for _ in range(4):
        assert torch.equal(*(schedule.tick()["net"].loss for schedule in schedules))
    assert whole.statistics() == other.statistics()
    assert statistic in whole.statistics()


class SecondOfTwo:
    """The second rank of a run, which sees what the first has saved."""

    rank, is_first = 1, False

    def __init__(self, first: list[Any]) -> None:
        self.states = first

    def gather(self, own: Any) -> list[Any]:
        return [*self.states, own]


def test_each_ranks_warm_start_is_its_own() -> None:
    programs = []
    for steps in (2, 3):
        program = Program([problem(Multigrid(cycles=1, warm_start=True))], Graph())
        schedule = Schedule(program)
        for _ in range(steps):
            schedule.tick()
        programs.append(program)
    first, second = programs
    states = random_states(second, SecondOfTwo(random_states(first, Ranks())))  # type: ignore[arg-type]
    own = {"program": first.state_dict(), "schedule": {"snapshots": {}}, "random_states": states}
    put_own(own, SecondOfTwo([]))  # type: ignore[arg-type]
    first.load_state_dict(own["program"])
    found, expected = (each.problems["net"].parallel.state_dict()["residual"]["warm_start"] for each in programs)
    assert found.keys() == expected.keys() == {"states", "states known", "adjoints", "adjoints known"}
    assert all(torch.equal(found[key], expected[key]) for key in found)
