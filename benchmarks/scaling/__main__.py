"""Two ranks against one on Meta-Weight-Net: time, communication, memory.

    python -m benchmarks.scaling

Times are wall times, for two processes share the work; rivals take turns in short rounds, and ratios are taken round
by round. Beside them stands the CPU time of the busier rank, which other work on the machine hardly changes.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch

import mlotool
from benchmarks.harness import record
from benchmarks.harness.team import Team
from benchmarks.scaling import communication, memory, times
from benchmarks.scaling.programs import ALGORITHMS, MODELS, Workload

SETTINGS = ("task", "precision", "num_ranks")
PARTS = ("times", "communication", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--block-seconds", type=float, default=0.1, help="about how long a rival's timed block takes")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/scaling.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    where = record.surroundings(("torch", "torchvision", "scikit-learn"))  # before: the checkout may move on meanwhile
    settings = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
    content: dict[str, Any] = {**where, "mlotool": mlotool.__version__, "environment": settings}
    if "memory" in arguments.parts:
        content["memory_computed"] = memory.compute()
        _show_memory(content["memory_computed"])
        record.write("scaling", content, arguments.output)
    workloads = [Workload(model, algorithm) for model in arguments.models for algorithm in arguments.algorithms]
    with Team(times.NUM_RANKS) as team:
        for part, compare, show in (
            ("communication", lambda each: communication.compare(team, each), _show_communication),
            ("times", lambda each: times.compare(team, each, arguments.rounds, arguments.block_seconds), _show_times),
        ):
            if part in arguments.parts:
                content[part] = []
                for workload in workloads:
                    content[part].append(compare(workload))
                    show(content[part][-1])
                    # After each row: on a busy machine it may not come to the last.
                    path = record.write("scaling", content, arguments.output)
                    print(f"written to {path}", flush=True)


def _show_times(row: dict[str, Any]) -> None:
    print(f"\n{row['model']} {row['num_parameters']}, {row['algorithm']}; difference {row['difference']:.1e}")
    print("| rival | ms, wall | wall / 1 rank (quartiles) | of the fastest rounds | CPU / 1 rank (quartiles) |")
    print("|---|---|---|---|---|")
    for name, wall in row["wall"].items():
        cells = [f"{wall['ms']:.2f}", _spread(wall), f"{wall['ratio_of_fastest']:.2f}", _spread(row["cpu"][name])]
        print(f"| {name} | {' | '.join(cells)} |")


def _show_communication(row: dict[str, Any]) -> None:
    ours, betty = row["counted"], row["betty_computed"]
    errors = ", ".join(f"{name}: {error:.1e}" for name, error in row["error_of_hypergradient"].items())
    print(
        f"{row['model']}, {row['algorithm']}: {ours['bytes']:.0f} bytes in {ours['all_reduces']:.0f} all-reduces; "
        f"Betty (computed) {betty['bytes']} in {betty['all_reduces']}; error {errors}"
    )


def _show_memory(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        settings = f"{row['task']}, {row['precision']}, {row['num_ranks']} rank(s)"
        parts = ", ".join(f"{key} {value / 2**20:.0f}" for key, value in row.items() if key not in SETTINGS)
        print(f"{settings}, MiB: {parts}")


def _spread(summary: dict[str, float]) -> str:
    return f"{summary['ratio']:.2f} ({summary['ratio_quartile_1']:.2f}-{summary['ratio_quartile_3']:.2f})"


if __name__ == "__main__":
    main()
