"""One run of a built program, from the first tick to summary.json."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.environments import LightningEnvironment

from mlotool.core.errors import ConfigError, NonFiniteLossError, NonFiniteParametersError, PrunedError
from mlotool.program import Schedule
from mlotool.runner.analysis import run_analyses
from mlotool.runner.checkpoint import checkpoint_callbacks, early_stopping, load_program, read_checkpoint
from mlotool.runner.device import place
from mlotool.runner.evaluation import find_split
from mlotool.runner.folder import RunFolder
from mlotool.runner.loading import make_evaluator
from mlotool.runner.logging import MetricLog, open_loggers
from mlotool.runner.modules import ProgramModule
from mlotool.runner.objective import Objective, Watch, make_plan
from mlotool.runner.outcome import Outcome
from mlotool.runner.progress import ProgressDisplay
from mlotool.runner.surroundings import Interrupt, graceful_interrupt, untracked_past


class Session:
    """One run of a built program.

    Args:
        config: the config it was built from.
        built: `program`, `data`, `analyses`.
        device: where it computes.
        watch: sees the objective at each evaluation, and may end the run as pruned.

    Raises:
        ConfigError: the config cannot run; nothing has been written.
    """

    def __init__(self, config: Any, built: Any, device: torch.device, watch: Watch | None = None) -> None:
        self._watch = watch
        self._config = config
        self._built = built
        self._device = device
        place(built.program, device)
        self._schedule = Schedule(built.program)
        self._evaluator = make_evaluator(config, built.program.problems, built.data, device)
        self._objective = Objective.from_config(config)
        self._plan = make_plan(config, self._objective)
        self._splits: dict[str, Any] = {} if config.evaluate is None else dict(config.evaluate.splits)
        for split in self._splits:
            find_split(built.data, split)
        for analysis in built.analyses.values():
            find_split(built.data, analysis.split)

    def run(self, folder: RunFolder, resume_from: Path | None = None) -> Outcome:
        """Train, evaluate and analyse; write summary.json however it ends.

        Args:
            folder: takes the files.
            resume_from: a `last.ckpt` to go on from.
        """
        config, outcome = self._config, Outcome(self._objective)
        log = MetricLog(folder.metrics)
        # The loggers are finished last: W&B may wait for its service, and summary.json must not.
        with ExitStack() as stack:
            try:
                with _outcome_of_errors(outcome):
                    loggers = stack.enter_context(open_loggers(config, folder.path, self._built.program.problems))
                    log.send_to(loggers)
                    self._fit(folder, log, loggers, outcome, resume_from)
                    self._finish(folder, log)
            finally:
                log.close()
                outcome.complete(log.last, self._schedule.num_ticks, folder.checkpoint("best"))
                folder.write_summary(outcome.summary())
        return outcome

    def _fit(
        self, folder: RunFolder, log: MetricLog, loggers: list[Logger], outcome: Outcome, resume_from: Path | None
    ) -> None:
        """Train until the last tick, an early stop or Ctrl-C; the last raises KeyboardInterrupt."""
        config, interrupt = self._config, Interrupt()
        program = self._built.program
        display = ProgressDisplay(program.problems, self._plan.max_ticks, enabled=config.runner.progress_bar)
        module = ProgramModule(
            program,
            self._schedule,
            self._plan,
            log,
            self._objective,
            evaluator=self._evaluator,
            display=display,
            interrupt=interrupt,
            watch=self._watch,
        )
        trainer = self._trainer(folder, loggers)
        began = time.perf_counter()
        try:
            with graceful_interrupt(interrupt), untracked_past():
                resume: dict[str, Any] = {} if resume_from is None else {"ckpt_path": resume_from, "weights_only": True}
                trainer.fit(module, **resume)
        except (NonFiniteLossError, NonFiniteParametersError) as error:
            error.add(_what_is_kept(folder))
            raise
        finally:
            outcome.training_s = time.perf_counter() - began
            display.stop()
        if interrupt.requested:
            raise KeyboardInterrupt
        if module.is_pruned:
            raise PrunedError(f"pruned after tick {self._schedule.num_ticks}")

    def _trainer(self, folder: RunFolder, loggers: list[Logger]) -> Trainer:
        runner = self._config.runner
        return Trainer(
            accelerator="gpu" if self._device.type == "cuda" else "cpu",
            devices=1,
            # A cluster's own variables would start more processes than one.
            plugins=[LightningEnvironment()],
            # Autocast is opened around each loss; the rest, solvers first, stays in full precision.
            precision="32-true",
            max_epochs=-1,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=loggers,
            callbacks=self._callbacks(folder),
            enable_checkpointing=bool(runner.checkpoint),
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=folder.path,
        )

    def _callbacks(self, folder: RunFolder) -> list[Callback]:
        runner, monitor, mode = self._config.runner, self._objective.monitor, self._objective.mode
        callbacks = checkpoint_callbacks(folder.checkpoints, monitor, mode) if runner.checkpoint else []
        if runner.early_stopping_patience is not None:
            if monitor is None:
                raise ConfigError(
                    f"runner.early_stopping_patience: found {runner.early_stopping_patience} with "
                    f"objective={self._objective.key}; expected an objective that is evaluated during training. "
                    "Set objective=val/accuracy and evaluate.splits.val=100, or early_stopping_patience=null."
                )
            callbacks.append(early_stopping(monitor, mode, runner.early_stopping_patience))
        return callbacks

    def _finish(self, folder: RunFolder, log: MetricLog) -> None:
        """Evaluate the `end` splits and run the analyses, with the best checkpoint where there is one."""
        program, tick = self._built.program, self._schedule.num_ticks
        if folder.checkpoint("best").is_file():
            tick = load_program(program, folder.checkpoint("best"))["tick"]
        for problem in program.problems.values():
            # Lightning leaves the modules on the CPU.
            problem.module.to(self._device)
        for split, every in self._splits.items():
            if not isinstance(every, int):
                assert self._evaluator is not None
                log.log(tick, self._evaluator.evaluate(split))
        built = self._built
        log.log(tick, run_analyses(built.analyses, program, built.data, folder.artifacts, self._device))


def _what_is_kept(folder: RunFolder) -> str:
    last = folder.checkpoint("last")
    if not last.is_file():
        return "No checkpoint is kept, for runner.checkpoint=false."
    tick = read_checkpoint(last)["tick"]
    return f"{last} holds the last good state that was saved, " + (
        f"after tick {tick}." if tick else "the initial one."
    )


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
