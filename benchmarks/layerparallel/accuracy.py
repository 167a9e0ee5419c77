"""Test accuracy of layer-parallel training: against the number of stages, with and without augmentation, against beta.

    python -m benchmarks.layerparallel.accuracy --jobs 2
    python -m benchmarks.layerparallel.accuracy PATH_TO_THE_FOLDER_OF_MNIST --data mnist

The shape of tables 4, 7 and 8 of Sun et al. 2021 (arXiv 2112.05387), far smaller: the network and the rates of the
recipe layerparallel_penalty, a ResNet-14, on digits (24 epochs of batch 100), or at half that width on 1,500 images of
MNIST (33 epochs). One stage is backpropagation. What diverges is written down as such. The result file is written
after each run.
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import mlotool
from benchmarks.harness import record
from mlotool import Schedule
from mlotool.config import build
from mlotool.core.errors import MlotoolError
from mlotool.runner.evaluation import Evaluator

PARALLEL = "problems.classifier.parallel"
PENALTY = ("variables=stored", "method=penalty", "beta=10")
LAGRANGIAN = ("variables=stored", "method=lagrangian", "beta=10", "lambda_rate=0.3")
AUXNET = ("variables=auxnet", "auxnet_optimizer=adam", "auxnet_lr=3e-3")
STAGES = (1, 2, 3, 4)
BETAS = (0.1, 1, 10, 100)
RATES = ("[0.1,0.1]", "[0.5,0.5]", "[0.05,1]", "[0.3,1]", "[0.7,1]", "[1,1]", "auto")
"""Of stored variables between three stages, beside the default."""
# By data set: its options and the ticks of a run.
DATA = {
    "digits": (240, ("data=digits",)),
    "mnist": (
        500,
        ("data=mnist", "data.sizes={train: 1500, val: 500, test: 2000}", "problems.classifier.module.width=4"),
    ),
    "cifar10": (
        1500,
        ("data=cifar10_folder", "data.sizes={train: 5000, val: 1000, test: 4000}", "data.image_shape=[3,16,16]"),
    ),
}


def main() -> None:
    options = _options()
    name = f"layerparallel_accuracy_{options.data}"
    jobs = [(seed, *row) for seed in options.seeds for row in rows(options.stages)]
    jobs = [job for job in jobs if options.rows is None or job[1] in options.rows]
    runs: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(accuracy, options, *job) for job in jobs]
        for future in as_completed(futures):
            runs.append(future.result())
            print(runs[-1], flush=True)
            found = sorted(
                runs, key=lambda run: [(seed, row) for seed, row, *_ in jobs].index((run["seed"], run["row"]))
            )
            record.write(name, {"runs": found, **record.surroundings()})
    print(table(found))


def rows(stages: list[int]) -> list[tuple[str, bool, tuple[str, ...] | None]]:
    """Return name, whether images are augmented, and the settings of the parallel node (None: backpropagation)."""
    found: list[tuple[str, bool, tuple[str, ...] | None]] = []
    for count in stages:
        if count == 1:
            found += [("backpropagation, K=1", False, None), ("backpropagation, augmented, K=1", True, None)]
            continue
        found += [
            (f"auxnet, augmented, K={count}", True, (f"stages={count}", *AUXNET, "beta=10")),
            (f"stored, penalty, K={count}", False, (f"stages={count}", *PENALTY)),
            (f"stored, lagrangian, K={count}", False, (f"stages={count}", *LAGRANGIAN)),
        ]
    found.append(("auxnet of 3 blocks, augmented, K=2", True, ("stages=2", *AUXNET, "beta=1", "auxnet_blocks=3")))
    for rate in RATES if 3 in stages else ():
        found.append((f"stored, penalty, K=3, rate={rate}", False, ("stages=3", *PENALTY, f"lambda_rate={rate}")))
    others = (beta for beta in BETAS if beta != 10)
    return found + [(f"auxnet, augmented, K=2, beta={b}", True, ("stages=2", *AUXNET, f"beta={b}")) for b in others]


def accuracy(
    options: argparse.Namespace, seed: int, row: str, augment: bool, settings: tuple[str, ...] | None
) -> dict[str, Any]:
    """Train, and return the test accuracy in percent (None: it diverged), the last violations and the seconds."""
    found: dict[str, Any] = {"row": row, "seed": seed}
    ticks, data = DATA[options.data]
    ticks = options.ticks or ticks
    own = [f"{PARALLEL}=null"] if settings is None else [_override(each) for each in settings]
    overrides = [
        *data,
        *([] if options.root is None else [f"data.root={options.root}"]),
        f"data.augment={augment}",
        f"runner.max_ticks={ticks}",
        f"problems.classifier.scheduler.T_max={ticks}",
        f"seed={seed}",
        *own,
    ]
    config = mlotool.compose("layerparallel_penalty", [*overrides, "logger=csv"])
    built, start = build(config), time.process_time()
    problem, schedule = built.program.problems["classifier"], Schedule(built.program)
    try:
        for _ in range(ticks):
            schedule.tick()
    except MlotoolError as error:
        return found | {"accuracy": None, "error": str(error).split(";")[0]}
    seconds = time.process_time() - start
    share = Evaluator(problem.module, built.data, ["accuracy"], 500).evaluate("test")["test/accuracy"]
    statistics = {} if problem.parallel is None else dict(problem.parallel.statistics())
    return found | {"accuracy": round(100 * share, 2), "statistics": statistics, "cpu_s": round(seconds, 1)}


def _override(setting: str) -> str:
    # The recipe has the first four of these; the others are new keys.
    known = ("stages=", "variables=", "method=", "beta=")
    return f"{'' if setting.startswith(known) else '+'}{PARALLEL}.{setting}"


def table(runs: list[dict[str, Any]]) -> str:
    """Return the accuracies in Markdown, one row a setting, the seeds beside each other."""
    lines = ["| | test accuracy, % |", "|---|---|"]
    for row in dict.fromkeys(run["row"] for run in runs):
        found = [run["accuracy"] for run in runs if run["row"] == row]
        lines.append(f"| {row} | {', '.join('diverged' if each is None else f'{each:.1f}' for each in found)} |")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", help="folder that holds MNIST/, or train/ and test/ of CIFAR-10")
    parser.add_argument("--data", choices=tuple(DATA), default="digits")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--stages", type=int, nargs="+", default=list(STAGES))
    parser.add_argument("--rows", nargs="+", help="of the table, by name; all where it is left out")
    parser.add_argument("--ticks", type=int)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
