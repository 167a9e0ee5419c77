"""One run of a built program, from the first tick to summary.json."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import Checkpoint, EarlyStopping
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.environments import LightningEnvironment

from mlotool.config.user_data import split_of
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
    BEST,
    STATE_KEY,
    AtomicCheckpointIO,
    BestCheckpoint,
    LastCheckpoint,
    fitting,
    load_program,
    read_checkpoint,
    read_whole_checkpoint,
    restore_callbacks,
)
from mlotool.runner.distributed import distribute, merge_shards
from mlotool.runner.evaluation import rehearse_analyses, run_analyses
from mlotool.runner.folder import RunFolder
from mlotool.runner.loading import make_evaluator
from mlotool.runner.logging import MetricLog, RunLogger, open_loggers
from mlotool.runner.plan import Objective, Watch, make_plan
from mlotool.runner.process_settings import place, untracked_past
from mlotool.runner.program_module import ProgramModule, check_scheduler
from mlotool.runner.progress import ProgressDisplay, advance_clock
from mlotool.runner.records import num_parameters, trained_paths, write_paths
from mlotool.runner.rehearsal import rehearse
from mlotool.runner.seat import AbstractSeat


@dataclass
class Outcome:
    """How a run ends; filled in while it goes on.

    Args:
        goal: the run's objective.
        num_parameters: of each problem's module.
        status: "finished", "pruned", "failed" or "interrupted".
        error: the error's text.
        metrics: the last value of every key.
        best: tick and metrics of the best checkpoint.
        num_ticks: ticks done.
        training_s: wall-clock seconds of training, with its evaluations and checkpoints.
    """

    goal: Objective
    num_parameters: Mapping[str, int]
    status: str = "failed"
    error: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    num_ticks: int = 0
    training_s: float = 0.0

    @property
    def objective(self) -> float | None:
        """The objective's value at the best checkpoint, else its last one."""
        if self.goal.key is None:
            return None
        best = {} if self.best is None else self.best["metrics"]
        return best.get(self.goal.key, self.metrics.get(self.goal.key))

    def note_best(self, state: Mapping[str, Any]) -> int:
        """Note what the best checkpoint says, once it has been read; return its tick."""
        self.best = {"tick": state["tick"], "metrics": state["metrics"]}
        return state["tick"]

    def summary(self) -> dict[str, Any]:
        """Return the contents of summary.json."""
        return {
            "status": self.status,
            "objective": {"key": self.goal.key, "value": self.objective, "mode": self.goal.mode},
            "metrics": self.metrics,
            "best": self.best,
            "error": self.error,
            "num_ticks": self.num_ticks,
            "training_s": self.training_s,
            "num_parameters": self.num_parameters,
        }

    @contextmanager
    def following(self) -> Iterator[None]:
        """Note how what is inside ends: the run."""
        try:
            yield
        except PrunedError:
            self.status = "pruned"
            return
        except KeyboardInterrupt:
            self.status = "interrupted"
            raise
        except BaseException as exception:
            text = str(exception)
            self.error = text if isinstance(exception, MlotoolError) else f"{type(exception).__name__}: {text}"
            raise
        self.status = "finished"


