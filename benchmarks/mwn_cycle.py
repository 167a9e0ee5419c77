"""Time and memory of one cycle of Meta-Weight-Net: Betty, a bare loop and mlotool.

    python -m benchmarks.mwn_cycle --betty PATH_TO_A_CLONE_OF_BETTY

All rivals share torch, models, data, seeds and settings; they take turns in short rounds, and ratios are taken
round by round. Each one's peak of live tensors is measured apart from the timing.

`--trace` adds mlotool with traced and with compiled gradients (`--trace eager`: traced alone), `--jax` the same loop
by hand in JAX.
"""

import argparse
import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
BARE, FROZEN = "bare loop", "bare loop, frozen constants"
TRACED = {"mlotool, traced": "eager", "mlotool, compiled": "inductor"}
JAX, JAX_EXACT = "jax, jitted", "jax, exact"
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


@dataclass(frozen=True)
class Guests:
    """Who takes part besides those who always do.

    Args:
        own_data: rivals that draw batches by their own loaders.
        trace: mlotool with traced gradients, run in these ways.
        jax: the loop by hand in JAX.
    """

    own_data: bool = False
    trace: tuple[str, ...] = ()
    jax: bool = False


def rivals_of(task: Task, guests: Guests) -> dict[str, Build]:
    """Return who is compared on a task."""
    rivals: dict[str, Build] = {
        BASE: partial(peer.build, task),
        BARE: partial(bare.build, task),
        "mlotool": partial(ours.build, task),
    }
    if task.algorithm == "fd":
        # Double backward honours a plain detach, so only finite differences know the difference.
        rivals[FROZEN] = partial(bare.build, task, frozen_constants=True)
        rivals["mlotool, stop_gradient"] = partial(ours.build, task, with_stop_gradient=True)
    if guests.own_data:
        rivals[BASE_OWN_DATA] = partial(peer.build, task, own_data=True)
        rivals["mlotool, own data stream"] = partial(ours.build, task, own_data=True)
        if task.algorithm == "fd":
            rivals["mlotool, stop_gradient, own data stream"] = partial(
                ours.build, task, with_stop_gradient=True, own_data=True
            )
    rivals |= {name: partial(ours.build, task, trace=way) for name, way in TRACED.items() if way in guests.trace}
    return rivals | _jax_rivals(task) if guests.jax else rivals


def _jax_rivals(task: Task) -> dict[str, Build]:
    # Its import sets JAX up, and JAX need not be there without --jax.
    from benchmarks.betty import jaxed

    rivals: dict[str, Build] = {JAX: partial(jaxed.build, task)}
    if task.algorithm == "fd":
        rivals[JAX_EXACT] = partial(jaxed.build, task, is_exact=True)
    return rivals


def compare(task: Task, num_rounds: int, guests: Guests) -> dict[str, Any]:
    """Return the row of one task: times, memory and agreement of all rivals."""
    differences = _differences(task, guests)
    if max(differences.values()) > LARGEST_DIFFERENCE:
        raise SystemExit(
            f"{task.model}, {task.algorithm}: after {CHECKED_CYCLES} cycles in float64 the parameters differ by "
            f"{differences}; expected at most {LARGEST_DIFFERENCE}. The rivals do different work: no time is reported."
        )
    rivals = rivals_of(task, guests)
    cycles = {name: _start_of(build) for name, build in rivals.items()}
    first_seconds = {name: _first_seconds(cycles[name]) for name in rivals if name in TRACED or _is_jax(name)}
    num_cycles = max(2, round(ROUND_SECONDS / CYCLE_SECONDS[task.model, task.algorithm]))
    seconds = interleave(cycles, num_rounds=num_rounds, num_cycles=num_cycles)
    on_cuda = task.device != "cpu"
    peaks = {
        name: None if _is_jax(name) else memory.peak_bytes(_start_of(build), on_cuda=on_cuda)
        for name, build in rivals.items()
    }
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
        "first_seconds": first_seconds,
    }
    if guests.jax:
        row["against_jax"] = {clock: summarize(seconds, JAX, clock) for clock in ("wall", "cpu")}
    if task.algorithm == "cg":
        row["mlotool_solves"] = ours.solves(task, num_cycles + 2)
    return row


def base_of(name: str) -> str:
    """Return the rival that `name` is compared to."""
    return BASE_OWN_DATA if name.endswith("own data stream") else BASE


def _summary(seconds: Mapping[str, list[Seconds]], clock: str) -> dict[str, dict[str, float]]:
    return {name: summarize(seconds, base_of(name), clock)[name] for name in seconds}


def _is_jax(name: str) -> bool:
    return name in (JAX, JAX_EXACT)


def _start_of(build: Build) -> Callable[[], Cycle]:
    """Return what begins a rival anew: one that can go back to its start is built once."""
    kept: list[Rival] = []

    def start() -> Cycle:
        if kept:
            rival = kept[0]
            assert rival.restart is not None
            rival.restart()
            return rival.cycle
        rival = build()
        if rival.restart is not None:
            kept.append(rival)
        return rival.cycle

    return start


