"""One run of a built program, from the first tick to summary.json."""

import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.environments import LightningEnvironment

from mlotool.core.errors import (
    CheckpointError,
    ConfigError,
    Interrupted,
    MlotoolError,
    NonFiniteLossError,
    NonFiniteParametersError,
    PrunedError,
    WriteError,
)
from mlotool.core.files import write_text
from mlotool.core.messages import did_you_mean
from mlotool.core.user_code import user_code
from mlotool.distributed.collectives import Ranks
from mlotool.program import Schedule
from mlotool.runner.checkpoint import (
    STATE_KEY,
    AtomicCheckpointIO,
    LastCheckpoint,
    checkpoint_callbacks,
    early_stopping,
    fitting,
    going_on,
    load_program,
    read_checkpoint,
    read_whole_checkpoint,
    restore_callbacks,
)
from mlotool.runner.distributed import AgreedInterrupt, ReadOnlyCheckpointIO, distribute, merge_shards
from mlotool.runner.evaluation import find_split, rehearse_analyses, run_analyses
from mlotool.runner.folder import RunFolder
from mlotool.runner.loading import make_evaluator
from mlotool.runner.logging import MetricLog, RunLogger, open_loggers
from mlotool.runner.plan import Objective, Watch, make_plan
from mlotool.runner.process_settings import Interrupt, alone_in_process, place
from mlotool.runner.program_module import ProgramModule
from mlotool.runner.progress import ProgressDisplay, advance_clock
from mlotool.runner.random_state import restore_random_states
from mlotool.runner.records import num_parameters, trained_paths, write_paths
from mlotool.runner.rehearsal import rehearse
from mlotool.runner.seat import AbstractSeat


class Outcome:
    """Filled in while a run goes on.

    Args:
        objective: the run's objective.
        num_parameters: of each problem's module.

    Attributes:
        status: "finished", "pruned", "failed" or "interrupted".
        error: the error's text.
        is_disk_at_fault: whether the error is that the disk did not take a file.
        metrics: the last value of every key.
        best: tick and metrics of the best checkpoint.
        num_ticks: ticks done.
        training_s: wall-clock seconds of training, with its evaluations and checkpoints.
    """

    def __init__(self, objective: Objective, num_parameters: Mapping[str, int]) -> None:
        self._objective, self._num_parameters = objective, dict(num_parameters)
        self.status = "failed"
        self.error: str | None = None
        self.is_disk_at_fault = False
        self.metrics: dict[str, float] = {}
        self.best: dict[str, Any] | None = None
        self.num_ticks = 0
        self.training_s = 0.0

    def fail(self, exception: BaseException) -> None:
        """Note an error."""
        self.status, self.is_disk_at_fault = "failed", isinstance(exception, WriteError)
        text = str(exception)
        self.error = text if isinstance(exception, MlotoolError) else f"{type(exception).__name__}: {text}"

    def note_best(self, state: Mapping[str, Any]) -> int:
        """Note what the best checkpoint says, once it has been read; return its tick."""
        self.best = {"tick": state["tick"], "metrics": state["metrics"]}
        return state["tick"]

    def complete(self, metrics: Mapping[str, float], num_ticks: int, best_checkpoint: Path) -> None:
        """Note what the run has reached."""
        self.metrics = dict(metrics)
        self.num_ticks = num_ticks
        if self.best is None and best_checkpoint.is_file():
            self.note_best(read_checkpoint(best_checkpoint))

    @property
    def objective(self) -> float | None:
        """The objective's value at the best checkpoint, else its last one."""
        if self._objective.key is None:
            return None
        best = {} if self.best is None else self.best["metrics"]
        return best.get(self._objective.key, self.metrics.get(self._objective.key))

    def summary(self) -> dict[str, Any]:
        """Return the contents of summary.json."""
        key, mode = self._objective.key, self._objective.mode
        return {
            "status": self.status,
            "objective": {"key": key, "value": self.objective, "mode": mode},
            "metrics": self.metrics,
            "best": self.best,
            "error": self.error,
            "num_ticks": self.num_ticks,
            "training_s": self.training_s,
            "num_parameters": self._num_parameters,
        }


