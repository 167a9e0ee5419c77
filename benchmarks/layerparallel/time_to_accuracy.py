"""Seconds until a test accuracy is reached, on two processors: ticks that it takes, times what a tick takes.

    python -m benchmarks.layerparallel.accuracy PATH_TO_THE_FOLDER_OF_MNIST --data mnist --seeds 0 1 2
    python -m benchmarks.layerparallel.accuracy PATH_TO_THE_FOLDER_OF_MNIST --data mlp --stages 2 --seeds 0 1 2
    python -m benchmarks.layerparallel.accuracy PATH_TO_THE_FOLDERS_OF_CIFAR10 --data cifar10 --seeds 0 1 2
    python -m benchmarks.layerparallel --parts times
    python -m benchmarks.layerparallel.time_to_accuracy

It trains nothing and times nothing: ticks come from the curves in results/layerparallel_accuracy_*.json, milliseconds
from results/layerparallel_times.json, where the same networks and batches are timed. What is to be reached is
backpropagation's last accuracy less a point, of the same augmentation, with means over seeds on both sides; a row has
reached it at the first point of its curve whose mean is as high. Serial training and the pipelines compute
backpropagation's gradient, and take its ticks (where there is BatchNorm, a pipeline's micro-batches have statistics of
their own, of which these ticks know nothing); so do data-parallel ranks where there is none. Between two stages a
recursive network is the one of the chain, and takes its ticks.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from benchmarks.harness import record
from benchmarks.layerparallel.accuracy_rows import AUGMENTED, BACKPROPAGATION, DATA, DATA_PARALLEL

NAME = "layerparallel_time_to_accuracy"
WORKLOADS = {"mnist": "resnet", "mlp": "mlp", "cifar10": None}
"""By data set: the workload of the times whose network and batches it has; None: it has none."""
STAGES = (2, 3, 4)
MARGIN = 1.0
"""Points of accuracy below backpropagation's last one."""
TIMED_DATA_PARALLEL = "data parallel"
METHODS = ("stored, penalty", "stored, lagrangian", "AuxNet", "ReAuxNet")

Curve = list[tuple[int, float]]
Times = Mapping[str, float]


@dataclass(frozen=True)
class Line:
    """One rival on one data set.

    Args:
        data: the data set.
        rival: its name among the times.
        num_stages: K.
        is_augmented: whether images are.
        milliseconds: of a tick; None: not timed.
        ticks: to the accuracy; None: not reached.
        seconds: their product.
        ratio: of the seconds to those of two data-parallel ranks.
        last_accuracy: in percent, mean over seeds.
    """

    data: str
    rival: str
    num_stages: int
    is_augmented: bool
    milliseconds: float | None
    ticks: int | None
    seconds: float | None
    ratio: float | None
    last_accuracy: float


def main() -> None:
    curves = {
        data: mean_curves(runs) for data in WORKLOADS if (runs := _results(f"layerparallel_accuracy_{data}", "runs"))
    }
    times = _results("layerparallel_times", "settings") or {}
    lines = [line for data, found in curves.items() for line in compare(data, found, times)]
    print(table(lines))
    print(f"\n{verdict(lines)}")
    content = {"margin": MARGIN, "lines": [asdict(line) for line in lines], "verdict": verdict(lines)}
    record.write(NAME, {**content, **record.surroundings()})


def mean_curves(runs: list[dict[str, Any]]) -> dict[str, Curve]:
    """Return the mean curve over seeds, by row; a row without one, or of which a seed has diverged, is left out."""
    found: dict[str, Curve] = {}
    for row in dict.fromkeys(run["row"] for run in runs):
        own = [run for run in runs if run["row"] == row]
        if all(run["accuracy"] is not None and run.get("curve") for run in own):
            found[row] = [(int(tick), mean(run["curve"][tick] for run in own)) for tick in own[0]["curve"]]
    return found


