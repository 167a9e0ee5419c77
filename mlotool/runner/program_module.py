"""The LightningModule that drives the schedule."""

import math
import time
import warnings
from typing import Any

import torch
from pytorch_lightning import LightningModule

from mlotool.core.arguments import require
from mlotool.distributed.collectives import Ranks
from mlotool.problem.shards import gathered
from mlotool.program import Program, Schedule
from mlotool.runner.blame import Traces, explain
from mlotool.runner.checkpoint import STATE_KEY, LastCheckpoint
from mlotool.runner.checkpoint_file import check_writable
from mlotool.runner.distributed import AgreedInterrupt, agree_on_buffers, check_agreement, merge_shards
from mlotool.runner.evaluation import Evaluator
from mlotool.runner.finiteness import check_parameters
from mlotool.runner.learned import LearnedValues
from mlotool.runner.logging import MetricLog
from mlotool.runner.objective import Objective, Watch
from mlotool.runner.path_watch import PathWatch
from mlotool.runner.plan import ChunkLoader, TickPlan
from mlotool.runner.problem_module import ProblemModule, check_scheduler
from mlotool.runner.process_settings import Interrupt
from mlotool.runner.progress import ProgressDisplay, advance_clock
from mlotool.runner.random_state import (
    check_random_states,
    random_states,
    restore_random_states,
    with_own_snapshots,
    with_own_steps,
)
from mlotool.runner.seat import AbstractSeat
from mlotool.runner.window import Window

INHERITED = "inherited/"
"""Begins the keys of what a run that inherits weights has before its first tick."""


