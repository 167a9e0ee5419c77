"""One run of a built program, from top to bottom. A round is an epoch of Lightning's Trainer, a chunk of ticks a batch.

Session.run               metrics.csv, loggers, a checkpoint's state; summary.json, however the run ends
  _fit                    Lightning's loop
    train_dataloader        the chunks of the next round
    training_step           a chunk: ticks until a flush, the flush
      take_ticks              (of the seat) ticks, one after the other
    on_train_batch_end      the evaluations that are due at its end, once the callbacks have seen the chunk
    on_train_epoch_end      the round's objective: schedulers, early stopping, checkpoints
    on_train_end            what came after the last flush
  _finish                 `end` splits and analyses, with the best checkpoint
"""

import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint
from pytorch_lightning.plugins.environments import LightningEnvironment
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mlotool.config.schema import TrainerConfig
from mlotool.config.user_data import split_of
from mlotool.core import errors
from mlotool.core.user_code import user_code
from mlotool.distributed.collectives import Ranks
from mlotool.folders.run_folder import RunFolder
from mlotool.problem.shards import gathered
from mlotool.problem.task_share import gathered_tasks, own_tasks
from mlotool.program import Problem, Schedule, StepResult
from mlotool.runner import checkpoint as checkpoints
from mlotool.runner import distributed, evaluation
from mlotool.runner.changes import Changes
from mlotool.runner.evaluation import Objective, Watch
from mlotool.runner.intervals import ChunkLoader, make_plan
from mlotool.runner.logging import MetricLog, ProgressDisplay, open_loggers
from mlotool.runner.outputs import OutputLog
from mlotool.runner.process_settings import Interrupt
from mlotool.runner.records import num_parameters, trained_paths, warn_of_untrained, write_paths
from mlotool.runner.values import Window, check_parameters, explain, hyperparameters, learned_values

# Begins the keys of what a run that inherits weights has before its first tick.
INHERITED = "inherited/"

Keep = Callable[[Mapping[str, StepResult]], None]


class AbstractSeat(ABC):
    """The place of a run in its process: who takes its ticks.

    Attributes:
        interrupt: set from outside to stop after the tick at hand.
        shared: what runs of the process share that are built from equal configs; None where there is one run.
        is_alone: whether the run has the process for itself.
    """

    interrupt: Interrupt
    shared: Any = None
    is_alone: bool = False

    @abstractmethod
    def clock(self) -> float:
        """Return the seconds that this run has taken, with its share of what is done for all."""

    @abstractmethod
    def join(self, schedule: Schedule) -> None:
        """Say how far the run is, once its state is put back; one with no tick left takes its place all the same."""

    def member(self) -> Callback | None:
        """Return what makes the run a member of a population; None where it is none."""
        return None

    @abstractmethod
    def take_ticks(self, schedule: Schedule, count: int, keep: Keep, due_at: float) -> None:
        """Take ticks of the run.

        Args:
            schedule: the run's.
            count: how many; fewer where the run is interrupted or its checkpoint is due.
            keep: takes the results of each tick.
            due_at: by `time.monotonic`, when the run's checkpoint is due.
        """


