"""Mini-batches of different models that share their weights: one network of all, beside models that go by way of files.

    python -m benchmarks.exploration.shared_weights

Six blocks (convolution, BatchNorm, ReLU) of width 16 on images of 8 x 8 (as the recipes' digits), each with a kernel of
1, 3 or 5; every mini-batch trains another model, drawn at random, by SGD with momentum. By files a model is built, its
weights and momenta are read, it takes a step, and they are written: all in one file, or a file for each candidate of
each block, whichever is faster. Milliseconds of CPU of a mini-batch, one thread, medians of interleaved rounds.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import record
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.spaces import AbstractPaths, Operator, SharedSpace, UniformPaths

WIDTH, SIZE, NUM_BLOCKS, KERNELS = 16, 8, 6, (1, 3, 5)
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
BATCH_SIZES = (8, 32, 128)


def convolution(size: int) -> nn.Conv2d:
    """Return a convolution that keeps the size of images."""
    return nn.Conv2d(WIDTH, WIDTH, size, padding=size // 2, bias=False)


def network(kernels: tuple[int, ...] = (1,) * NUM_BLOCKS) -> nn.Sequential:
    """Return the model with some kernels."""
    layers: list[nn.Module] = [nn.Conv2d(3, WIDTH, 3, padding=1)]
    for size in kernels:
        layers += [convolution(size), nn.BatchNorm2d(WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10))


def shared(paths: AbstractPaths | None = None) -> SharedSpace:
    """Return all models as one network; paths are drawn uniformly unless told."""
    candidates = {f"k{size}": None if size == 1 else partial(convolution, size) for size in KERNELS}
    places = {"type": "Conv2d", "where": lambda place: place.id != "0"}
    kernels = Operator("kernel", places, candidates)
    return SharedSpace(network, [kernels], inputs=[3, SIZE, SIZE], paths=paths or UniformPaths())


class Files:
    """Weights and momenta in files.

    Args:
        folder: of the files.
        are_apart: a file for each candidate of each block; else one for all.
    """

    def __init__(self, folder: Path, *, are_apart: bool) -> None:
        self._folder, self._are_apart = folder, are_apart
        start = network()
        store: dict[str, Any] = {str(i): each.state_dict() for i, each in enumerate(start) if list(each.parameters())}
        for number in range(NUM_BLOCKS):
            for size in KERNELS:
                store[self._key(number, size)] = convolution(size).state_dict()
        self._write({key: {"state": each, "momenta": {}} for key, each in store.items()}, store)

    def step(self, kernels: tuple[int, ...], batch: dict[str, Tensor]) -> None:
        """Train one model on one mini-batch."""
        keys = {i: str(i) for i, each in enumerate(network()) if list(each.parameters())}
        keys |= {3 * number + 1: self._key(number, size) for number, size in enumerate(kernels)}
        store, model = self._read(keys.values()), network(kernels)
        optimizer = SGD(model.parameters())
        for index, key in keys.items():
            model[index].load_state_dict(store[key]["state"])
            for name, parameter in model[index].named_parameters():
                if name in store[key]["momenta"]:
                    optimizer.state[parameter]["momentum_buffer"] = store[key]["momenta"][name]
        F.cross_entropy(model(batch["input"]), batch["target"]).backward()
        optimizer.step()
        for index, key in keys.items():
            momenta = {name: optimizer.state[each]["momentum_buffer"] for name, each in model[index].named_parameters()}
            store[key] = {"state": model[index].state_dict(), "momenta": momenta}
        self._write(store, keys.values())

    def _key(self, number: int, size: int) -> str:
        return f"{3 * number + 1}@k{size}"

    def _read(self, keys: Any) -> dict[str, Any]:
        if self._are_apart:
            return {key: torch.load(self._folder / f"{key}.pt") for key in keys}
        return torch.load(self._folder / "all.pt")

    def _write(self, store: dict[str, Any], keys: Any) -> None:
        if self._are_apart:
            for key in keys:
                torch.save(store[key], self._folder / f"{key}.pt")
        else:
            torch.save(store, self._folder / "all.pt")


class Samples:
    """Images of noise, in memory."""

    def __init__(self) -> None:
        self._images = torch.randn(1024, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
        self._targets = torch.arange(1024) % 10

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input": self._images[number], "target": self._targets[number]}


def loss(batch: dict[str, Tensor], *, model: Any) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(batch["input"]), batch["target"])


def ways(batch_size: int, folder: Path) -> dict[str, Callable[[], None]]:
    """Return what takes a mini-batch, by name."""
    generator = random.Random(0)
    samples = Samples()
    every = [samples[number] for number in range(batch_size)]
    batch = {key: torch.stack([each[key] for each in every]) for key in ("input", "target")}
    space = shared()
    optimizer = SGD(space.parameters())

    def by_network() -> None:
        optimizer.zero_grad()
        F.cross_entropy(space(batch["input"]), batch["target"]).backward()
        optimizer.step()

    problem = Problem(
        "net", shared(), loss, roles={"model": "net"}, stream=Stream(samples, batch_size, seed=0), optimizer=SGD
    )
    schedule = Schedule(Program([problem], Graph()))
    found: dict[str, Callable[[], None]] = {"shared": by_network, "shared, mlotool's tick": schedule.tick}
    for name, are_apart in (("one file", False), ("a file each", True)):
        below = folder / name.replace(" ", "_")
        below.mkdir()
        files = Files(below, are_apart=are_apart)
        found[name] = lambda files=files: files.step(tuple(generator.choice(KERNELS) for _ in range(NUM_BLOCKS)), batch)
    return found


def measured(batch_size: int, num_rounds: int, num_batches: int) -> dict[str, Any]:
    """Return the milliseconds of a mini-batch in each way."""
    with tempfile.TemporaryDirectory() as folder:
        every = ways(batch_size, Path(folder))
        taken: dict[str, list[float]] = {name: [] for name in every}
        for number in range(num_rounds + 1):
            for name, step in every.items():
                began = time.process_time()
                for _ in range(num_batches):
                    step()
                if number:
                    taken[name].append(1000 * (time.process_time() - began) / num_batches)
    row: dict[str, Any] = {"batch_size": batch_size, **{f"{name}, ms": median(each) for name, each in taken.items()}}
    by_file = min(row["one file, ms"], row["a file each, ms"])
    return row | {
        "files / shared": by_file / row["shared, ms"],
        "files / shared, mlotool's tick": by_file / row["shared, mlotool's tick, ms"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument(
        "--output", type=Path, help="JSON file; default: benchmarks/results/exploration_shared_weights.json"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    where = record.surroundings(("torch",))
    rows = []
    for batch_size in BATCH_SIZES:
        rows.append(measured(batch_size, arguments.rounds, arguments.batches))
        print(", ".join(f"{key} {value:.2f}" for key, value in rows[-1].items()), flush=True)
    print(f"written to {record.write('exploration_shared_weights', {**where, 'rows': rows}, arguments.output)}")


if __name__ == "__main__":
    main()