def compare(data: str, curves: Mapping[str, Curve], times: Mapping[str, Any]) -> Iterator[Line]:
    """Yield the lines of one data set: those of plain images, then of augmented ones."""
    for suffix in ("", AUGMENTED):
        baseline = curves.get(BACKPROPAGATION + suffix)
        if baseline is None:
            continue
        goal = baseline[-1][1] - MARGIN
        pair: float | None = None
        for stages in STAGES:
            own = _milliseconds(times, WORKLOADS[data], stages)
            for rival, row in _rivals(own, curves, suffix, stages):
                is_backpropagation = rival == TIMED_DATA_PARALLEL and not DATA[data].has_batch_norm
                curve = curves.get(row, baseline if is_backpropagation else [])
                if not curve:
                    continue
                line = _line(data, rival, stages, suffix, curve, goal, own.get(rival), pair)
                if rival == TIMED_DATA_PARALLEL:
                    pair = line.seconds
                yield line


def _rivals(times: Times, curves: Mapping[str, Curve], suffix: str, stages: int) -> Iterator[tuple[str, str]]:
    """Yield the rivals, data-parallel ranks first, each with the row of its curve."""
    if stages == 2:
        yield TIMED_DATA_PARALLEL, DATA_PARALLEL + suffix
    serial = [rival for rival in times if rival not in (*METHODS, TIMED_DATA_PARALLEL)]
    for rival in serial or ([BACKPROPAGATION] if stages == 2 else []):
        yield rival, BACKPROPAGATION + suffix
    for method in METHODS:
        row = "AuxNet" if method == "ReAuxNet" and stages == 2 else method
        if (name := f"{row}{suffix}, K={stages}") in curves:
            yield method, name


def _line(
    data: str,
    rival: str,
    stages: int,
    suffix: str,
    curve: Curve,
    goal: float,
    milliseconds: float | None,
    pair: float | None,
) -> Line:
    ticks = next((tick for tick, accuracy in curve if accuracy >= goal), None)
    seconds = None if ticks is None or milliseconds is None else ticks * milliseconds / 1e3
    pair = seconds if rival == TIMED_DATA_PARALLEL else pair
    ratio = None if seconds is None or pair is None else seconds / pair
    return Line(data, rival, stages, bool(suffix), milliseconds, ticks, seconds, ratio, curve[-1][1])


def table(lines: list[Line]) -> str:
    """Return all lines in Markdown."""
    heads = ("data", "images", "K", "rival", "last accuracy, %", "ms a batch", "ticks", "seconds", "over two ranks")
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for line in lines:
        cells = [line.data, "augmented" if line.is_augmented else "plain", str(line.num_stages), line.rival]
        cells += [f"{line.last_accuracy:.1f}", _shown(line.milliseconds, ".0f", "not timed")]
        cells += [_shown(line.ticks, "d", "not reached")]
        cells += [_shown(line.seconds, ".1f", ""), _shown(line.ratio, ".2f", "")]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def verdict(lines: list[Line]) -> str:
    """Say which settings beat two data-parallel ranks."""
    timed = [line for line in lines if line.ratio is not None and line.rival in METHODS]
    if not timed:
        return "No method of ours is timed and reaches the accuracy."
    best = min(timed, key=lambda line: line.ratio or 0.0)
    faster = [line for line in timed if (line.ratio or 1.0) < 1.0]
    named = ", ".join(f"{line.rival} on {line.data} with K={line.num_stages} ({line.ratio:.2f})" for line in faster)
    if faster:
        return f"Faster than two data-parallel ranks: {named}."
    where = f"{best.rival} on {best.data} with K={best.num_stages}"
    return f"No setting is faster than two data-parallel ranks; the nearest, {where}, takes {best.ratio:.2f} of theirs."


def _milliseconds(times: Mapping[str, Any], workload: str | None, stages: int) -> Times:
    wall = times.get(f"{workload}, K={stages}", {}).get("wall", {})
    return {rival: each["ms"] for rival, each in wall.items()}


def _shown(value: float | None, form: str, missing: str) -> str:
    return missing if value is None else format(value, form)


def _results(name: str, key: str) -> Any:
    path = record.RESULTS / f"{name}.json"
    return json.loads(path.read_text()).get(key) if path.exists() else None


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
