"""One training run, with its accuracy every so many ticks."""

import time
from dataclasses import dataclass
from typing import Any

import torch

import mlotool
from benchmarks.layerparallel.accuracy_rows import DATA, Row
from mlotool import Schedule
from mlotool.config import build
from mlotool.core.errors import MlotoolError
from mlotool.distributed.collectives import Ranks
from mlotool.runner.distributed import agree_on_buffers, distribute
from mlotool.runner.evaluation import Evaluator

BATCH_SIZE = 500
"""Of an evaluation."""


@dataclass(frozen=True)
class Run:
    """What is trained, and how often it is evaluated.

    Args:
        row: how it is trained.
        data: a name of DATA.
        seed: of the splits, the parameters and the order of the samples.
        root: folder of the images; None: the data need none.
        ticks: in place of the data's own.
        split: on which accuracy is measured.
        num_points: of the curve, in place of the data's own.
    """

    row: Row
    data: str
    seed: int
    root: str | None = None
    ticks: int | None = None
    split: str = "test"
    num_points: int | None = None

    @property
    def num_ticks(self) -> int:
        """Ticks of the run."""
        return (self.ticks or DATA[self.data].ticks) * self.row.length

    @property
    def points(self) -> set[int]:
        """Ticks after which accuracy is measured, the last one among them."""
        count = DATA[self.data].num_points if self.num_points is None else self.num_points
        return {self.num_ticks * number // count for number in range(1, count + 1)}


def train(ranks: Ranks, run: Run) -> tuple[dict[str, Any], torch.Tensor]:
    """Train, and return what a result file says of it, and the parameters as one vector.

    The accuracy is in percent, None where the run has diverged; the curve has it by tick.

    Args:
        ranks: all that divide the batches, one of them this process.
        run: the same on all ranks.
    """
    seconds, wall = time.process_time(), time.monotonic()
    curve: dict[str, float] = {}
    config = mlotool.compose("layerparallel_penalty", run.row.config(DATA[run.data], run.num_ticks, run.seed, run.root))
    built = build(config, ranks.reduce)
    distribute(built.program, ranks, run.seed)
    problem, schedule = built.program.problems["classifier"], Schedule(built.program)
    evaluator = Evaluator(problem.module, built.data, ["accuracy"], BATCH_SIZE)
    found: dict[str, Any] = {"row": run.row.name, "seed": run.seed, "ticks": run.num_ticks}
    try:
        points = run.points
        for tick in range(1, run.num_ticks + 1):
            schedule.tick()
            if tick in points:
                # Running statistics alone: they take no part in training.
                agree_on_buffers(built.program, ranks)
                if ranks.is_first:
                    share = evaluator.evaluate(run.split)[f"{run.split}/accuracy"]
                    curve[str(tick)] = round(100 * share, 2)
        found["accuracy"] = next(reversed(curve.values()), None)
    except MlotoolError as error:
        found |= {"accuracy": None, "error": str(error).split(";")[0]}
    found |= {"curve": curve, "statistics": {} if problem.parallel is None else dict(problem.parallel.statistics())}
    found |= {"cpu_s": round(time.process_time() - seconds, 1), "wall_s": round(time.monotonic() - wall, 1)}
    parameters = torch.cat([each.detach().reshape(-1) for each in problem.module.parameters()])
    return found, parameters.clone()
