"""Every hypergradient of mlotool beside Betty's and TorchOpt's.

    python -m benchmarks.hypergradients --betty PATH_TO_A_CLONE_OF_BETTY --torchopt

Parts: `table` (error, time, memory), `logistic` (Fig. 3 of Betty's paper), `quadratic` (gradient of the value function
against oracle calls), `reweighting` (Fig. 4, reduced) and `long_tail` (Table 1, reduced). Each writes
results/hypergradients_<part>.json (`table` one a task), and all but `table` and `long_tail` pictures.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import record
from benchmarks.hypergradients import logistic, long_tail, quadratic, reweighting, table, tasks

PARTS = ("table", "logistic", "quadratic", "reweighting", "long_tail")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--betty", type=Path, help="folder of a clone of Betty (betty-ml 0.2.x)")
    parser.add_argument("--torchopt", action="store_true", help="compare with the installed TorchOpt")
    parser.add_argument("--quick", action="store_true", help="few rounds, steps and seeds: to see that it runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tasks", nargs="+", choices=tasks.NAMES, default=tasks.NAMES, help="of the part `table`")
    parser.add_argument("--output", type=Path, default=record.RESULTS, help="folder; default: benchmarks/results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    where = record.surroundings(("torch", "numpy", "scikit-learn"))  # before the run: the checkout may move on
    where["versions"] |= _peer_versions(arguments)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for part in arguments.parts:
        print(f"\n# {part}", flush=True)
        for name, content in _run(part, arguments):
            path = arguments.output / f"hypergradients_{name}.json"
            print(f"\nwritten to {record.write(path.stem, {**where, **content}, path)}", flush=True)


def _run(part: str, arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    has_betty, quick, folder = arguments.betty is not None, arguments.quick, arguments.output
    if part == "table":
        rivals = table.rivals_of(arguments.torchopt, has_betty)
        for name in arguments.tasks:
            rows = table.rows_of(name, rivals, 3 if quick else 7)
            print(f"\n## One hypergradient\n{table.markdown(rows)}")
            if name != "logistic":
                print(f"\n## One training cycle\n{table.markdown(rows, 'cycle')}")
            yield f"table_{name.lower().replace(' ', '_')}", {"rows": rows}
    elif part == "logistic":
        yield part, logistic.measure(folder, has_betty, num_upper_steps=5 if quick else 100)
    elif part == "quadratic":
        yield part, quadratic.measure(folder, budget=20 if quick else 250)
    elif part == "reweighting":
        steps, seeds = (20, 1) if quick else (200, 2)
        yield part, reweighting.measure(folder, num_upper_steps=steps, num_seeds=seeds)
    else:
        yield part, long_tail.measure(num_ticks=50 if quick else 400, num_seeds=2 if quick else 4)


def _peer_versions(arguments: argparse.Namespace) -> dict[str, str]:
    import mlotool

    found = {"mlotool": mlotool.__version__}
    if arguments.betty is not None:
        sys.path.insert(0, str(arguments.betty))
        import betty

        found["betty"] = betty.__version__
    if arguments.torchopt:
        import torchopt

        found["torchopt"] = torchopt.__version__
    return found


if __name__ == "__main__":
    main()