class OwnProcess(AbstractSeat):
    """The place of a run that has its process for itself.

    Args:
        ranks: those of the run, which all stop after the same tick.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.is_alone = True
        self.interrupt = Interrupt(ranks)

    def clock(self) -> float:
        """Return the seconds of the clock on the wall."""
        return time.perf_counter()

    def join(self, schedule: Schedule) -> None:
        """There is nobody to join."""

    def take_ticks(self, schedule: Schedule, count: int, keep: Keep, due_at: float) -> None:
        """Take them one after the other. The hot path: nothing is read from the device, logged or written here."""
        for _ in range(count):
            keep(schedule.tick())
            if self.interrupt.seen() or time.monotonic() >= due_at:
                return


class Session(LightningModule):
    """One run of a built program: what Lightning's Trainer trains, by the program's own schedule.

    Args:
        config: the config it was built from.
        built: `program`, `data`, `analyses`, `callbacks`, `loggers`.
        device: where it computes.
        seat: its place in its process.
        ranks: those of the run, of which this is one.
        watch: sees the objective at each evaluation, and may end the run as pruned.

    Attributes:
        program: the problems and their graph; `problem_<name>` is the module of a problem.
        schedule: steps them; counts the ticks.
        metric_log: takes the numbers.
        is_cut: whether the round was ended by an interrupt before its last evaluation.

    Raises:
        ConfigError: the config cannot run; nothing has been written.
    """

    metric_log: MetricLog

    def __init__(
        self, config: Any, built: Any, device: torch.device, seat: AbstractSeat, ranks: Ranks, watch: Watch | None
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        program = self.program = built.program
        self._config, self._built, self._run_device = config, built, device
        self._seat, self.ranks, self.interrupt, self._watch = seat, ranks, seat.interrupt, watch
        program.to(device)
        self.schedule = Schedule(program, with_norms=True)
        self.evaluator = evaluation.make_evaluator(config, built, device)
        self.objective = Objective.from_config(config)
        self.plan = make_plan(config, self.objective)
        self._changes = Changes(program, config.runner.get("changes"))
        self._trainer_settings = vars(TrainerConfig(**(config.runner.get("trainer") or {})))
        self._splits: dict[str, Any] = {} if config.evaluate is None else dict(config.evaluate.splits)
        named = {f"analyses.{name}.split": analysis.split for name, analysis in built.analyses.items()}
        for key, split in [*(("evaluate.splits", split) for split in self._splits), *named.items()]:
            split_of(key, built.data, split)
        for problem in program.problems.values():
            _check_scheduler(problem, self.objective)
        distributed.distribute(program, ranks, config.seed)
        for name, problem in program.problems.items():
            # Callbacks and summaries find the modules here.
            setattr(self, f"problem_{name}", problem.module)
        self.outputs = OutputLog(program, ranks)
        self.window = Window(reduce=ranks.mean, explain=partial(explain, program.problems))
        is_shown = config.runner.progress_bar and ranks.is_first and seat.is_alone
        self._display = ProgressDisplay(program.problems, self.plan.max_ticks, enabled=is_shown)
        self.is_pruned = self.is_cut = False
        self._last_checkpoint: checkpoints.LastCheckpoint | None = None
        self._seconds_before, self._began = 0.0, seat.clock()
        self._random_states: list[dict[str, Any]] | None = None
        self._has_warned_of_nan = False
        # The initial parameters are the user's own.
        self._checked_tick = 0
        # Whether the evaluations of this tick are still to come.
        self._is_pending = self.plan.begins_with_evaluation
        objective = {"key": self.objective.key, "value": None, "mode": self.objective.mode}
        self._summary: dict[str, Any] = {"status": "failed", "objective": objective, "metrics": {}, "best": None}
        self._summary |= {
            "ticks": {},
            "error": None,
            "num_ticks": 0,
            "training_s": 0.0,
            "num_parameters": num_parameters(program),
        }

    def rehearse(self) -> None:
        """Try every loss, metric and analysis on a few samples; to be called before the first tick of a run.

        Raises:
            ConfigError: one cannot work.
        """
        analyse = partial(evaluation.rehearse_analyses, self._built, self._run_device)
        evaluation.rehearse(self.program, self.evaluator, self._splits, self.objective, analyse)

    def run(self, folder: RunFolder, resume_from: Path | None = None) -> dict[str, Any]:
        """Train, evaluate and analyze; write summary.json however it ends, and return what it says.

        Args:
            folder: takes the files.
            resume_from: a checkpoint of the same folder to go on from.
        """
        summary, is_first = self._summary, self.ranks.is_first
        checkpoint = None if resume_from is None else checkpoints.read_whole_checkpoint(resume_from)
        state = {} if checkpoint is None else checkpoint[checkpoints.STATE_KEY]
        file = folder.open_metrics(state.get("metrics_position")) if is_first else None
        self.metric_log = MetricLog(folder.path, file, lambda: self.schedule.num_ticks)
        # The loggers are finished last: W&B may wait for its service, and summary.json must not.
        with ExitStack() as loggers:
            try:
                with user_code(prefix=lambda: f"After tick {self.schedule.num_ticks}: "):
                    if is_first:
                        problems, others = self.program.problems, self._built.loggers
                        opened = open_loggers(self._config, folder, problems, state.get("tick"), others)
                        self.metric_log.loggers += loggers.enter_context(opened)
                    trainer, has_ended = self._prepared(folder, checkpoint, resume_from)
                    if has_ended:
                        if is_first and resume_from is not None and self._last_checkpoint is not None:
                            self._last_checkpoint.take(resume_from)
                        self.flush()
                        distributed.merge_shards(self.program, self.ranks)
                        summary["training_s"] = self._seconds_before
                    else:
                        self._fit(trainer, folder)
                    self._finish(folder)
                summary["status"] = "finished"
            except errors.PrunedError:
                summary["status"] = "pruned"
            except KeyboardInterrupt:
                summary["status"] = "interrupted"
                raise
            except BaseException as exception:
                text = str(exception)
                is_told = isinstance(exception, errors.MlotoolError)
                summary["error"] = text if is_told else f"{type(exception).__name__}: {text}"
                raise
            finally:
                # Where the disk is full, the summary cannot be written either: the first error is what is told.
                for end in (self.metric_log.close, partial(self._summarize, folder)):
                    is_lost = summary["status"] == "failed"
                    with suppress(errors.WriteError, errors.CheckpointError) if is_lost else nullcontext():
                        end()
        return summary

    def _summarize(self, folder: RunFolder) -> None:
        if not self.ranks.is_first:
            return
        summary, key, last = self._summary, self.objective.key, self.metric_log.last
        summary |= {"metrics": last, "ticks": self.metric_log.ticks, "num_ticks": self.schedule.num_ticks}
        summary |= {"findings": self.outputs.findings(), "baseline": self._config.get("baseline")}
        if summary["best"] is None and folder.checkpoint("best").is_file():
            self._note_best(checkpoints.read_checkpoint(folder.checkpoint("best")))
        best = {} if summary["best"] is None else summary["best"]["metrics"]
        summary["objective"]["value"] = None if key is None else best.get(key, last.get(key))
        self.outputs.write(folder)
        folder.write_summary(summary)

    def _note_best(self, state: Mapping[str, Any]) -> int:
        self._summary["best"] = {"tick": state["tick"], "metrics": state["metrics"]}
        tick: int = state["tick"]
        return tick

    def _prepared(
        self, folder: RunFolder, checkpoint: dict[str, Any] | None, resume_from: Path | None
    ) -> tuple[Trainer, bool]:
        """Return the trainer, as a checkpoint has left it, and whether training had ended.

        Not by Lightning's `ckpt_path`, whose loops count epochs and batches: what a round has left to do follows from
        the tick alone, in the middle of a round too.
        """
        callbacks = self._make_callbacks(folder, is_resumed=checkpoint is not None)
        self._last_checkpoint = next((one for one in callbacks if isinstance(one, checkpoints.LastCheckpoint)), None)
        trainer = self._make_trainer(folder, callbacks)
        if checkpoint is None or resume_from is None:
            return trainer, False
        with checkpoints.fitting(resume_from):
            self.on_load_checkpoint(checkpoint)
            has_stopped = checkpoints.restore_callbacks(callbacks, checkpoint)
        advance_clock(trainer, self.schedule.num_ticks)
        set_epoch(trainer, self.plan.num_rounds(self.schedule.num_ticks, is_pending=self._is_pending))
        self._seat.join(self.schedule)
        is_done = self.schedule.num_ticks >= self.plan.max_ticks and not self._is_pending
        return trainer, has_stopped or is_done

    def _make_trainer(self, folder: RunFolder, callbacks: list[Callback]) -> Trainer:
        """Return Lightning's Trainer, which runs the loop.

        What it cannot do is ours: several problems a tick, evaluations between ticks of a round, a resume within it,
        ranks inside of hypergradients.
        """
        is_gpu = self._run_device.type == "cuda"
        return Trainer(
            accelerator="gpu" if is_gpu else "cpu",
            # Ranks are ours: each has a trainer of one device, which knows of no other.
            devices=[self._run_device.index] if is_gpu else 1,
            # A cluster's own variables would start more processes than one.
            plugins=[LightningEnvironment(), checkpoints.AtomicCheckpointIO(self.ranks.is_first, folder.checkpoints)],
            # Autocast is opened around each loss; the rest, solvers first, stays in full precision.
            precision="32-true",
            max_epochs=-1,
            # The evaluator evaluates, and `_evaluate` tells callbacks of it.
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=self.metric_log,
            callbacks=callbacks,
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
            use_distributed_sampler=False,
            default_root_dir=folder.path,
            enable_progress_bar=False,
            **self._trainer_settings,
        )

    def _make_callbacks(self, folder: RunFolder, *, is_resumed: bool) -> list[Callback]:
        runner, monitor, mode = self._config.runner, self.objective.monitor, self.objective.mode
        callbacks: list[Callback] = [*self._built.callbacks]
        for callback in (callback for callback in callbacks if isinstance(callback, ModelCheckpoint)):
            # Not in checkpoints/ itself, whose newest file a resume takes; and set before the callback's state is read.
            callback.dirpath = callback.dirpath or str(folder.path.absolute() / RunFolder.OF_CALLBACKS)
        if runner.checkpoint and monitor is not None and mode is not None:
            callbacks.append(checkpoints.BestCheckpoint(folder.checkpoint("best"), monitor, mode))
        if member := self._seat.member():
            callbacks.append(member)
        if runner.checkpoint:
            # The last one comes after the best one, whose state it holds.
            times = runner.checkpoint_seconds, runner.keep_checkpoints
            callbacks.append(
                checkpoints.LastCheckpoint(folder.checkpoint("last"), *times, is_resumed=is_resumed, ranks=self.ranks)
            )
        if runner.early_stopping_patience is not None and monitor is not None and mode is not None:
            # NaN is not better, and ends nothing.
            stopping: dict[str, Any] = {"strict": False, "check_finite": False, "check_on_train_epoch_end": True}
            callbacks.append(EarlyStopping(monitor, mode=mode, patience=runner.early_stopping_patience, **stopping))
        return callbacks

    def _fit(self, trainer: Trainer, folder: RunFolder) -> None:
        """Train until the last tick, an early stop or a signal; the last raises Interrupted, a KeyboardInterrupt."""
        self._began = self._seat.clock()
        try:
            # Runs that share a process end in any order: it listens for them.
            with self.interrupt.listening() if self._seat.is_alone else nullcontext():
                trainer.fit(self)
        except SystemExit as exit_:
            # Lightning's answer to a Ctrl-C outside of a tick.
            if not isinstance(exit_.__context__, KeyboardInterrupt):
                raise
            self.interrupt.insist()
        except (errors.NonFiniteLossError, errors.NonFiniteParametersError) as error:
            # Found by all ranks; the others do not know how far rank 0 is with writing.
            if self.ranks.is_first:
                error.add(_what_is_kept(folder))
            raise
        finally:
            self._summary["training_s"] = self._training_seconds()
            self._display.stop()
        # A cluster may have told one rank alone: all end with the code of its signal.
        [code] = self.ranks.largest([self.interrupt.exit_code])
        if code:
            raise errors.Interrupted(int(code))
        if self.is_pruned:
            raise errors.PrunedError(f"pruned after tick {self.schedule.num_ticks}")

    def _training_seconds(self) -> float:
        return self._seconds_before + self._seat.clock() - self._began

    def configure_optimizers(self) -> Any:
        """Return the problems' optimizers and schedulers: not for Lightning to step, but to save and to watch."""
        chosen: list[dict[str, Any]] = []
        for name, problem in self.program.problems.items():
            chosen.append({"optimizer": problem.optimizer})
            if problem.scheduler is not None:
                chosen[-1]["lr_scheduler"] = {"scheduler": problem.scheduler, "name": f"{name}/lr"}
        return chosen

    def on_train_start(self) -> None:
        """Begin at the (resumed) schedule's tick; random states come last, as all before may have drawn."""
        self.interrupt.listen()
        self._display.start(self.schedule.num_ticks)
        if self._random_states is not None:
            checkpoints.restore_random_states(self._random_states, self.program, self.ranks)
            self._random_states = None

    def train_dataloader(self) -> ChunkLoader:
        """Return the chunks of the next round."""
        return ChunkLoader(self.plan, self.schedule, is_pending=lambda: self._is_pending)

    def training_step(self, chunk: tuple[int, int], batch_idx: int) -> dict[str, float]:
        """Run the ticks of a chunk, flush where the plan says so; return the last logged values, for callbacks."""
        try:
            self._run_chunk(chunk[1])
        except KeyboardInterrupt:
            # In the middle of a tick: its state is none to go on from, and the last checkpoint stays as it is.
            self.is_cut = True
            self.interrupt.insist()
            self._set_clock()
        return dict(self.metric_log.last)

    def _run_chunk(self, end: int) -> None:
        # Several ranks look at the clock where they flush, together.
        last = self._last_checkpoint if self.ranks.size == 1 else None
        while self.schedule.num_ticks < end:
            begin = self.schedule.num_ticks
            self._changes.apply(begin)
            count = self._changes.until(begin, self.plan.flush_end(begin, end)) - begin
            due_at = math.inf if last is None else last.due_at
            self._seat.take_ticks(self.schedule, count, self.window.append, due_at)
            self._set_clock()
            if self.plan.is_flush(self.schedule.num_ticks):
                self.flush()
            if self.schedule.num_ticks < end and self._write_if_due():
                return
        self._is_pending = True
        if self.interrupt.requested:
            self._write_if_due()

    def on_train_batch_end(self, outputs: Any, batch: tuple[int, int], batch_idx: int) -> None:
        """Evaluate what is due at the end of a chunk, which callbacks have seen by now."""
        if self._is_pending and not self.is_cut:
            end = batch[1]
            for split in self.plan.inherited_splits if end == 0 else ():
                self._evaluate(split, INHERITED)
            for split in self.plan.due_splits(end):
                self._evaluate(split)
            self._is_pending = False
            if self.plan.round_end(end - 1) != end:
                self._write_if_due()
        if self.interrupt.requested:
            self.trainer.should_stop = True

    def flush(self) -> None:
        """Log what has been collected since the last flush."""
        values = self.window.flush()
        if not values:
            return
        for problem in self.program.problems.values():
            values |= hyperparameters(problem, self.program)
        values |= self._statistics()
        # A metric of the user's own of the same name stays.
        learned = {**learned_values(self.program), **self.outputs.look(self.schedule.num_ticks)}
        values |= {key: value for key, value in learned.items() if key not in values}
        self.metric_log.log(self.schedule.num_ticks, values)
        self._display.update(self.schedule.num_ticks, self.metric_log.last)

    def _statistics(self) -> dict[str, float]:
        """Return the program's statistics; of tasks that ranks divide, the worst over all."""
        values, problems = self.program.statistics(), self.program.problems
        # Largest residuals and counts of products, and the smallest cosines.
        signs = {key: -1.0 if key.endswith("cosine") else 1.0 for key in values}
        divided = [key for key in values if problems[key.partition("/")[0]].task_share is not None]
        worst = self.ranks.largest([signs[key] * values[key] for key in divided]) if divided else []
        return values | {key: signs[key] * value for key, value in zip(divided, worst, strict=True)}

    def _evaluate(self, split: str, prefix: str = "") -> None:
        # A NaN must not reach the schedulers and the best checkpoint.
        self._check_finite()
        self._tell("on_validation_start", "on_validation_epoch_start")
        # Here and at a round's end, not with a checkpoint: whether one is written must not change a bit.
        distributed.agree_on_buffers(self.program, self.ranks)
        evaluator = self.evaluator
        assert evaluator is not None
        model = evaluator.model()
        metrics = self.ranks.of_first(lambda: evaluator.evaluate(split, model))
        values = {f"{prefix}{key}": value for key, value in metrics.items()}
        self.metric_log.log(self.schedule.num_ticks, values)
        self._display.note(self.schedule.num_ticks, values)
        # What `self.log` leads to; its own bookkeeping costs half a millisecond.
        self.trainer.callback_metrics.update({key: torch.tensor(value) for key, value in values.items()})
        self._tell("on_validation_epoch_end", "on_validation_end")

    def _tell(self, *hooks: str) -> None:
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        for hook in hooks:
            for callback in callbacks:
                getattr(callback, hook)(self.trainer, self)

    def on_train_epoch_end(self) -> None:
        """End a round: hand the objective to the callbacks, which save and stop after this."""
        # Every checkpoint is written after this, that of the last tick and of Ctrl-C as well.
        self._check_finite()
        if self.is_cut:
            self.flush()
            return
        distributed.agree_on_buffers(self.program, self.ranks)
        monitor, tick = self.objective.monitor, self.schedule.num_ticks
        if tick != self.plan.round_end(max(tick - 1, 0)):
            # A callback, a Timer say, has ended the run before the objective was evaluated.
            return
        if monitor is not None:
            self.objective.check_logged(self.metric_log.last)
        value = None if monitor is None else self.metric_log.last[monitor]
        for problem in self.program.problems.values():
            if problem.scheduler is not None and problem.settings.scheduler_interval == "evaluation":
                is_plateau = isinstance(problem.scheduler, ReduceLROnPlateau)
                problem.optimizer_step.step_scheduler(*([value] if is_plateau else []))
        if monitor is not None and value is not None:
            self.trainer.callback_metrics[monitor] = torch.tensor(value)
            if math.isnan(value) and not self._has_warned_of_nan:
                self._has_warned_of_nan = True
                warnings.warn(
                    f"objective: '{monitor}' is nan at tick {tick}, so that no checkpoint can be the best. Check the "
                    "metric.",
                    stacklevel=2,
                )
            wants_end = self.ranks.of_first(lambda: self._watch is not None and self._watch(tick, value))
            self.is_pruned = wants_end and tick < self.plan.max_ticks
        if self.is_pruned or tick >= self.plan.max_ticks:
            self.trainer.should_stop = True

    def on_train_end(self) -> None:
        """Log what came after the last flush (early stopping), and leave the last picture."""
        self.flush()
        if self.schedule.num_ticks >= self.plan.max_ticks:
            warn_of_untrained(self.program, self.ranks)
            self.outputs.warn_at_the_end()
        distributed.merge_shards(self.program, self.ranks)
        self._display.update(self.schedule.num_ticks, self.metric_log.last, is_last=True)
        self._display.stop()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add everything that a bit-identical resume needs, in plain containers."""
        self._check_finite()
        schedule = self.schedule.state_dict()
        checkpoint[checkpoints.STATE_KEY] = {
            "program": self.program.state_dict(),
            "schedule": schedule,
            # A checkpoint at the start of a resumed run comes before the states are put back.
            "random_states": self._random_states
            or checkpoints.random_states(self.program, self.ranks, schedule["snapshots"]),
            "tick": self.schedule.num_ticks,
            "is_pending": self._is_pending,
            "window": self.window.state_dict(),
            "outputs": self.outputs.state_dict(),
            "metrics": dict(self.metric_log.last),
            "metric_ticks": dict(self.metric_log.ticks),
            "metrics_position": self.metric_log.position(),
            "training_s": self._training_seconds(),
        }
        self._gather(checkpoint)
        checkpoints.check_writable(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take it back."""
        state = checkpoint[checkpoints.STATE_KEY]
        states = self._random_states = state["random_states"]
        checkpoints.put_own(state, self.ranks)
        if self._divides_tasks:
            state["program"] = own_tasks(state["program"], self.program.problems)
            state["schedule"]["snapshots"] = own_tasks(state["schedule"]["snapshots"], self.program.problems)
        self.program.load_state_dict(state["program"])
        self.schedule.load_state_dict(state["schedule"])
        self.window.load_state_dict(state["window"], state["tick"])
        # A checkpoint of an older version has none.
        self.outputs.load_state_dict(state.get("outputs", {}))
        self.window.stepped.update(name for name, problem in self.program.problems.items() if problem.num_steps > 0)
        self.metric_log.last.update(state["metrics"])
        # An older version did not keep them.
        self.metric_log.ticks.update(state.get("metric_ticks", {}))
        self._seconds_before, self._is_pending = state["training_s"], state["is_pending"]
        # What cannot be put back says so here, and not in the first tick.
        checkpoints.restore_random_states(states, self.program, self.ranks)

    def take_over(self, other: "Session") -> None:
        """Put the run into the state of another one that has the same program, seed and tick.

        Parameters, optimizers, schedulers, streams, what hypergradients keep and the program's random numbers are
        copied; what was logged and what was best stay its own.
        """
        self.program.load_state_dict(other.program.state_dict())
        self.schedule.load_state_dict(other.schedule.state_dict())
        self.program.random.load_state_dict(other.program.random.state_dict())
        if self._random_states is not None:
            # Of a run that goes on and has not begun yet: they would be put back over those of the other one.
            self._random_states[0]["program"] = other.program.random.state_dict()

    @property
    def _divides_tasks(self) -> bool:
        return any(problem.task_share is not None for problem in self.program.problems.values())

    def _gather(self, checkpoint: dict[str, Any]) -> None:
        """Put whole tensors in the place of a rank's part of them, in our part of a checkpoint and in Lightning's."""
        state, problems, is_first = checkpoint[checkpoints.STATE_KEY], self.program.problems, self.ranks.is_first
        if self._divides_tasks:
            state["program"] = gathered_tasks(state["program"], problems, self.ranks)
            state["schedule"]["snapshots"] = gathered_tasks(state["schedule"]["snapshots"], problems, self.ranks)
        for number, (name, problem) in enumerate(problems.items()):
            if problem.shards is None and problem.task_share is None:
                continue
            whole, snapshots = state["program"][name], state["schedule"]["snapshots"]
            if problem.shards is not None:
                whole = state["program"][name] = gathered(whole, is_kept=is_first)
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
        self.program.internals.sync()
        # The losses first: they know the tick.
        self.window.check()
        check_parameters(self.program, self.schedule.num_ticks)
        distributed.check_agreement(self.program, self.ranks, self.schedule.num_ticks)
        self._checked_tick = self.schedule.num_ticks

    def _finish(self, folder: RunFolder) -> None:
        """Evaluate the `end` splits and run the analyses, with the best checkpoint where there is one; on rank 0."""
        program, problems = self.program, self.program.problems
        timelines = {
            name: problem.parallel.timeline() for name, problem in problems.items() if problem.parallel is not None
        }
        paths = trained_paths(program, self.ranks)
        if not self.ranks.is_first:
            return
        for name, timeline in timelines.items():
            if timeline is not None:
                folder.write_json(f"{folder.ARTIFACTS}/parallel_{name}.json", timeline, indent=None)
        tick, best = self.schedule.num_ticks, folder.checkpoint("best")
        if best.is_file():
            tick = self._note_best(checkpoints.load_program(program, best))
        for problem in problems.values():
            problem.module.to(self._run_device)  # Lightning leaves the modules on the CPU.
        for split, every in self._splits.items():
            if not isinstance(every, int):
                assert self.evaluator is not None
                self.metric_log.log(tick, self.evaluator.evaluate(split))
        write_paths(folder, program, paths)
        evaluation.run_analyses(self._built, folder, self._run_device, partial(self.metric_log.log, tick))