class Session:
    """One run of a built program.

    Args:
        config: the config it was built from.
        built: `program`, `data`, `analyses`, `callbacks`, `loggers`.
        device: where it computes.
        seat: its place in its process.
        ranks: those of the run, of which this is one.
        watch: sees the objective at each evaluation, and may end the run as pruned.

    Raises:
        ConfigError: the config cannot run; nothing has been written.
    """

    def __init__(
        self, config: Any, built: Any, device: torch.device, seat: AbstractSeat, ranks: Ranks, watch: Watch | None
    ) -> None:
        self._config, self._built, self._device = config, built, device
        self._seat, self._ranks, self._watch = seat, ranks, watch
        place(built.program, device)
        self._schedule = Schedule(built.program, with_norms=True)
        self._evaluator = make_evaluator(config, built, device)
        self._objective, self._num_parameters = Objective.from_config(config), num_parameters(built.program)
        self._plan = make_plan(config, self._objective)
        self._trainer_settings = trainer_settings(config.runner.get("trainer") or {})
        self._splits: dict[str, Any] = {} if config.evaluate is None else dict(config.evaluate.splits)
        for key, split in [
            *(("evaluate.splits", split) for split in self._splits),
            *((f"analyses.{name}.split", analysis.split) for name, analysis in built.analyses.items()),
        ]:
            split_of(key, built.data, split)
        for problem in built.program.problems.values():
            check_scheduler(problem, self._objective)
        distribute(built.program, ranks, config.seed)

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
        state = {} if checkpoint is None else checkpoint[STATE_KEY]
        log = MetricLog(
            folder.metrics if is_first else Path(os.devnull), state.get("metrics_position") if is_first else None
        )
        # The loggers are finished last: W&B may wait for its service, and summary.json must not.
        with ExitStack() as loggers:
            try:
                with outcome.following(), user_code(prefix=lambda: f"After tick {self._schedule.num_ticks}: "):
                    if is_first:
                        log.loggers += loggers.enter_context(self._open_loggers(folder, state.get("tick")))
                    module, trainer, has_ended = self._prepared(folder, log, checkpoint, resume_from)
                    if not has_ended:
                        self._fit(module, trainer, folder, outcome)
                    else:
                        outcome.training_s = module.training_s
                        module.flush()
                        merge_shards(self._built.program, self._ranks)
                    self._write_timelines(folder)
                    paths = trained_paths(self._built.program, self._ranks)
                    if is_first:
                        self._finish(folder, log, outcome, paths)
            finally:
                # Where the disk is full, the summary cannot be written either: the first error is what is told.
                for end in (log.close, partial(self._summarize, folder, log, outcome)):
                    with suppress(WriteError, CheckpointError) if outcome.status == "failed" else nullcontext():
                        end()
        return outcome

    def _summarize(self, folder: RunFolder, log: MetricLog, outcome: Outcome) -> None:
        if self._ranks.is_first:
            outcome.metrics, outcome.num_ticks = log.last, self._schedule.num_ticks
            if outcome.best is None and folder.checkpoint("best").is_file():
                outcome.note_best(read_checkpoint(folder.checkpoint("best")))
            folder.write_summary(outcome.summary())

    def _open_loggers(self, folder: RunFolder, resumed_at: int | None) -> Any:
        return open_loggers(
            self._config,
            folder,
            self._built.program.problems,
            resumed_at,
            others=self._built.loggers,
            with_packages=self._seat.is_first,
        )

    def _prepared(
        self, folder: RunFolder, log: MetricLog, checkpoint: dict[str, Any] | None, resume_from: Path | None
    ) -> tuple[ProgramModule, Trainer, bool]:
        """Return what is trained and its trainer, as a checkpoint has left them; and whether training had ended.

        Not by Lightning's `ckpt_path`, whose loops count epochs and batches: what a round has left to do follows from
        the tick alone, in the middle of a round too.
        """
        program, ranks, seat = self._built.program, self._ranks, self._seat
        is_shown = self._config.runner.progress_bar and ranks.is_first and seat.is_alone
        callbacks = self._callbacks(folder, is_resumed=checkpoint is not None)
        module = ProgramModule(
            program,
            self._schedule,
            self._plan,
            log,
            self._objective,
            seat,
            ranks,
            evaluator=self._evaluator,
            display=ProgressDisplay(program.problems, self._plan.max_ticks, enabled=is_shown),
            watch=self._watch,
            last_checkpoint=next((each for each in callbacks if isinstance(each, LastCheckpoint)), None),
        )
        trainer = self._trainer(folder, callbacks, RunLogger(log, lambda: self._schedule.num_ticks, folder.path))
        if checkpoint is None or resume_from is None:
            return module, trainer, False
        with fitting(resume_from):
            module.on_load_checkpoint(checkpoint)
            has_stopped = restore_callbacks(callbacks, checkpoint)
        advance_clock(trainer, self._schedule.num_ticks)
        seat.join(self._schedule)
        return module, trainer, has_stopped or module.is_done

    def _fit(self, module: ProgramModule, trainer: Trainer, folder: RunFolder, outcome: Outcome) -> None:
        """Train until the last tick, an early stop or a signal; the last raises Interrupted, a KeyboardInterrupt."""
        seat, interrupt, began = self._seat, self._seat.interrupt, self._seat.clock()
        try:
            with ExitStack() as alone:
                # Runs that share a process end in any order: it listens for them.
                if seat.is_alone:
                    alone.enter_context(interrupt.listening())
                    alone.enter_context(untracked_past())
                trainer.fit(module)
        except SystemExit as exit_:
            # Lightning's answer to a Ctrl-C outside of a tick.
            if not isinstance(exit_.__context__, KeyboardInterrupt):
                raise
            interrupt.insist()
        except (NonFiniteLossError, NonFiniteParametersError) as error:
            # Found by all ranks; the others do not know how far rank 0 is with writing.
            if self._ranks.is_first:
                error.add(folder.what_is_kept())
            raise
        finally:
            outcome.training_s = module.training_s + seat.clock() - began
            module.display.stop()
        # A cluster may have told one rank alone: all end with the code of its signal.
        [code] = self._ranks.largest([interrupt.exit_code])
        if code:
            raise Interrupted(int(code))
        if module.is_pruned:
            raise PrunedError(f"pruned after tick {self._schedule.num_ticks}")

    def _trainer(self, folder: RunFolder, callbacks: list[Callback], logger: Logger) -> Trainer:
        """Return Lightning's Trainer, which runs the loop: a chunk of ticks is its batch, a round its epoch.

        What it cannot do is ours: several problems a tick, evaluations between ticks of a round, a resume within it,
        ranks inside of hypergradients.
        """
        return Trainer(
            accelerator="gpu" if self._device.type == "cuda" else "cpu",
            # Ranks are ours: each has a trainer of one device, which knows of no other.
            devices=[self._device.index] if self._device.type == "cuda" else 1,
            # A cluster's own variables would start more processes than one.
            plugins=[LightningEnvironment(), AtomicCheckpointIO(self._ranks.is_first)],
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
            **self._trainer_settings,
        )

    def _callbacks(self, folder: RunFolder, *, is_resumed: bool) -> list[Callback]:
        runner, monitor, mode = self._config.runner, self._objective.monitor, self._objective.mode
        callbacks: list[Callback] = [*self._built.callbacks]
        if runner.checkpoint:
            if monitor is not None and mode is not None:
                callbacks.append(BestCheckpoint(folder.checkpoints / BEST, monitor, mode))
            # The last one comes after the best one, whose state it holds.
            callbacks.append(
                LastCheckpoint(
                    folder.checkpoints,
                    runner.checkpoint_seconds,
                    runner.keep_checkpoints,
                    is_resumed=is_resumed,
                    ranks=self._ranks,
                )
            )
        if runner.early_stopping_patience is not None and monitor is not None and mode is not None:
            # NaN is not better, and ends nothing.
            stopping: dict[str, Any] = {"strict": False, "check_finite": False, "check_on_train_epoch_end": True}
            callbacks.append(EarlyStopping(monitor, mode=mode, patience=runner.early_stopping_patience, **stopping))
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


def trainer_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of Lightning's Trainer that a user may set.

    Args:
        settings: `runner.trainer`.

    Raises:
        ConfigError: it has another argument.
    """
    for key in settings:
        if key not in OPEN_TRAINER_SETTINGS:
            raise ConfigError(
                f"runner.trainer.{key}: found an argument of the Trainer that other keys decide; expected one of "
                f"{', '.join(OPEN_TRAINER_SETTINGS)}.{did_you_mean(key, OPEN_TRAINER_SETTINGS)} Write "
                "runner.max_ticks, runner.devices, runner.precision, runner.callbacks, logger or "
                "problems.<name>.gradient_clip_norm."
            )
    return {**TRAINER_SETTINGS, **settings}
