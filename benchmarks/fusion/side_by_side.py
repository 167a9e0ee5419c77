"""Runs of different structure side by side in one process, with what they share, beside each with its own.

    python -m benchmarks.fusion.side_by_side

`feed`: eight CNNs on the same JPEGs, which are decoded batch by batch, by one thread; once for all, or for each.
`prefix`: heads of different widths on one frozen encoder, which is evaluated once for all, or for each.

The runs take their ticks in turn. Parameters are compared first, bit by bit. `expected` is the ratio that sharing would
reach if handing on cost nothing: what all runs take alone, over the same with one share of what is shared.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models import resnet18

from benchmarks.harness import record
from benchmarks.harness.rounds import Seconds, interleave, summarize
from mlotool import Graph, Problem, Program, Schedule, Stream
from mlotool.data import ImageFolder, InMemoryDataset, Normalization
from mlotool.fusion.shared_batches import share_prefixes, share_reads
from mlotool.losses import cross_entropy

ALONE, TOGETHER, PART = "each its own", "shared", "what is shared"
CNNS = ((4, 1, 3), (4, 2, 5), (8, 1, 3), (8, 2, 3), (8, 3, 5), (12, 2, 3), (16, 2, 3), (16, 3, 3))
"""Width, number of layers after the first, size of the first layer's kernel."""
FILES = (((224, 224), 96), ((224, 224), 224), ((375, 500), 224))
"""Height and width of the JPEGs, and of what the networks take; 500 x 375 is the usual size in ImageNet."""
NUM_IMAGES, NUM_CLASSES, BATCH_SIZE = 96, 4, 32
NUM_CHECKED = 3

Make = Callable[[Any, int], nn.Module]


def write_jpegs(root: Path, height: int, width: int) -> None:
    """Write images with colours that vary smoothly and noise on them, about as large as photos of their size."""
    generator = torch.Generator().manual_seed(0)
    for number in range(NUM_IMAGES):
        folder = root / "train" / str(number % NUM_CLASSES)
        folder.mkdir(parents=True, exist_ok=True)
        colours = torch.rand(1, 3, 16, 16, generator=generator)
        image = nn.functional.interpolate(colours, (height, width), mode="bicubic")[0]
        image = (image + 0.08 * torch.randn(image.shape, generator=generator)).clamp(0, 1)
        pixels = (image * 255).to(torch.uint8).permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=90)


