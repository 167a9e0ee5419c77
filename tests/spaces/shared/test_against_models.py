"""Training paths of a shared space is training the models themselves, each of which has its part of the weights."""

import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.data.splits import InMemoryTensors
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.spaces import Operator, SharedSpace
from tests.spaces.shared.two_ranks import Given

NUM_BATCHES, KERNELS = 20, {"k1": 1, "k3": 3, "k5": 5}


def base(sizes: tuple[int, ...] = (1, 1, 1)) -> nn.Sequential:
    # No bias before a BatchNorm: its gradient is rounding alone, of which Adam makes steps.
    layers: list[nn.Module] = [nn.Conv2d(1, 6, 3, padding=1)]
    for size in sizes:
        layers += [nn.Conv2d(6, 6, size, padding=size // 2, bias=False), nn.BatchNorm2d(6), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 36, 4)).double()


def cross_entropy(batch: Any, *, model: Any) -> Tensor:
    return F.cross_entropy(model(batch["input"]), batch["target"])


def samples(count: int, num_classes: int = 4) -> InMemoryTensors:
    """Return images of noise."""
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(count, 1, 6, 6, generator=generator, dtype=torch.float64)
    return InMemoryTensors({"input": images, "target": torch.randint(num_classes, (count,), generator=generator)})


@pytest.mark.parametrize(
    "optimizer",
    [partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3), partial(torch.optim.Adam, lr=1e-2)],
)
def test_twenty_mini_batches_are_those_of_models_alone(optimizer: Any) -> None:
    draw, rows = random.Random(0), samples(NUM_BATCHES * 8)
    paths = [tuple(draw.choice([*KERNELS]) for _ in range(3)) for _ in range(NUM_BATCHES)]
    candidates = {
        name: partial(nn.Conv2d, kernel_size=size, padding=size // 2) if size > 1 else None
        for name, size in KERNELS.items()
    }
    at = {"path": "*", "type": "Conv2d", "where": lambda place: place.id != "0"}
    given = [{"shape": [1, 6, 6], "dtype": "float64"}]
    torch.manual_seed(0)
    space = SharedSpace(base, [Operator("kernel", at, candidates)], inputs=given, seed=1, paths=Given(paths))
    weights = {name: each.clone() for name, each in space.state_dict().items() if name[0].isdigit()}
    how: dict[str, Any] = {"stream": Stream(rows, 8, seed=0), "optimizer": optimizer}
    schedule = Schedule(Program([Problem("net", space, cross_entropy, roles={"model": "net"}, **how)], Graph()))
    stream, states = Stream(rows, 8, seed=0), dict[str, Any]()
    for path in paths:
        schedule.tick()
        model, kernels = base(tuple(KERNELS[name] for name in path)), dict(zip(("1", "4", "7"), path, strict=True))
        # Where a shared space keeps what the model has.
        places = {}
        for name in model.state_dict():
            layer, _, rest = name.partition(".")
            kernel = kernels.get(layer, "k1")
            places[name] = name if kernel == "k1" else f"{layer}@{kernel}.{rest}"
        model.load_state_dict({name: weights[place] for name, place in places.items()})
        step = optimizer(model.parameters())
        for name, parameter in model.named_parameters():
            step.state[parameter] = states.setdefault(places[name], {})
        cross_entropy(stream.next(), model=model).backward()
        step.step()
        weights |= {places[name]: each.clone() for name, each in model.state_dict().items()}
        states |= {places[name]: step.state[parameter] for name, parameter in model.named_parameters()}
    for name, each in weights.items():
        torch.testing.assert_close(space.state_dict()[name], each, rtol=0, atol=1e-12)
