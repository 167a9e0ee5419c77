"""A sweep of 32 seeds of `plain`: as one program, by Hydra's own sweeper in one process, and by a process a job.

    python -m benchmarks.fusion.whole_sweeps
    python -m benchmarks.fusion.whole_sweeps --ways fused hydra --seeds 32 --workers 2

CPU time of all processes, their imports and the sweep's page included; one thread each.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import record
from benchmarks.harness.whole_command import whole_command

WAYS = {"fused": ["sweep.fuse={seeds}"], "hydra": [], "processes": ["sweep.workers={workers}"]}


def run(way: str, seeds: int, workers: int, words: list[str]) -> dict[str, Any]:
    """Return what a sweep takes."""
    own = [word.format(seeds=seeds, workers=workers) for word in WAYS[way]]
    command = ["run", "-m", "+recipe=plain", f"seed=range(0,{seeds})", *own, *words]
    with tempfile.TemporaryDirectory() as folder:
        taken = whole_command(command, Path(folder))
        finished = len(list(Path(folder).glob("outputs/plain/multirun/*/*/summary.json")))
    return {"way": way, **taken, "finished": finished}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--words", nargs="*", default=[], help="more overrides of the sweep")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/fusion_whole_sweeps.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    where = record.surroundings(("torch", "pytorch-lightning", "hydra-core", "wandb"))
    rows = []
    for way in arguments.ways:
        rows.append(run(way, arguments.seeds, arguments.workers, arguments.words))
        row = rows[-1]
        ratio = row["cpu_s"] / rows[0]["cpu_s"]
        print(
            f"{way}: {row['cpu_s']:.1f} s of CPU ({ratio:.2f}), {row['wall_s']:.1f} s, {row['finished']} runs",
            flush=True,
        )
    content = {**where, "seeds": arguments.seeds, "workers": arguments.workers, "rows": rows}
    print(f"written to {record.write('fusion_whole_sweeps', content, arguments.output)}")


if __name__ == "__main__":
    main()