def cnn(number: int) -> nn.Module:
    """Return one of eight CNNs, for images of any size."""
    width, depth, kernel = CNNS[number % len(CNNS)]
    torch.manual_seed(number)
    layers: list[nn.Module] = [nn.Conv2d(3, width, kernel, stride=4, padding=kernel // 2), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, NUM_CLASSES))


def encoder(kind: str) -> nn.Module:
    """Return an encoder with 512 outputs, frozen and in eval mode."""
    torch.manual_seed(0)
    if kind == "ResNet-18":
        found: nn.Module = resnet18(weights=None)
        found.fc = nn.Identity()
    else:
        layers: list[nn.Module] = []
        for before, after in ((3, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        found = nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return found.requires_grad_(False).eval()


def probe(kind: str, number: int) -> nn.Module:
    """Return a head on a frozen encoder; heads differ in width and activation."""
    width, activation = 32 * (1 + number % 4), (nn.ReLU, nn.Tanh, nn.GELU)[number % 3]
    below = encoder(kind)
    torch.manual_seed(number)
    return nn.Sequential(below, nn.Linear(512, width), activation(), nn.Linear(width, 10))


def problems(modules: list[nn.Module], data: Callable[[], Any], batch_size: int, *, shares: bool) -> list[Problem]:
    """Return runs of one problem each, with what they have in common shared or not."""
    one = data()
    found = [
        Problem(
            "model",
            module,
            cross_entropy,
            roles={"model": "model"},
            stream=Stream(one if shares else data(), batch_size, seed=1),
            optimizer=partial(torch.optim.SGD, lr=0.01),
        )
        for module in modules
    ]
    if shares:
        share_reads(each.stream for each in found if each.stream is not None)
        share_prefixes(found)
    return found


def ticks(runs: list[Problem]) -> Callable[[], None]:
    """Return what takes one tick of each."""
    schedules = [Schedule(Program([each], Graph())) for each in runs]

    def take() -> None:
        for schedule in schedules:
            schedule.tick()

    return take


def parameters(runs: list[Problem]) -> list[Tensor]:
    """Return the trained parameters of all after some ticks."""
    take = ticks(runs)
    for _ in range(NUM_CHECKED):
        take()
    return [tensor for each in runs for tensor in each.theta.values()]


def compare(make: Callable[[bool], list[Problem]], shared_part: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Return the times of both ways, after a comparison of their parameters."""
    if not all(map(torch.equal, parameters(make(False)), parameters(make(True)))):
        raise SystemExit("The runs end with other parameters when they share: no times are reported.")
    rivals = {ALONE: lambda: ticks(make(False)), TOGETHER: lambda: ticks(make(True)), PART: lambda: shared_part}
    found: dict[str, list[Seconds]] = interleave(rivals, num_rounds=rounds, num_cycles=3, num_warmup=4)
    times = list(zip(*([each.cpu for each in found[name]] for name in (ALONE, TOGETHER, PART)), strict=True))
    summary, num_others = summarize(found, ALONE, "cpu"), len(make(False)) - 1
    return {
        "ratio": statistics.median(alone / together for alone, together, _ in times),
        "ratios": [alone / together for alone, together, _ in times],
        "alone_ms": summary[ALONE]["ms"],
        "shared_ms": summary[TOGETHER]["ms"],
        "shared_part_ms": summary[PART]["ms"],
        "expected": statistics.median(alone / (alone - num_others * part) for alone, _, part in times),
    }


def feeds(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of the first table."""
    for (height, width), size in FILES:
        with tempfile.TemporaryDirectory() as folder:
            write_jpegs(Path(folder), height, width)
            for augment in (False, True):

                def data(root: str = folder, size: int = size, augment: bool = augment) -> Any:
                    images = ImageFolder(
                        root,
                        {"train": NUM_IMAGES},
                        NUM_CLASSES,
                        [3, size, size],
                        augment=augment,
                        max_memory_gb=0.0,
                        num_threads=1,
                    )
                    return images.split("train")

                row = compare(
                    lambda shares: problems([cnn(each) for each in range(8)], data, BATCH_SIZE, shares=shares),
                    Stream(data(), BATCH_SIZE, seed=2).next,
                    rounds,
                )
                name = f"8 CNNs at {size} px, files of {width} x {height}"
                yield f"{name}{', augmented' if augment else ''}", row


def prefixes(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of the second table."""
    for kind, size in (("3 convolutions", 32), ("ResNet-18", 32)):
        pixels = torch.randint(256, (256, 3, size, size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        data = InMemoryDataset(pixels, torch.arange(256) % 10, Normalization([0.5] * 3, [0.2] * 3))
        batch, below = Stream(data, 64).next()["input"], encoder(kind)
        for count in (4, 12):
            row = compare(
                lambda shares: problems([probe(kind, each) for each in range(count)], lambda: data, 64, shares=shares),  # noqa: B023
                partial(below, batch),
                rounds,
            )
            yield f"{count} heads on {kind}, {size} x {size}", row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/fusion_side_by_side.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    where = record.surroundings(("torch", "torchvision", "pillow"))
    print("| runs | alone / shared | ms of a tick of all: alone | shared | ms of what is shared | expected |")
    print("|---|---|---|---|---|---|")
    rows = {}
    for name, row in chain(feeds(arguments.rounds), prefixes(arguments.rounds)):
        rows[name] = row
        cells = [f"{row[key]:.1f}" for key in ("alone_ms", "shared_ms", "shared_part_ms")]
        print(f"| {name} | {row['ratio']:.2f} | {' | '.join(cells)} | {row['expected']:.2f} |", flush=True)
    content = {**where, "num_rounds": arguments.rounds, "rows": rows}
    print(f"\nwritten to {record.write('fusion_side_by_side', content, arguments.output)}")


if __name__ == "__main__":
    main()
