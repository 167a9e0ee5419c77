"""One row an algorithm and a task: error, agreement, time and memory of every rival."""

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import memory
from benchmarks.harness.rounds import Cycle, interleave, summarize
from benchmarks.hypergradients import reference, tasks
from benchmarks.hypergradients.algorithms import ALGORITHMS, Algorithm, NotOfferedError, Rival, flat
from benchmarks.hypergradients.betty_peer import Betty
from benchmarks.hypergradients.ours import Ours
from benchmarks.hypergradients.torchopt_peer import TorchOpt

OURS = "mlotool"
ROUND_SECONDS = 0.05
"""About how long a rival's turn takes."""
LARGEST_DIFFERENCE = 1e-6
"""From the plain form, in float64, relative; normal equations of a condition of 1e4 leave 1e-12, differences 1e-8."""

Build = Callable[[], Rival]


def rivals_of(with_torchopt: bool, with_betty: bool) -> dict[str, Callable[[tasks.Bilevel, Algorithm], Rival]]:
    """Return who is compared."""
    rivals: dict[str, Callable[[tasks.Bilevel, Algorithm], Rival]] = {OURS: Ours}
    if with_torchopt:
        rivals["TorchOpt"] = TorchOpt
    if with_betty:
        rivals["Betty"] = Betty
    return rivals


def rows_of(
    name: str, rivals: Mapping[str, Callable[[tasks.Bilevel, Algorithm], Rival]], num_rounds: int
) -> list[dict[str, Any]]:
    """Return and print the rows of a task."""
    plain = reference.Plain(tasks.make(name, torch.float64))
    exact = reference.exact(plain)
    rows = []
    for algorithm in ALGORITHMS:
        is_checked = algorithm.has_reference and not (algorithm.kind == "exact" and plain.task.has_cycle)
        expected = reference.gradient(plain, algorithm.kind) if is_checked else None
        row = _row(name, algorithm, rivals, num_rounds, exact, expected)
        rows.append(row)
        show(row)
    return rows


def _row(
    name: str,
    algorithm: Algorithm,
    rivals: Mapping[str, Callable[[tasks.Bilevel, Algorithm], Rival]],
    num_rounds: int,
    exact: Tensor,
    expected: Tensor | None,
) -> dict[str, Any]:
    row: dict[str, Any] = {"task": name, "algorithm": algorithm.name, "kind": algorithm.kind, "rivals": {}}
    task, precise = tasks.make(name), tasks.make(name, torch.float64)
    builds: dict[str, Build] = {}
    for rival, make in rivals.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = _accuracy(partial(make, task, algorithm), algorithm, exact)
                if expected is not None:
                    gradient = flat(make(precise, algorithm).hypergradient())
                    found["difference_from_plain"] = float((gradient - expected).norm() / expected.norm())
        except NotOfferedError as error:
            row["rivals"][rival] = {"note": str(error)}
            continue
        except Exception as error:
            # A peer's own failure is a result.
            row["rivals"][rival] = {"note": f"fails: {type(error).__name__}: {str(error)[:80]}"}
            continue
        if found.get("difference_from_plain", 0.0) > LARGEST_DIFFERENCE:
            row["rivals"][rival] = {**found, "note": "computes something else: not timed"}
            continue
        row["rivals"][rival] = found
        builds[rival] = partial(make, task, algorithm)
    if OURS in builds:
        _measure(row, "hypergradient", {key: _hypergradient_of(build) for key, build in builds.items()}, num_rounds)
        # A cycle of evolution strategies is its hypergradient.
        if task.has_cycle and algorithm.kind != "evolution":
            _measure(row, "cycle", {key: _cycle_of(build) for key, build in builds.items()}, num_rounds)
    return row


def _accuracy(build: Build, algorithm: Algorithm, exact: Tensor) -> dict[str, float]:
    """Return error and cosine in float32, to the exact hypergradient."""
    rival, errors, cosines = build(), [], []
    for number in range(max(algorithm.num_calls, algorithm.num_draws)):
        gradient = flat(rival.hypergradient())
        if number >= algorithm.num_calls - 1:
            errors.append(float((gradient - exact).norm() / exact.norm()))
            cosines.append(float(torch.cosine_similarity(gradient, exact, dim=0)))
    return {
        "error": statistics.mean(each**2 for each in errors) ** 0.5,
        "cosine": statistics.mean(cosines),
    }


