"""Searches of model spaces, end to end: trials that share a process and a feed, beside a process a trial.

    python -m benchmarks.exploration.searches
    python -m benchmarks.exploration.searches --recipes explore_mnasnet --trials 20 --workers 2

The same models in each way: drawn at random, none is pruned. CPU time of all processes, imports and the sweep's page
included, one thread each; the wall time of two workers is that of both cores. Below, milliseconds of a draw (the
modules of a recipe built without values, and its shapes), of a build with values, and of computing the shapes alone.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.harness import record
from benchmarks.harness.whole_command import whole_command
from mlotool import compose
from mlotool.config.building import build_modules
from mlotool.config.checks import checked
from mlotool.spaces import ModelGraph, Space
from mlotool.spaces.shapes import Shapes
from mlotool.spaces.tracing import traced

RECIPES = ("explore_mnasnet", "explore_path_level", "explore_textnas")
WAYS = {
    "fused": ["sweep.fuse={trials}"],
    "one by one": ["sweep.fuse=1"],
    "two workers": ["sweep.fuse=1", "sweep.workers={workers}"],
}
NUM_ROUNDS = 20


def search(recipe: str, way: str, trials: int, workers: int) -> dict[str, Any]:
    """Return what a search takes."""
    own = [word.format(trials=trials, workers=workers) for word in WAYS[way]]
    words = [f"+recipe={recipe}", f"sweep.num_trials={trials}", "sweep.sampler=random", "sweep.sampler_options=null"]
    words += ["sweep.pruner=none", "logger=csv", "runner.report=false", *own]
    with tempfile.TemporaryDirectory() as folder:
        taken = whole_command(["run", "-m", *words], Path(folder))
        finished = len(list(Path(folder).glob("outputs/*/multirun/*/*/checkpoints")))
    return {"recipe": recipe, "way": way, **taken, "trained": finished}


def timed(call: Callable[[], Any]) -> float:
    """Return the median milliseconds of a call."""
    call()
    seconds = []
    for _ in range(NUM_ROUNDS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return 1000 * median(seconds)


def parts(recipe: str) -> dict[str, Any]:
    """Return the milliseconds of a draw, of a build, and of computing shapes."""
    values = checked(compose(recipe), targets=False)[0]
    generator = random.Random(0)

    def decide(name: str, candidates: tuple[Any, ...]) -> Any:
        return generator.choice(candidates)

    def draw() -> None:
        with FakeTensorMode():
            build_modules(values, decide)

    base, image = torch.nn.Sequential, [1, 8, 8]
    network = base(*(torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3, padding=1), torch.nn.ReLU()) for _ in range(20)))

    def shapes() -> ModelGraph:
        return ModelGraph(network.eval(), traced(network, ()), Shapes(image), 0, None)

    return {
        "recipe": recipe,
        "draw_ms": timed(draw),
        "build_ms": timed(lambda: build_modules(values, decide)),
        "shapes_of_40_layers_ms": timed(shapes),
        "space_of_40_layers_ms": timed(lambda: Space(network, inputs=image)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/exploration_searches.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    where = record.surroundings(("torch", "pytorch-lightning", "hydra-core", "optuna"))
    rows, times = [], []
    for recipe in arguments.recipes:
        times.append(parts(recipe))
        print(
            ", ".join(
                f"{key} {value if isinstance(value, str) else round(value, 1)}" for key, value in times[-1].items()
            )
        )
        of_recipe = [search(recipe, way, arguments.trials, arguments.workers) for way in arguments.ways]
        for row in of_recipe:
            ratio = row["cpu_s"] / of_recipe[0]["cpu_s"]
            print(
                f"{recipe}, {row['way']}: {row['cpu_s']:.1f} s of CPU ({ratio:.2f}), {row['wall_s']:.1f} s", flush=True
            )
        rows += of_recipe
        content = {**where, "trials": arguments.trials, "workers": arguments.workers, "rows": rows, "times": times}
        print(f"written to {record.write('exploration_searches', content, arguments.output)}", flush=True)


if __name__ == "__main__":
    main()