class Session:
    """One run of a built program.

    Args:
        config: the config it was built from.
        built: `program`, `data`, `analyses`.
        device: where it computes.
        watch: sees the objective at each evaluation, and may end the run as pruned.
        ranks: those of the run, of which this is one; None is a single one.
        seat: of a run that shares its process with others; None has it for itself.

    Raises:
        ConfigError: the config cannot run; nothing has been written.
    """

    def __init__(
        self,
        config: Any,
        built: Any,
        device: torch.device,
        watch: Watch | None = None,
        ranks: Ranks | None = None,
        seat: AbstractSeat | None = None,
    ) -> None:
        self._watch = watch
        self._seat = seat
        self._config = config
        self._built = built
        self._device = device
        self._ranks = ranks or Ranks()
        place(built.program, device)
        self._schedule = Schedule(built.program, with_norms=True)
        self._evaluator = make_evaluator(config, built, device)
        self._objective, self._num_parameters = Objective.from_config(config), num_parameters(built.program)
        self._plan = make_plan(config, self._objective)
        self._splits: dict[str, Any] = {} if config.evaluate is None else dict(config.evaluate.splits)
        for split in (*self._splits, *(each.split for each in built.analyses.values())):
            find_split(built.data, split)
        distribute(built.program, self._ranks, config.seed)

    def rehearse(self) -> None:
        """Try every loss, metric and analysis on a few samples; to be called before the first tick of a run.

        Raises:
            ConfigError: one cannot work.
        """
        analyse = partial(rehearse_analyses, self._built, self._device)
        rehearse(self._built.program, self._evaluator, self._splits, self._objective, analyse)

    def run(self, folder: RunFolder, resume_from: Path | None = None) -> Outcome:
        """Train, evaluate and analyse; write summary.json however it ends.

        Args:
            folder: takes the files.
            resume_from: a checkpoint of the same folder to go on from.
        """
        outcome, is_first = Outcome(self._objective, self._num_parameters), self._ranks.is_first
        checkpoint = None if resume_from is None else read_whole_checkpoint(resume_from)
        state = None if checkpoint is None else checkpoint[STATE_KEY]
        position = None if state is None or not is_first else state["metrics_position"]
        log = MetricLog(folder.metrics if is_first else Path(os.devnull), position)
        tick = None if state is None else state["tick"]
        # The loggers are finished last: W&B may wait for its service, and summary.json must not.
        with ExitStack() as stack:
            try:
                with _outcome_of_errors(outcome), user_code(prefix=self._tick):
                    loggers = stack.enter_context(self._open_loggers(folder, tick)) if is_first else []
                    log.send_to(loggers)
                    self._fit(folder, log, outcome, checkpoint, resume_from)
                    self._write_timelines(folder)
                    paths = trained_paths(self._built.program, self._ranks)
                    if is_first:
                        self._finish(folder, log, outcome, paths)
            finally:
                with _after_failure(outcome):
                    log.close()
                if is_first:
                    with _after_failure(outcome):
                        outcome.complete(log.last, self._schedule.num_ticks, folder.checkpoint("best"))
                        folder.write_summary(outcome.summary())
        return outcome

    def _tick(self) -> str:
        return f"After tick {self._schedule.num_ticks}: "

    def _open_loggers(self, folder: RunFolder, resumed_at: int | None) -> AbstractContextManager[list[Logger]]:
        problems = self._built.program.problems
        with_packages = self._seat is None or self._seat.is_first
        return open_loggers(
            self._config,
            folder.path,
            problems,
            resumed_at,
            folder.sweep,
            others=self._built.loggers,
            with_packages=with_packages,
        )

    def _fit(
        self,
        folder: RunFolder,
        log: MetricLog,
        outcome: Outcome,
        checkpoint: dict[str, Any] | None,
        resume_from: Path | None,
    ) -> None:
        """Train until the last tick, an early stop or a signal; the last raises Interrupted, a KeyboardInterrupt."""
        config, ranks, seat = self._config, self._ranks, self._seat
        interrupt = Interrupt() if seat is None else seat.interrupt
        program = self._built.program
        is_shown = config.runner.progress_bar and ranks.is_first and seat is None
        display = ProgressDisplay(program.problems, self._plan.max_ticks, enabled=is_shown)
        callbacks = self._callbacks(folder, is_resumed=checkpoint is not None)
        module = ProgramModule(
            program,
            self._schedule,
            self._plan,
            log,
            self._objective,
            evaluator=self._evaluator,
            display=display,
            interrupt=interrupt if ranks.size == 1 else AgreedInterrupt(interrupt, ranks),
            watch=self._watch,
            last_checkpoint=next((each for each in callbacks if isinstance(each, LastCheckpoint)), None),
            ranks=ranks,
            seat=seat,
        )
        trainer = self._trainer(folder, callbacks, RunLogger(log, lambda: self._schedule.num_ticks, folder.path))
        had_ended = False
        if checkpoint is not None and resume_from is not None:
            with fitting(resume_from):
                had_ended = _restore(module, trainer, callbacks, checkpoint, ranks)
            if seat is not None:
                seat.join(self._schedule)
        if had_ended:
            outcome.training_s = module.training_s
            module.flush()
            merge_shards(program, ranks)
            return
        clock = time.perf_counter if seat is None else seat.clock
        began = clock()
        try:
            # Runs that share a process end in any order: it listens for them.
            alone = alone_in_process(interrupt) if seat is None else nullcontext()
            with alone, going_on(resume_from, self._schedule):
                trainer.fit(module)
        except SystemExit:
            # Lightning's answer to a signal that came before its handler was ours.
            if not interrupt.requested:
                raise
        except (NonFiniteLossError, NonFiniteParametersError) as error:
            # Found by all ranks; the others do not know how far rank 0 is with writing.
            if ranks.is_first:
                error.add(_what_is_kept(folder))
            raise
        finally:
            outcome.training_s = module.training_s + clock() - began
            display.stop()
        # A cluster may have told one rank alone: all end with the code of its signal.
        [code] = ranks.largest([interrupt.exit_code if interrupt.requested else 0])
        if code:
            raise Interrupted(int(code))
        if module.is_pruned:
            raise PrunedError(f"pruned after tick {self._schedule.num_ticks}")

    def _trainer(self, folder: RunFolder, callbacks: list[Callback], logger: RunLogger) -> Trainer:
        """Return Lightning's Trainer, which runs the loop: a chunk of ticks is its batch, a round its epoch.

        What it cannot do is ours: several problems a tick, evaluations between ticks of a round, a resume within it,
        ranks inside of hypergradients.
        """
        return Trainer(
            accelerator="gpu" if self._device.type == "cuda" else "cpu",
            # Ranks are ours: each has a trainer of one device, which knows of no other.
            devices=[self._device.index] if self._device.type == "cuda" else 1,
            # A cluster's own variables would start more processes than one.
            plugins=[
                LightningEnvironment(),
                AtomicCheckpointIO() if self._ranks.is_first else ReadOnlyCheckpointIO(),
            ],
            # Autocast is opened around each loss; the rest, solvers first, stays in full precision.
            precision="32-true",
            max_epochs=-1,
            # Evaluator evaluates; `ProgramModule` tells callbacks of it.
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=logger,
            callbacks=callbacks,
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
            use_distributed_sampler=False,
            default_root_dir=folder.path,
            **trainer_settings(self._config.runner.get("trainer")),
        )

    def _callbacks(self, folder: RunFolder, *, is_resumed: bool) -> list[Callback]:
        runner, monitor, mode = self._config.runner, self._objective.monitor, self._objective.mode
        callbacks: list[Callback] = [*self._built.callbacks]
        if runner.checkpoint:
            callbacks += checkpoint_callbacks(
                folder.checkpoints,
                monitor,
                mode,
                seconds_between=runner.checkpoint_seconds,
                num_kept=runner.keep_checkpoints,
                is_resumed=is_resumed,
                ranks=self._ranks,
            )
        if runner.early_stopping_patience is not None:
            if monitor is None or mode is None:
                raise ConfigError(
                    f"runner.early_stopping_patience: found {runner.early_stopping_patience} with "
                    f"objective={self._objective.key}; expected an objective that is evaluated during training. "
                    "Set objective=val/accuracy and evaluate.splits.val=100, or early_stopping_patience=null."
                )
            callbacks.append(early_stopping(monitor, mode, runner.early_stopping_patience))
        return callbacks

    def _write_timelines(self, folder: RunFolder) -> None:
        """Write what layer-parallel steps have recorded of their times, as artifacts/parallel_<problem>.json."""
        for name, problem in self._built.program.problems.items():
            timeline = None if problem.parallel is None else problem.parallel.timeline()
            if timeline is not None and self._ranks.is_first:
                write_text(folder.artifacts / f"parallel_{name}.json", json.dumps(timeline))

    def _finish(self, folder: RunFolder, log: MetricLog, outcome: Outcome, paths: Mapping[str, torch.Tensor]) -> None:
        """Evaluate the `end` splits and run the analyses, with the best checkpoint where there is one."""
        program, tick = self._built.program, self._schedule.num_ticks
        if folder.checkpoint("best").is_file():
            tick = outcome.note_best(load_program(program, folder.checkpoint("best")))
        for problem in program.problems.values():
            problem.module.to(self._device)  # Lightning leaves the modules on the CPU.
        for split, every in self._splits.items():
            if not isinstance(every, int):
                assert self._evaluator is not None
                log.log(tick, self._evaluator.evaluate(split))
        write_paths(folder.path, program, paths)
        run_analyses(self._built, folder.artifacts, self._device, partial(log.log, tick))