def _measure(row: dict[str, Any], what: str, cycles: Mapping[str, Callable[[], Cycle]], num_rounds: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        slowest = max(_seconds(build) for build in cycles.values())
        num_cycles = max(1, round(ROUND_SECONDS / slowest))
        found = interleave(cycles, num_rounds=num_rounds, num_cycles=num_cycles, num_warmup=1)
        peaks = {
            key: memory.peak_bytes(build, num_cycles=1 if what == "hypergradient" else 2)
            for key, build in cycles.items()
        }
    cpu, wall = (summarize(found, OURS, clock) for clock in ("cpu", "wall"))
    for key in cycles:
        row["rivals"][key][what] = {
            "cpu": cpu[key],
            "wall": wall[key],
            "peak_bytes": peaks[key],
            "peak_ratio": peaks[key] / peaks[OURS],
        }


def _seconds(build: Callable[[], Cycle]) -> float:
    cycle = build()
    cycle()
    start = time.process_time()
    cycle()
    return time.process_time() - start


def _hypergradient_of(build: Build) -> Callable[[], Cycle]:
    def cycle_of() -> Cycle:
        rival = build()

        def cycle() -> None:
            rival.hypergradient()

        return cycle

    return cycle_of


def _cycle_of(build: Build) -> Callable[[], Cycle]:
    return lambda: build().cycle


def show(row: Mapping[str, Any]) -> None:
    """Print a row."""
    print(f"\n{row['task']}: {row['algorithm']}")
    for rival, each in row["rivals"].items():
        parts = [f"error {each['error']:.2g} cos {each['cosine']:.3f}"] if "error" in each else []
        if "difference_from_plain" in each:
            parts.append(f"plain {each['difference_from_plain']:.0e}")
        for what in ("hypergradient", "cycle"):
            if what in each:
                cpu = each[what]["cpu"]
                ratio = f"{cpu['ratio']:.2f} ({cpu['ratio_quartile_1']:.2f}-{cpu['ratio_quartile_3']:.2f})"
                peak = f"{each[what]['peak_bytes'] / 1024:.0f} KiB x{each[what]['peak_ratio']:.2f}"
                parts.append(f"{what} {cpu['ms']:.2f} ms x{ratio}, {peak}")
        print(f"  {rival}: {'; '.join([*parts, *([each['note']] if 'note' in each else [])])}")
    sys.stdout.flush()


def markdown(rows: list[dict[str, Any]], what: str = "hypergradient") -> str:
    """Return the rows as a table: our milliseconds and KiB, and the others' over ours.

    Args:
        rows: from `rows_of`.
        what: "hypergradient" or "cycle".
    """
    peers = [each for each in rows[0]["rivals"] if each != OURS]
    head = ["algorithm", "error", "cosine", "ms", "KiB", *(f"{peer}: time, memory" for peer in peers)]
    lines = []
    for name in dict.fromkeys(row["task"] for row in rows):
        lines += ["", f"**{name}**", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for row in (each for each in rows if each["task"] == name):
            own = row["rivals"][OURS]
            if what in own:
                cells = [f"{own['error']:.2g}", f"{own['cosine']:.3f}", f"{own[what]['cpu']['ms']:.2f}"]
                cells.append(f"{own[what]['peak_bytes'] / 1024:.0f}")
            else:
                cells = [own.get("note", ""), "", "", ""]
            cells += [_peer_cell(row["rivals"][peer], own, what) for peer in peers]
            lines.append(f"| {row['algorithm']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _peer_cell(peer: Mapping[str, Any], own: Mapping[str, Any], what: str) -> str:
    if what not in peer:
        return str(peer.get("note", ""))
    cpu = peer[what]["cpu"]
    text = f"{cpu['ratio']:.2f} ({cpu['ratio_quartile_1']:.2f}-{cpu['ratio_quartile_3']:.2f})"
    text += f", {peer[what]['peak_ratio']:.2f}"
    is_same = abs(peer["error"] - own["error"]) <= 0.05 * own["error"] + 1e-5
    return text if is_same else f"{text}; error {peer['error']:.2g}"
