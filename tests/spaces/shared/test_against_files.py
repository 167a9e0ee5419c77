"""Training paths of a shared space is training the models themselves, whose weights go by way of files."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.data.splits import InMemoryTensors
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.spaces import AbstractPaths, Operator, SharedSpace

NUM_BATCHES = 20
KERNELS = {"k1": 1, "k3": 3, "k5": 5}


def base() -> nn.Module:
    # No bias before a BatchNorm: its gradient is rounding alone, of which Adam makes steps.
    layers: list[nn.Module] = [nn.Conv2d(1, 6, 3, padding=1)]
    for _ in range(3):
        layers += [nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 36, 4)).double()


class GivenPaths(AbstractPaths):
    """Takes the paths of a list in turn."""

    def __init__(self, paths: list[dict[str, Any]]) -> None:
        super().__init__()
        self.given = paths
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))

    def forward(self, decisions: Any) -> dict[str, Any]:
        path = self.given[int(self.number) % len(self.given)]
        if self.training:
            self.number += 1
        return path


def cross_entropy(batch: Any, *, model: Any) -> Tensor:
    return F.cross_entropy(model(batch["input"]), batch["target"])


def samples(count: int, num_classes: int = 4) -> InMemoryTensors:
    """Return images of noise."""
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(count, 1, 6, 6, generator=generator, dtype=torch.float64)
    return InMemoryTensors({"input": images, "target": torch.randint(num_classes, (count,), generator=generator)})


def kernels() -> Operator:
    candidates = {
        name: None if size == 1 else partial(nn.Conv2d, kernel_size=size, padding=size // 2)
        for name, size in KERNELS.items()
    }
    return Operator("kernel", {"path": "*", "type": "Conv2d", "where": lambda place: place.id != "0"}, candidates)


@pytest.mark.parametrize(
    "optimizer",
    [partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3), partial(torch.optim.Adam, lr=1e-2)],
)
def test_twenty_mini_batches_are_those_of_models_in_files(optimizer: Any, tmp_path: Path) -> None:
    generator = random.Random(0)
    paths = [{f"kernel_{i}": generator.choice([*KERNELS]) for i in range(3)} for _ in range(NUM_BATCHES)]
    torch.manual_seed(0)
    space = SharedSpace(
        base, [kernels()], inputs=[{"shape": [1, 6, 6], "dtype": "float64"}], seed=1, paths=GivenPaths(paths)
    )
    file = tmp_path / "weights.pt"
    # By name and candidate: each model reads what is its own, and writes it back.
    store = {f"{number}@{name}": {} for number in (1, 4, 7) for name in KERNELS}
    for number, layer in ((1, "1"), (4, "4"), (7, "7")):
        for name in KERNELS:
            at = layer if name == "k1" else f"{layer}@{name}"
            store[f"{number}@{name}"] = {"state": space.get_submodule(at).state_dict(), "optimizer": {}}
    for number in (0, 2, 5, 8, 11):
        store[str(number)] = {"state": space.get_submodule(str(number)).state_dict(), "optimizer": {}}
    torch.save(store, file)

    stream = Stream(samples(NUM_BATCHES * 8), 8, seed=0)
    batches = [stream.next() for _ in range(NUM_BATCHES)]
    program = Program(
        [
            Problem(
                "net",
                space,
                cross_entropy,
                roles={"model": "net"},
                stream=Stream(samples(NUM_BATCHES * 8), 8, seed=0),
                optimizer=optimizer,
            )
        ],
        Graph(),
    )
    schedule = Schedule(program)
    for number, path in enumerate(paths):
        schedule.tick()
        train_by_file(file, path, batches[number], optimizer)
    for key, each in torch.load(file).items():
        layer, _, name = key.partition("@")
        at = layer if name in ("", "k1") else key
        for kind, value in space.get_submodule(at).state_dict().items():
            torch.testing.assert_close(value, each["state"][kind], rtol=0, atol=1e-12)


def train_by_file(file: Path, path: dict[str, Any], batch: Any, optimizer: Any) -> None:
    """Build one model, read its weights, take a step, and write them."""
    store = torch.load(file)
    model = base()
    for index, number in enumerate((1, 4, 7)):
        size = KERNELS[path[f"kernel_{index}"]]
        model[number] = nn.Conv2d(6, 6, size, padding=size // 2, bias=False).double()
    keys = {number: str(number) for number in (0, 2, 5, 8, 11)}
    keys |= {number: f"{number}@{path[f'kernel_{index}']}" for index, number in enumerate((1, 4, 7))}
    stepper = optimizer(model.parameters())
    for number, key in keys.items():
        if key in store:
            model[number].load_state_dict(store[key]["state"])
            for name, parameter in model[number].named_parameters():
                if name in store[key]["optimizer"]:
                    stepper.state[parameter] = store[key]["optimizer"][name]
    F.cross_entropy(model(batch["input"]), batch["target"]).backward()
    stepper.step()
    for number, key in keys.items():
        states = {name: dict(stepper.state[each]) for name, each in model[number].named_parameters()}
        store[key] = {"state": model[number].state_dict(), "optimizer": states}
    torch.save(store, file)