def _what_is_kept(folder: RunFolder) -> str:
    """Return in a sentence what a run that failed can go on from."""
    last = folder.checkpoint("last")
    if not last.is_file():
        return "No checkpoint is kept, as runner.checkpoint=false."
    tick = checkpoints.read_checkpoint(last)["tick"]
    state = f"after tick {tick}" if tick else "the initial one"
    return f"{last} holds the last good state that was saved, {state}."


def advance_clock(trainer: Trainer, num_ticks: int) -> None:
    """Make `trainer.global_step` count ticks.

    With raw optimizers Lightning counts nothing, and ModelCheckpoint, which compares steps, would never save. The
    counter is private API; a test holds the contract.
    """
    trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.increment_by(num_ticks)


def set_epoch(trainer: Trainer, num_rounds: int) -> None:
    """Make `trainer.current_epoch` go on after so many rounds; private API, as above."""
    current: Any = trainer.fit_loop.epoch_progress.current
    current.ready = current.started = current.processed = current.completed = num_rounds


def _check_scheduler(problem: Problem, objective: Objective) -> None:
    """Raise ConfigError if a scheduler waits for an objective that it is never given."""
    interval = problem.settings.scheduler_interval
    is_given = interval == "evaluation" and objective.monitor is not None
    if isinstance(problem.scheduler, ReduceLROnPlateau) and not is_given:
        raise errors.ConfigError(
            f"problems.{problem.name}.scheduler: found ReduceLROnPlateau with scheduler_interval={interval} and "
            f"objective={objective.key}; expected an objective that is evaluated during training. Set "
            "scheduler_interval=evaluation, and give evaluate.splits a number of ticks for the objective's split."
        )
