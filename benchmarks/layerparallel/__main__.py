"""Layer-parallel training beside serial training and pipelines.

    python -m benchmarks.layerparallel
    python -m benchmarks.layerparallel --parts gpu --device cuda

Times are wall times of a training batch, on ranks of one thread each; rivals take turns in short rounds, and ratios are
taken round by round. Serial training with as many threads as there are ranks stands beside them: on one machine it is
the rival to beat.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch

import mlotool
from benchmarks.harness import record
from benchmarks.harness.pair import Pair
from benchmarks.layerparallel import paths, quoted, times
from benchmarks.layerparallel.model import Workload

PARTS = ("paths", "times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/layerparallel.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
    content: dict[str, Any] = {
        **record.surroundings(("torch",)),
        "mlotool": mlotool.__version__,
        "environment": settings,
        "quoted": quoted.TABLES,
    }
    if "paths" in arguments.parts:
        content["paths"] = paths.compare()
        _show_paths(content["paths"])
    if "times" in arguments.parts:
        with Pair() as pair:
            content["times"] = times.compare(pair, Workload(), arguments.rounds)
        _show_times(content["times"])
    content["load_average_at_the_end"] = os.getloadavg()
    print(f"written to {record.write('layerparallel', content, arguments.output)}")


def _show_times(found: dict[str, Any]) -> None:
    print("\n| rival | ms a batch | times as fast as serial, 1 thread (quartiles) | CPU ms, busier rank | difference |")
    print("|---|---|---|---|---|")
    for name, wall in found["wall"].items():
        # A ratio of times below 1 is a speed-up above 1; the quartiles change places.
        middle, low, high = (1 / wall[key] for key in ("ratio", "ratio_quartile_3", "ratio_quartile_1"))
        difference = found["difference"].get(name)
        cells = [f"{wall['ms']:.0f}", f"{middle:.2f} ({low:.2f}-{high:.2f})", f"{found['cpu'][name]['ms']:.0f}"]
        cells.append("" if difference is None else f"{difference:.1e}")
        print(f"| {name} | {' | '.join(cells)} |")


def _show_paths(rows: list[dict[str, Any]]) -> None:
    workers = list(rows[0]["bound_by_workers"])
    print(f"\n| start, relaxation, N | cycles | N/4 workers | paper | {' | '.join(map(str, workers))} |")
    print("|---" * (4 + len(workers)) + "|")
    for row in rows:
        cells = [f"{row['start']}, {row['relaxation']}, {row['num_layers']}"]
        cells.append(f"{row['cycles_of_states']}+{row['cycles_of_adjoints']}")
        cells.append(f"{row['bound']:.2f}")
        cells.append(" / ".join(str(each) for each in row["paper"].values()))
        cells += [f"{each:.2f}" for each in row["bound_by_workers"].values()]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