def _first_seconds(start: Callable[[], Cycle]) -> float:
    """Return the wall seconds of the first two cycles, in which a rival traces or compiles."""
    cycle = start()
    began = time.perf_counter()
    cycle()
    cycle()
    return time.perf_counter() - began


def _differences(task: Task, guests: Guests) -> dict[str, float]:
    """Return how far the parameters are apart after some cycles in float64, relative to how far they moved.

    The larger one of the two problems' distances. JAX's exact product is left out: it is not a finite difference.
    """
    exact = Task(task.model, task.algorithm, task.device, torch.float64)
    start = _flat(bare.build(exact))
    ends = {}
    rivals = rivals_of(exact, Guests(trace=guests.trace, jax=guests.jax))
    for name, build in rivals.items():
        rival = build()
        for _ in range(CHECKED_CYCLES):
            rival.cycle()
        rival.write_back()
        ends[name] = _flat(rival)
    pairs = [(BASE, BARE), ("mlotool", BARE), ("mlotool", BASE)]
    pairs += [(name, BARE) for name in (*TRACED, JAX) if name in rivals]
    if task.algorithm == "fd":
        pairs.append(("mlotool, stop_gradient", FROZEN))
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
    """Print a row as markdown: CPU time, or wall time where JAX, which has threads of its own, takes part."""
    against_jax = row.get("against_jax")
    clock = "wall" if against_jax else "cpu"
    columns = ["rival", f"ms a cycle ({clock})", "time / Betty (quartiles)", "peak KiB", "peak / Betty"]
    if against_jax:
        columns.append("time / JAX (quartiles)")
    print(f"\n{row['model']} ({row['num_parameters']} parameters), {row['algorithm']}")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, each in row[clock].items():
        cells = [name, f"{each['ms']:.2f}", _spread(each), *_memory(row, name)]
        if against_jax:
            cells.append(_spread(against_jax[clock][name]))
        print(f"| {' | '.join(cells)} |")
    print("differences in float64: " + ", ".join(f"{key}: {value:.1e}" for key, value in row["difference"].items()))
    if row["first_seconds"]:
        print("first two cycles: " + ", ".join(f"{key}: {value:.1f} s" for key, value in row["first_seconds"].items()))
    if "mlotool_solves" in row:
        print(f"mlotool's solves: {dict(row['mlotool_solves'])}")
    sys.stdout.flush()


def _spread(each: Mapping[str, float]) -> str:
    return f"{each['ratio']:.3f} ({each['ratio_quartile_1']:.3f}-{each['ratio_quartile_3']:.3f})"


def _memory(row: dict[str, Any], name: str) -> tuple[str, str]:
    """Return a rival's peak in KiB and relative to Betty's; torch does not see what JAX allocates."""
    peak = row["peak_bytes"][name]
    return ("-", "-") if peak is None else (f"{peak / 1024:.0f}", f"{peak / row['peak_bytes'][base_of(name)]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--betty", type=Path, required=True, help="folder of a clone of Betty (betty-ml 0.2.x)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--own-data", action="store_true", help="add rivals that draw batches by their own loaders")
    ways = tuple(TRACED.values())
    parser.add_argument("--trace", nargs="*", choices=ways, help="add mlotool with traced and with compiled gradients")
    parser.add_argument("--jax", action="store_true", help="add the loop by hand in JAX; all run on one core")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/mwn_cycle.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.jax:
        _prepare_jax(parser, arguments.device)
    trace = ways if arguments.trace == [] else tuple(arguments.trace or ())
    if trace:
        _prepare_traces()
    packages = ("torch", "numpy", "scikit-learn", *(["jax", "jaxlib"] if arguments.jax else []))
    where = record.surroundings(packages)  # before the run: the checkout may move on meanwhile
    guests = Guests(arguments.own_data, trace, arguments.jax)
    sys.path.insert(0, str(arguments.betty))
    rows = []
    for model in arguments.models:
        for algorithm in arguments.algorithms:
            rows.append(compare(Task(model, algorithm, arguments.device), arguments.rounds, guests))
            show(rows[-1])
    content = {**where, **_versions(), "rows": rows}
    print(f"\nwritten to {record.write('mwn_cycle', content, arguments.output)}")


def _prepare_jax(parser: argparse.ArgumentParser, device: str) -> None:
    """Keep the process and XLA, which starts threads of its own, to one core; JAX is not imported yet."""
    if importlib.util.find_spec("jax") is None:
        parser.error("--jax: JAX is not installed; expected the package jax. Run: pip install jax")
    if device != "cpu":
        parser.error(f"--jax: found --device {device}; expected cpu. Leave one of the two out.")
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def _prepare_traces() -> None:
    """Let compilers find nothing that an earlier run has left, and a trace that is given up end the run."""
    folder = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="mwn_cycle_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    warnings.filterwarnings("error", message=".*its steps are not traced")


def _versions() -> dict[str, str]:
    import betty

    import mlotool

    return {"betty": betty.__version__, "mlotool": mlotool.__version__}


if __name__ == "__main__":
    main()
