"""Time and memory of one cycle of Meta-Weight-Net: Betty, a bare loop and mlotool.

    python -m benchmarks.mwn_cycle --betty PATH_TO_A_CLONE_OF_BETTY

All rivals share torch, models, data, seeds and settings; they take turns in short rounds, and ratios are taken
round by round. Each one's peak of live tensors is measured apart from the timing.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.betty import bare, ours, peer
from benchmarks.betty.rival import Rival
from benchmarks.betty.task import ALGORITHMS, MODELS, Task
from benchmarks.harness import memory, record
from benchmarks.harness.rounds import Cycle, Seconds, interleave, summarize

BASE, BASE_OWN_DATA = "betty", "betty, own data stream"
ROUND_SECONDS = 0.1
"""About how long a rival's turn takes."""
CYCLE_SECONDS = {
    ("mlp", "fd"): 3e-3,
    ("mlp", "neumann"): 5e-3,
    ("mlp", "cg"): 5e-3,
    ("resnet", "fd"): 20e-3,
    ("resnet", "neumann"): 65e-3,
    ("resnet", "cg"): 65e-3,
}
CHECKED_CYCLES, LARGEST_DIFFERENCE = 10, 1e-8

Build = Callable[[], Rival]


def rivals_of(task: Task, own_data: bool) -> dict[str, Build]:
    """Return who is compared on a task."""
    rivals: dict[str, Build] = {
        BASE: partial(peer.build, task),
        "bare loop": partial(bare.build, task),
        "mlotool": partial(ours.build, task),
    }
    if task.algorithm == "fd":
        # Double backward honours a plain detach, so only finite differences know the difference.
        rivals["bare loop, frozen constants"] = partial(bare.build, task, frozen_constants=True)
        rivals["mlotool, stop_gradient"] = partial(ours.build, task, with_stop_gradient=True)
    if own_data:
        rivals[BASE_OWN_DATA] = partial(peer.build, task, own_data=True)
        rivals["mlotool, own data stream"] = partial(ours.build, task, own_data=True)
        if task.algorithm == "fd":
            rivals["mlotool, stop_gradient, own data stream"] = partial(
                ours.build, task, with_stop_gradient=True, own_data=True
            )
    return rivals


def compare(task: Task, num_rounds: int, own_data: bool) -> dict[str, Any]:
    """Return the row of one task: times, memory and agreement of all rivals."""
    differences = _differences(task)
    if max(differences.values()) > LARGEST_DIFFERENCE:
        raise SystemExit(
            f"{task.model}, {task.algorithm}: after {CHECKED_CYCLES} cycles in float64 the parameters differ by "
            f"{differences}; expected at most {LARGEST_DIFFERENCE}. The rivals do different work: no time is reported."
        )
    rivals = rivals_of(task, own_data)
    cycles = {name: _cycle_of(build) for name, build in rivals.items()}
    num_cycles = max(2, round(ROUND_SECONDS / CYCLE_SECONDS[task.model, task.algorithm]))
    seconds = interleave(cycles, num_rounds=num_rounds, num_cycles=num_cycles)
    on_cuda = task.device != "cpu"
    peaks = {name: memory.peak_bytes(build, on_cuda=on_cuda) for name, build in cycles.items()}
    row: dict[str, Any] = {
        "model": task.model,
        "num_parameters": sum(parameter.numel() for parameter in task.make_classifier().parameters()),
        "algorithm": task.algorithm,
        "num_rounds": num_rounds,
        "num_cycles": num_cycles,
        "wall": _summary(seconds, "wall"),
        "cpu": _summary(seconds, "cpu"),
        "peak_bytes": peaks,
        "difference": differences,
    }
    if task.algorithm == "cg":
        row["mlotool_solves"] = ours.solves(task, num_cycles + 2)
    return row


def base_of(name: str) -> str:
    """Return the rival that `name` is compared to."""
    return BASE_OWN_DATA if name.endswith("own data stream") else BASE


def _summary(seconds: Mapping[str, list[Seconds]], clock: str) -> dict[str, dict[str, float]]:
    return {name: summarize(seconds, base_of(name), clock)[name] for name in seconds}


def _cycle_of(build: Build) -> Callable[[], Cycle]:
    return lambda: build().cycle


def _differences(task: Task) -> dict[str, float]:
    """Return how far the parameters are apart after some cycles in float64, relative to how far they moved.

    The larger one of the two problems' distances.
    """
    exact = Task(task.model, task.algorithm, task.device, torch.float64)
    start = _flat(bare.build(exact))
    ends = {}
    for name, build in rivals_of(exact, own_data=False).items():
        rival = build()
        for _ in range(CHECKED_CYCLES):
            rival.cycle()
        ends[name] = _flat(rival)
    pairs = [(BASE, "bare loop"), ("mlotool", "bare loop"), ("mlotool", BASE)]
    if task.algorithm == "fd":
        pairs.append(("mlotool, stop_gradient", "bare loop, frozen constants"))
    return {
        f"{a} - {b}": max(
            float((mine - other).norm() / (other - origin).norm())
            for mine, other, origin in zip(ends[a], ends[b], start, strict=True)
        )
        for a, b in pairs
    }


def _flat(rival: Rival) -> list[torch.Tensor]:
    """Return the parameters of each problem as one vector."""
    return [nn.utils.parameters_to_vector(each.parameters()).detach() for each in (rival.classifier, rival.weight_net)]


def show(row: dict[str, Any]) -> None:
    """Print a row as markdown."""
    print(f"\n{row['model']} ({row['num_parameters']} parameters), {row['algorithm']}")
    print("| rival | ms a cycle | time / Betty (quartiles) | peak KiB | peak / Betty |")
    print("|---|---|---|---|---|")
    for name, each in row["cpu"].items():
        peak = row["peak_bytes"][name]
        spread = f"{each['ratio']:.3f} ({each['ratio_quartile_1']:.3f}-{each['ratio_quartile_3']:.3f})"
        relative = peak / row["peak_bytes"][base_of(name)]
        print(f"| {name} | {each['ms']:.2f} | {spread} | {peak / 1024:.0f} | {relative:.3f} |")
    print("differences in float64: " + ", ".join(f"{key}: {value:.1e}" for key, value in row["difference"].items()))
    if "mlotool_solves" in row:
        print(f"mlotool's solves: {dict(row['mlotool_solves'])}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--betty", type=Path, required=True, help="folder of a clone of Betty (betty-ml 0.2.x)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--own-data", action="store_true", help="add rivals that draw batches by their own loaders")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/mwn_cycle.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    where = record.surroundings(
        ("torch", "numpy", "scikit-learn")
    )  # before the run: the checkout may move on meanwhile
    sys.path.insert(0, str(arguments.betty))
    rows = []
    for model in arguments.models:
        for algorithm in arguments.algorithms:
            rows.append(compare(Task(model, algorithm, arguments.device), arguments.rounds, arguments.own_data))
            show(rows[-1])
    content = {**where, **_versions(), "rows": rows}
    print(f"\nwritten to {record.write('mwn_cycle', content, arguments.output)}")


def _versions() -> dict[str, str]:
    import betty

    import mlotool

    return {"betty": betty.__version__, "mlotool": mlotool.__version__}


if __name__ == "__main__":
    main()
