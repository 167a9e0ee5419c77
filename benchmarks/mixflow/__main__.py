"""Memory and time of exact gradients through gradients (MixFlow-MG, arXiv 2505.00793).

    git worktree add --detach PATH 14a4558                      # the engine before this work
    python -m benchmarks.mixflow --before PATH
    python -m benchmarks.mixflow --parts ablation ladder --device cuda

Parts: `toy` (the paper's Eq. 9, beside JAX where it is installed), `peaks` (memory against depth), `sweeps` (against
steps, length and batch), `times` (CPU time), `ablation` (after the paper's Table 3), `ladder` (its Fig. 7) and
`picture` (docs/images/mixflow_memory.png, from what `peaks` has found). Each writes results/mixflow_<part>.json.
"""

import argparse
import importlib.util
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import mlotool
from benchmarks.harness import record
from benchmarks.mixflow.engine import Engine

PARTS = ("toy", "peaks", "sweeps", "times", "ablation", "ladder", "picture")
TOY_LENGTHS = (2, 4, 8, 16, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--before", type=Path, help="a checkout of the engine that ratios are to")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: to see that it runs")
    parser.add_argument("--rounds", type=int, default=7, help="of the part `times`")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of `ablation` and `ladder`")
    parser.add_argument("--output", type=Path, default=record.RESULTS, help="folder; default: benchmarks/results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for part in arguments.parts:
        print(f"\n# {part}\n", flush=True)
        if part == "picture":
            from benchmarks.mixflow import picture

            print(f"written to {picture.draw(arguments.output / 'mixflow_peaks.json')}")
            continue
        # The load is that of the part.
        where = {**record.surroundings(_packages(part)), "mlotool": mlotool.__version__}
        if arguments.before is not None:
            where["before"] = record.commit_of(arguments.before)
        content = _run(part, arguments)
        name = f"mixflow_{part}" + ("_cuda" if arguments.device == "cuda" else "")
        print(f"\nwritten to {record.write(name, {**where, **content}, arguments.output / f'{name}.json')}", flush=True)


def _run(part: str, arguments: argparse.Namespace) -> Mapping[str, Any]:
    # Each part imports what it needs: JAX sets itself up, and a process of an engine need not wait for it.
    quick = arguments.quick
    if part == "toy":
        from benchmarks.mixflow import toy

        found = toy.measure(TOY_LENGTHS[:2] if quick else TOY_LENGTHS, is_small=quick)
        toy.show(found)
        return found
    if part == "ablation":
        from benchmarks.mixflow import ablation

        return ablation.measure(arguments.device, is_small=quick)
    if part == "ladder":
        from benchmarks.mixflow import ladder

        return ladder.measure(arguments.device, is_small=quick)
    with ExitStack() as stack:
        now = stack.enter_context(Engine())
        before = None if arguments.before is None else stack.enter_context(Engine(arguments.before))
        if part == "times":
            from benchmarks.mixflow import times

            return times.measure(now, before, 3 if quick else arguments.rounds, is_small=quick)
        from benchmarks.mixflow import peaks

        return (
            peaks.depths(now, before, is_small=quick) if part == "peaks" else peaks.sweeps(now, before, is_small=quick)
        )


def _packages(part: str) -> tuple[str, ...]:
    has_jax = part == "toy" and importlib.util.find_spec("jax") is not None
    return ("torch", "numpy", *(("jax", "jaxlib") if has_jax else ()))


if __name__ == "__main__":
    main()
