"""The loop of a run: a round is an epoch of Lightning's Trainer, a chunk of ticks its batch.

train_dataloader      the chunks of the next round
training_step         a chunk: ticks until a flush, the flush; the evaluations that are due at its end
  take_ticks          (seat.py) ticks, one after the other
on_train_epoch_end    the round's objective: schedulers, early stopping, checkpoints
on_train_end          what came after the last flush
"""

import math
import warnings
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mlotool.core.errors import ConfigError
from mlotool.distributed.collectives import Ranks
from mlotool.problem.shards import gathered
from mlotool.program import Problem, Program, Schedule
from mlotool.runner.checkpoint import STATE_KEY, LastCheckpoint, check_writable
from mlotool.runner.distributed import agree_on_buffers, check_agreement, merge_shards
from mlotool.runner.evaluation import Evaluator
from mlotool.runner.finiteness import check_parameters, explain
from mlotool.runner.logging import MetricLog
from mlotool.runner.plan import ChunkLoader, Objective, TickPlan, Watch
from mlotool.runner.progress import ProgressDisplay, advance_clock
from mlotool.runner.random_state import random_states, restore_random_states, with_own_snapshots, with_own_steps
from mlotool.runner.records import PathWatch
from mlotool.runner.seat import AbstractSeat
from mlotool.runner.values import LearnedValues, Window, hyperparameters

INHERITED = "inherited/"
"""Begins the keys of what a run that inherits weights has before its first tick."""


def check_scheduler(problem: Problem, objective: Objective) -> None:
    """Raise ConfigError if a scheduler waits for an objective that it is never given."""
    interval = problem.settings.scheduler_interval
    is_given = interval == "evaluation" and objective.monitor is not None
    if isinstance(problem.scheduler, ReduceLROnPlateau) and not is_given:
        raise ConfigError(
            f"problems.{problem.name}.scheduler: found ReduceLROnPlateau with scheduler_interval={interval} and "
            f"objective={objective.key}; expected an objective that is evaluated during training. Set "
            f"problems.{problem.name}.scheduler_interval=evaluation, and give evaluate.splits a number of ticks for "
            "the objective's split."
        )