class ProgramModule(LightningModule):
    """The root: its training step is a chunk of ticks, its epoch a round that ends with the objective's evaluation.

    Args:
        program: the problems and their graph.
        schedule: steps them.
        plan: where chunks and rounds end.
        metric_log: takes the numbers.
        objective: what is monitored.
        evaluator: evaluates the splits of the plan; None where there are none.
        display: shows progress.
        interrupt: set from outside to stop after the tick at hand.
        watch: sees the objective at each evaluation, and may end the run.
        last_checkpoint: written within a round too, when it is time.
        ranks: those of the run, of which each has such a module.
        seat: takes the ticks of a run that shares its process with others.

    Attributes:
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
        *,
        evaluator: Evaluator | None = None,
        display: ProgressDisplay | None = None,
        interrupt: Interrupt | AgreedInterrupt | None = None,
        watch: Watch | None = None,
        last_checkpoint: LastCheckpoint | None = None,
        ranks: Ranks | None = None,
        seat: AbstractSeat | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.program = program
        self.schedule = schedule
        self.plan = plan
        self.metric_log = metric_log
        self.objective = objective
        self._has_warned_of_nan = False
        self.evaluator = evaluator
        self.display = display or ProgressDisplay(program.problems, plan.max_ticks, enabled=False)
        self.interrupt = interrupt or Interrupt()
        self.watch = watch
        self.is_pruned = False
        self.ranks = ranks or Ranks()
        self.window = Window(schedule.num_ticks, self.ranks.mean, self._explain)
        self.is_cut = False
        self.training_s = 0.0
        self._last_checkpoint = last_checkpoint
        self._seat = seat
        self._learned = LearnedValues(program)
        self._path_watch = PathWatch(program.problems, plan.max_ticks, self.ranks.mean)
        self._clock = time.perf_counter if seat is None else seat.clock
        self._began = self._clock()
        self._random_states: list[dict[str, Any]] | None = None
        # The initial parameters are the user's own.
        self._checked_tick = 0
        # Whether the evaluations of this tick are still to come.
        self._is_pending = plan.begins_with_evaluation
        for name, problem in program.problems.items():
            # Direct attributes: children in a ModuleDict get no trainer.
            setattr(self, f"problem_{name}", ProblemModule(problem))
            check_scheduler(problem, objective)

    @property
    def problem_modules(self) -> list[ProblemModule]:
        """The problems' modules, in their order."""
        return [getattr(self, f"problem_{name}") for name in self.program.problems]

    def train_dataloader(self) -> ChunkLoader:
        """Return the chunks of the next round."""
        return ChunkLoader(self.plan, self.schedule, is_pending=self._is_pending)

    def configure_optimizers(self) -> Any:
        """Return the problems' optimizers and schedulers: not for Lightning to step, but to save and to watch."""
        return [module.optimizer_config() for module in self.problem_modules]

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

    def on_train_start(self) -> None:
        """Begin the window at the (resumed) schedule's tick; random states come last."""
        if self._random_states is None:
            self.window.restart(self.schedule.num_ticks)
        self.interrupt.listen()
        self._began = self._clock()
        self.display.start(self.schedule.num_ticks)
        if self._random_states is not None:
            restore_random_states(self._random_states, self.program, self.ranks)
            self._random_states = None

    def on_train_epoch_end(self) -> None:
        """End a round: hand the objective to the callbacks, which save and stop after this."""
        # Every checkpoint is written after this, that of the last tick and of Ctrl-C as well.
        self._check_finite()
        if self.is_cut:
            self._flush()
            return
        agree_on_buffers(self.program, self.ranks)
        values = self.metric_log.last
        self.objective.check_logged(values)
        value = None if self.objective.monitor is None else values[self.objective.monitor]
        for module in self.problem_modules:
            module.step_scheduler(value)
        if self.objective.monitor is not None and value is not None:
            # What `self.log` leads to; its own bookkeeping costs half a millisecond.
            self.trainer.callback_metrics[self.objective.monitor] = torch.tensor(value)
            tick, objective = self.schedule.num_ticks, value
            if math.isnan(value) and not self._has_warned_of_nan:
                self._has_warned_of_nan = True
                warnings.warn(
                    f"objective: '{self.objective.key}' is nan at tick {tick}; expected a number, without which no "
                    "checkpoint is the best one. Look at what the metric divides by, or choose another objective.",
                    stacklevel=2,
                )
            wants_end = self.ranks.of_first(lambda: self.watch is not None and self.watch(tick, objective))
            self.is_pruned = wants_end and self.schedule.num_ticks < self.plan.max_ticks
        if self.is_pruned or self.schedule.num_ticks >= self.plan.max_ticks:
            self.trainer.should_stop = True

    def on_train_end(self) -> None:
        """Log what came after the last flush (early stopping), and leave the last picture."""
        self._flush()
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
            "training_s": self.training_s + self._clock() - self._began,
        }
        self._gather_shards(checkpoint)
        check_writable(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take it back."""
        state = checkpoint[STATE_KEY]
        check_random_states(state["random_states"])
        ticks = state["schedule"].get("num_ticks")
        require(ticks == state["tick"], "schedule.num_ticks", ticks, f"the tick of the checkpoint, {state['tick']}")
        self.program.load_state_dict(with_own_steps(state["program"], state["random_states"], self.ranks))
        self.schedule.load_state_dict(with_own_snapshots(state["schedule"], state["random_states"], self.ranks))
        self.window.load_state_dict(state["window"], state["tick"])
        self.metric_log.last.update(state["metrics"])
        self.training_s = state["training_s"]
        self._random_states = state["random_states"]
        self._is_pending = state["is_pending"]

    @property
    def is_done(self) -> bool:
        """Whether no tick and no evaluation of one is left."""
        return self.schedule.num_ticks >= self.plan.max_ticks and not self._is_pending

    def flush(self) -> None:
        """Log what has been collected since the last flush."""
        self._flush()

    def _run_ticks(self, end: int) -> None:
        # The hot path: nothing is read from the device, logged or written here.
        tick, keep, interrupt, now = self.schedule.tick, self.window.append, self.interrupt, time.monotonic
        # Several ranks look at the clock where they flush, together.
        last = self._last_checkpoint if self.ranks.size == 1 else None
        due_at = float("inf") if last is None else last.due_at
        if self._seat is not None:
            self._seat.take_ticks(self.schedule, end - self.schedule.num_ticks, keep, due_at)
            return
        interrupt.is_in_tick = True
        for _ in range(end - self.schedule.num_ticks):
            keep(tick())
            if interrupt.seen() or now() >= due_at:
                break
        interrupt.is_in_tick = False

    def _run_chunk(self, end: int) -> None:
        while self.schedule.num_ticks < end:
            self._run_ticks(self.plan.flush_end(self.schedule.num_ticks, end))
            self._set_clock()
            if self.plan.is_flush(self.schedule.num_ticks):
                self._flush()
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
            modules = {f"problem_{name}.module.{key}": value for key, value in whole["module"].items()}
            checkpoint["state_dict"].update(modules)
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

    def _flush(self) -> None:
        values = self.window.flush()
        if not values:
            return
        self._path_watch.look(self.schedule.num_ticks)
        for module in self.problem_modules:
            values.update(module.values(self.program))
        values.update(self.program.statistics())
        # A metric of the user's own of the same name stays.
        learned = self._learned.read()
        values.update((key, learned[key]) for key in learned if key not in values)
        self.metric_log.log(self.schedule.num_ticks, values)
        self.display.update(self.schedule.num_ticks, self.metric_log.last)

    def _check_finite(self) -> None:
        if self._checked_tick == self.schedule.num_ticks:
            return
        self.program.sync()
        # The losses first: they know the tick.
        self.window.check()
        check_parameters(self.program, self.schedule.num_ticks)
        check_agreement(self.program, self.ranks, self.schedule.num_ticks)
        self._checked_tick = self.schedule.num_ticks

    def _explain(self, problem: str, traces: Traces) -> str:
        return explain(problem, self.program.problems, traces)

    def _evaluate(self, split: str, prefix: str = "") -> None:
        # A NaN must not reach the schedulers and the best checkpoint.
        self._check_finite()
        # Here and at a round's end, not with a checkpoint: whether one is written must not change a bit.
        agree_on_buffers(self.program, self.ranks)
        evaluator = self.evaluator
        assert evaluator is not None
        model = evaluator.model()
        found = self.ranks.of_first(lambda: evaluator.evaluate(split, model))
        values = {f"{prefix}{key}": value for key, value in found.items()}
        self.metric_log.log(self.schedule.num_ticks, values)
        self.display.note(self.schedule.num_ticks, values)
