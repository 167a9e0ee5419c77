"""Test accuracy of layer-parallel training, tick by tick, beside backpropagation and two data-parallel ranks.

    python -m benchmarks.layerparallel.accuracy
    python -m benchmarks.layerparallel.accuracy PATH_TO_THE_FOLDER_OF_MNIST --data mnist --seeds 0 1 2
    python -m benchmarks.layerparallel.accuracy PATH_TO_THE_FOLDER_OF_MNIST --data mlp --stages 2 --seeds 0 1 2
    python -m benchmarks.layerparallel.accuracy PATH_TO_THE_FOLDERS_OF_CIFAR10 --data cifar10 --seeds 0 1 2
    python -m benchmarks.layerparallel.accuracy PATH --data mnist --kinds long
    python -m benchmarks.layerparallel.accuracy PATH --data mnist --check
    python -m benchmarks.layerparallel.accuracy PATH --data mnist --try stages=3 variables=stored beta=1

The shape of tables 4, 7 and 8 of Sun et al. 2021 (arXiv 2112.05387), far smaller: the network and the rates of the
recipe layerparallel_penalty, a ResNet-14, on digits, at half that width on 1,500 images of MNIST, and on CIFAR-10 of
16 x 16; `mlp` is a wide perceptron on MNIST. What diverges is written down as such. The result file is written after
each run, and a second call adds to it: a run is left out that stands there with the same settings and code, and one
with others is replaced. Settings are chosen by `--try`, on the validation split, whose runs are written down too.
"""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness import record
from benchmarks.harness.team import Team
from benchmarks.layerparallel.accuracy_file import AccuracyFile, made_with
from benchmarks.layerparallel.accuracy_rows import DATA, STAGES, Row, further_rows, long_rows, main_rows
from benchmarks.layerparallel.accuracy_table import table
from benchmarks.layerparallel.training import Run, train
from mlotool.distributed.collectives import Ranks

KINDS = ("main", "long", "further")
CHECKED_TICKS = 50
LIMIT = 7200.0
"""Seconds that a run over ranks may take."""


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    file, rows = AccuracyFile(options.data), list(_rows(options))
    if options.check:
        for row in rows:
            print(f"{row.name}: {'equal' if evaluation_changes_nothing(row, options) else 'DIFFERENT'}", flush=True)
    elif options.settings:
        given = None if options.settings == ["null"] else tuple(options.settings)
        run = Run(Row("", given, options.augment), options.data, 0, options.root, options.ticks, split="val")
        found = measured(run)
        file.put_try({**found, "split": run.split, "augmented": options.augment})
        print(f"validation accuracy {found['accuracy']} ({found['wall_s']:.0f} s)")
    else:
        for seed, row in itertools.product(options.seeds, rows):
            run = Run(row, options.data, seed, options.root, options.ticks)
            if not file.has(run, is_code_compared=not options.keep):
                measure(file, run)
        print(table(file.runs))


def measure(file: AccuracyFile, run: Run) -> None:
    """Train as a row says, and write it down."""
    found = measured(run)
    data = DATA[run.data]
    file.put(found, [row.name for row in (*main_rows(data), *long_rows(data), *further_rows())])
    print(f"{found['row']}, seed {run.seed}: {found['accuracy']} ({found['wall_s']:.0f} s)", flush=True)


def measured(run: Run) -> dict[str, Any]:
    """Train as a row says, on its ranks, and return what the result file says of it."""
    surroundings = record.surroundings()
    return {**_trained(run)[0], **made_with(run), **{key: surroundings[key] for key in ("commit", "date")}}


def evaluation_changes_nothing(row: Row, options: argparse.Namespace) -> bool:
    """Say whether the parameters after some ticks are the same, bit by bit, with evaluations and without."""
    run = Run(replace(row, length=1), options.data, options.seeds[0], options.root, CHECKED_TICKS, num_points=10)
    return torch.equal(_trained(run)[1], _trained(replace(run, num_points=0))[1])


def _trained(run: Run) -> tuple[dict[str, Any], torch.Tensor]:
    if run.row.num_ranks == 1:
        return train(Ranks(), run)
    with Team(run.row.num_ranks, limit=LIMIT) as team:
        first: tuple[dict[str, Any], torch.Tensor] = team(train, run)[0]
        return first


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    data = DATA[options.data]
    rows = {
        "main": main_rows(data, options.stages),
        "long": long_rows(data, options.stages),
        "further": further_rows(),
    }
    for row in itertools.chain.from_iterable(rows[kind] for kind in options.kinds):
        if options.rows is None or row.name in options.rows:
            yield row


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", help="folder that holds MNIST/, or train/ and test/ of CIFAR-10")
    parser.add_argument("--data", choices=tuple(DATA), default="digits")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--stages", type=int, nargs="+", default=list(STAGES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["main"], help="of rows")
    parser.add_argument("--rows", nargs="+", help="of the table, by name; all where it is left out")
    parser.add_argument("--ticks", type=int)
    parser.add_argument("--keep", action="store_true", help="runs of the same settings, whatever the code")
    parser.add_argument("--check", action="store_true", help="that evaluations change no parameter, and nothing else")
    parser.add_argument(
        "--try", nargs="+", dest="settings", help="settings of Auxiliary (null: backpropagation), on val"
    )
    parser.add_argument("--augment", action="store_true", help="with --try")
    return parser.parse_args()


if __name__ == "__main__":
    main()