class ProgramModule(LightningModule):
    """What Lightning's Trainer trains: the program, by its own schedule.

    Args:
        program: the problems and their graph.
        schedule: steps them.
        plan: where chunks and rounds end.
        metric_log: takes the numbers.
        objective: what is monitored.
        seat: takes the ticks.
        ranks: those of the run, of which each has such a module.
        evaluator: evaluates the splits of the plan; None where there are none.
        display: shows progress.
        watch: sees the objective at each evaluation, and may end the run.
        last_checkpoint: written within a round too, when it is time.

    Attributes:
        is_pruned: whether the watch has ended the run.
        is_cut: whether the round was ended by an interrupt before its last evaluation.
        training_s: seconds of training before this process began.
    """

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        plan: TickPlan,
        metric_log: MetricLog,
        objective: Objective,
        seat: AbstractSeat,
        ranks: Ranks,
        *,
        evaluator: Evaluator | None,
        display: ProgressDisplay,
        watch: Watch | None,
        last_checkpoint: LastCheckpoint | None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.program, self.schedule, self.plan = program, schedule, plan
        self.metric_log, self.objective = metric_log, objective
        self.evaluator, self.display, self.watch = evaluator, display, watch
        self.ranks, self.interrupt = ranks, seat.interrupt
        self.window = Window(
            schedule.num_ticks, ranks.mean, lambda problem, stepped: explain(problem, program.problems, stepped)
        )
        self.is_pruned = self.is_cut = False
        self.training_s = 0.0
        self._seat, self._last_checkpoint = seat, last_checkpoint
        self._learned = LearnedValues(program)
        self._path_watch = PathWatch(program.problems, plan.max_ticks, ranks.mean)
        self._began = seat.clock()
        self._random_states: list[dict[str, Any]] | None = None
        self._has_warned_of_nan = False
        # The initial parameters are the user's own.
        self._checked_tick = 0
        # Whether the evaluations of this tick are still to come.
        self._is_pending = plan.begins_with_evaluation
        for name, problem in program.problems.items():
            # Callbacks and summaries find the modules here.
            setattr(self, f"problem_{name}", problem.module)

    def configure_optimizers(self) -> Any:
        """Return the problems' optimizers and schedulers: not for Lightning to step, but to save and to watch."""
        return [
            {"optimizer": problem.optimizer}
            if problem.scheduler is None
            else {
                "optimizer": problem.optimizer,
                "lr_scheduler": {"scheduler": problem.scheduler, "name": f"{name}/lr"},
            }
            for name, problem in self.program.problems.items()
        ]

    def on_train_start(self) -> None:
        """Begin at the (resumed) schedule's tick; random states come last, as all before may have drawn."""
        self.interrupt.listen()
        self._began = self._seat.clock()
        self.display.start(self.schedule.num_ticks)
        if self._random_states is not None:
            restore_random_states(self._random_states, self.program, self.ranks)
            self._random_states = None

    def train_dataloader(self) -> ChunkLoader:
        """Return the chunks of the next round."""
        return ChunkLoader(self.plan, self.schedule, is_pending=self._is_pending)

    def training_step(self, chunk: tuple[int, int], batch_idx: int) -> None:
        """Run the ticks of a chunk, flush and evaluate where the plan says so."""
        try:
            self._run_chunk(chunk[1])
        except KeyboardInterrupt:
            # In the middle of a tick: its state is none to go on from, and the last checkpoint stays as it is.
            self.is_cut = True
            self.interrupt.insist()
            self._set_clock()
        if self.interrupt.requested:
            self.trainer.should_stop = True

    def _run_chunk(self, end: int) -> None:
        # Several ranks look at the clock where they flush, together.
        last = self._last_checkpoint if self.ranks.size == 1 else None
        while self.schedule.num_ticks < end:
            count = self.plan.flush_end(self.schedule.num_ticks, end) - self.schedule.num_ticks
            due_at = math.inf if last is None else last.due_at
            self._seat.take_ticks(self.schedule, count, self.window.append, due_at)
            self._set_clock()
            if self.plan.is_flush(self.schedule.num_ticks):
                self.flush()
            if self.schedule.num_ticks < end and self._write_if_due():
                return
        self._is_pending = True
        if self.interrupt.requested and self._write_if_due():
            return
        for split in self.plan.inherited_splits if end == 0 else ():
            self._evaluate(split, INHERITED)
        for split in self.plan.due_splits(end):
            self._evaluate(split)
        self._is_pending = False
        if self.plan.round_end(end - 1) != end:
            self._write_if_due()

    def flush(self) -> None:
        """Log what has been collected since the last flush."""
        values = self.window.flush()
        if not values:
            return
        self._path_watch.look(self.schedule.num_ticks)
        for problem in self.program.problems.values():
            values |= hyperparameters(problem, self.program)
        values |= self.program.statistics()
        for key, value in self._learned.read().items():
            # A metric of the user's own of the same name stays.
            values.setdefault(key, value)
        self.metric_log.log(self.schedule.num_ticks, values)
        self.display.update(self.schedule.num_ticks, self.metric_log.last)

    def _evaluate(self, split: str, prefix: str = "") -> None:
        # A NaN must not reach the schedulers and the best checkpoint.
        self._check_finite()
        for callback in self._callbacks:
            callback.on_validation_start(self.trainer, self)
        # Here and at a round's end, not with a checkpoint: whether one is written must not change a bit.
        agree_on_buffers(self.program, self.ranks)
        evaluator = self.evaluator
        assert evaluator is not None
        model = evaluator.model()
        metrics = self.ranks.of_first(lambda: evaluator.evaluate(split, model))
        values = {f"{prefix}{key}": value for key, value in metrics.items()}
        self.metric_log.log(self.schedule.num_ticks, values)
        self.display.note(self.schedule.num_ticks, values)
        # What `self.log` leads to; its own bookkeeping costs half a millisecond.
        self.trainer.callback_metrics.update({key: torch.tensor(value) for key, value in values.items()})
        for callback in self._callbacks:
            callback.on_validation_end(self.trainer, self)

    @property
    def _callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return callbacks

    def on_train_epoch_end(self) -> None:
        """End a round: hand the objective to the callbacks, which save and stop after this."""
        # Every checkpoint is written after this, that of the last tick and of Ctrl-C as well.
        self._check_finite()
        if self.is_cut:
            self.flush()
            return
        agree_on_buffers(self.program, self.ranks)
        self.objective.check_logged(self.metric_log.last)
        value = None if self.objective.monitor is None else self.metric_log.last[self.objective.monitor]
        for problem in self.program.problems.values():
            self._step_scheduler(problem, value)
        if self.objective.monitor is not None and value is not None:
            self._judge(self.objective.monitor, value)
        if self.is_pruned or self.schedule.num_ticks >= self.plan.max_ticks:
            self.trainer.should_stop = True

    def _step_scheduler(self, problem: Problem, objective: float | None) -> None:
        """Advance a scheduler whose interval is the evaluation."""
        if problem.scheduler is None or problem.settings.scheduler_interval != "evaluation":
            return
        if not isinstance(problem.scheduler, ReduceLROnPlateau):
            problem.optimizer_step.step_scheduler()
        elif objective is not None:
            problem.optimizer_step.step_scheduler(objective)

    def _judge(self, key: str, value: float) -> None:
        """Show the objective to Lightning's callbacks and to the watch, which may end the run."""
        self.trainer.callback_metrics[key] = torch.tensor(value)
        tick = self.schedule.num_ticks
        if math.isnan(value) and not self._has_warned_of_nan:
            self._has_warned_of_nan = True
            warnings.warn(
                f"objective: '{key}' is nan at tick {tick}; expected a number, without which no checkpoint is the best "
                "one. Look at what the metric divides by, or choose another objective.",
                stacklevel=2,
            )
        wants_end = self.ranks.of_first(lambda: self.watch is not None and self.watch(tick, value))
        self.is_pruned = wants_end and tick < self.plan.max_ticks

    def on_train_end(self) -> None:
        """Log what came after the last flush (early stopping), and leave the last picture."""
        self.flush()
        if self.schedule.num_ticks >= self.plan.max_ticks:
            self._path_watch.end()
        merge_shards(self.program, self.ranks)
        self.display.update(self.schedule.num_ticks, self.metric_log.last, is_last=True)
        self.display.stop()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add everything that a bit-identical resume needs, in plain containers."""
        self._check_finite()
        schedule = self.schedule.state_dict()
        checkpoint[STATE_KEY] = {
            "program": self.program.state_dict(),
            "schedule": schedule,
            # A checkpoint at the start of a resumed run comes before the states are put back.
            "random_states": self._random_states or random_states(self.program, self.ranks, schedule["snapshots"]),
            "tick": self.schedule.num_ticks,
            "is_pending": self._is_pending,
            "window": self.window.state_dict(),
            "metrics": dict(self.metric_log.last),
            "metrics_position": self.metric_log.position() if self.ranks.is_first else 0,
            "training_s": self.training_s + self._seat.clock() - self._began,
        }
        self._gather_shards(checkpoint)
        check_writable(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take it back."""
        state = checkpoint[STATE_KEY]
        self.program.load_state_dict(with_own_steps(state["program"], state["random_states"], self.ranks))
        self.schedule.load_state_dict(with_own_snapshots(state["schedule"], state["random_states"], self.ranks))
        self.window.load_state_dict(state["window"], state["tick"])
        self.window.stepped.update(name for name, problem in self.program.problems.items() if problem.num_steps > 0)
        self.metric_log.last.update(state["metrics"])
        self.training_s = state["training_s"]
        self._random_states = state["random_states"]
        # What cannot be put back says so here, and not in the first tick.
        restore_random_states(state["random_states"], self.program, self.ranks)
        self._is_pending = state["is_pending"]

    @property
    def is_done(self) -> bool:
        """Whether no tick and no evaluation of one is left."""
        return self.schedule.num_ticks >= self.plan.max_ticks and not self._is_pending

    def _gather_shards(self, checkpoint: dict[str, Any]) -> None:
        """Put whole tensors in the place of shards, in our part of a checkpoint and in Lightning's."""
        state, is_first = checkpoint[STATE_KEY], self.ranks.is_first
        for number, (name, problem) in enumerate(self.program.problems.items()):
            if problem.shards is None:
                continue
            whole = state["program"][name] = gathered(state["program"][name], is_kept=is_first)
            snapshots = state["schedule"]["snapshots"]
            if name in snapshots:
                snapshots[name] = gathered(snapshots[name], is_kept=is_first)
            checkpoint["state_dict"] |= {f"problem_{name}.{key}": value for key, value in whole["module"].items()}
            if "optimizer_states" in checkpoint:
                checkpoint["optimizer_states"][number] = whole["optimizer"]

    def _write_if_due(self) -> bool:
        """Write the last checkpoint if it is time, or the run has been told to stop; return whether it has."""
        last, self.is_cut = self._last_checkpoint, self.interrupt.requested
        if last is not None and (last.is_due() or self.is_cut):
            last.write(self.trainer)
        return self.is_cut

    def _set_clock(self) -> None:
        advance_clock(self.trainer, self.schedule.num_ticks - self.trainer.global_step)

    def _check_finite(self) -> None:
        if self._checked_tick == self.schedule.num_ticks:
            return
        self.program.sync()
        # The losses first: they know the tick.
        self.window.check()
        check_parameters(self.program, self.schedule.num_ticks)
        check_agreement(self.program, self.ranks, self.schedule.num_ticks)
        self._checked_tick = self.schedule.num_ticks