TRAINER_SETTINGS = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
"""What a Trainer gets where `runner.trainer` says nothing else."""

OPEN_TRAINER_SETTINGS = (*TRAINER_SETTINGS, "profiler", "detect_anomaly")
"""What `runner.trainer` may set; the Trainer's other arguments are keys of the config's own."""


def trainer_settings(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of Lightning's Trainer that a user may set.

    Args:
        given: `runner.trainer`.

    Raises:
        ConfigError: it has another argument.
    """
    given = dict(given or {})
    for key in given:
        if key not in OPEN_TRAINER_SETTINGS:
            raise ConfigError(
                f"runner.trainer.{key}: found an argument of the Trainer that other keys decide; expected one of "
                f"{', '.join(OPEN_TRAINER_SETTINGS)}.{did_you_mean(key, OPEN_TRAINER_SETTINGS)} Write "
                "runner.max_ticks, runner.devices, runner.precision, runner.callbacks, logger or "
                "problems.<name>.gradient_clip_norm."
            )
    return {**TRAINER_SETTINGS, **given}


def _restore(
    module: ProgramModule, trainer: Trainer, callbacks: list[Callback], checkpoint: dict[str, Any], ranks: Ranks
) -> bool:
    """Put everything back as it was; return whether training had ended.

    Not by Lightning's `ckpt_path`, whose loops count epochs and batches: what a round has left to do follows from the
    tick alone, in the middle of a round too.
    """
    module.on_load_checkpoint(checkpoint)
    is_stopped = restore_callbacks(callbacks, checkpoint)
    state = checkpoint[STATE_KEY]
    advance_clock(trainer, state["tick"])
    if not (is_stopped or module.is_done):
        return False
    restore_random_states(state["random_states"], module.program, ranks)
    return True


def _what_is_kept(folder: RunFolder) -> str:
    last = folder.checkpoint("last")
    if not last.is_file():
        return "No checkpoint is kept, for runner.checkpoint=false."
    tick = read_checkpoint(last)["tick"]
    return f"{last} holds the last good state that was saved, " + (
        f"after tick {tick}." if tick else "the initial one."
    )


@contextmanager
def _after_failure(outcome: Outcome) -> Iterator[None]:
    """Leave a run's first error as it is: where the disk is full, its summary cannot be written either."""
    try:
        yield
    except (WriteError, CheckpointError) as error:
        if outcome.status != "failed":
            raise
        if not outcome.is_disk_at_fault:
            warnings.warn(f"{error}", stacklevel=3)


@contextmanager
def _outcome_of_errors(outcome: Outcome) -> Iterator[None]:
    try:
        yield
    except PrunedError:
        outcome.status = "pruned"
        return
    except KeyboardInterrupt:
        outcome.status = "interrupted"
        raise
    except SystemExit as exception:
        # Lightning's answer to a Ctrl-C that reaches it.
        if not isinstance(exception.__context__, KeyboardInterrupt):
            outcome.fail(exception)
            raise
        outcome.status = "interrupted"
        raise KeyboardInterrupt from None
    except BaseException as exception:
        outcome.fail(exception)
        raise
    outcome.status = "finished"
