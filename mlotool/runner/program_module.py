"""The LightningModule that drives the schedule."""

import inspect
import math
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mlotool.core.arguments import is_number, require
from mlotool.core.errors import ConfigError, NonFiniteLossError
from mlotool.core.plain_state import ADVICE
from mlotool.distributed.collectives import Ranks
from mlotool.problem.rank_mean import Reduce, identity_reduce
from mlotool.problem.shards import gathered
from mlotool.program import Problem, Program, Schedule, StepResult
from mlotool.runner.checkpoint import STATE_KEY, LastCheckpoint, check_writable
from mlotool.runner.distributed import AgreedInterrupt, agree_on_buffers, check_agreement, merge_shards
from mlotool.runner.evaluation import Evaluator
from mlotool.runner.finiteness import check_parameters, explain
from mlotool.runner.logging import MetricLog
from mlotool.runner.plan import ChunkLoader, Objective, TickPlan, Watch
from mlotool.runner.process_settings import Interrupt
from mlotool.runner.progress import ProgressDisplay, advance_clock
from mlotool.runner.random_state import (
    check_random_states,
    random_states,
    restore_random_states,
    with_own_snapshots,
    with_own_steps,
)
from mlotool.runner.records import PathWatch
from mlotool.runner.seat import AbstractSeat


class ProblemModule(LightningModule):
    """A problem as a LightningModule: callbacks and summaries find its module, optimizer and scheduler here.

    Args:
        problem: the problem; it stays in charge of its steps.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.module = problem.module
        self.problem = problem

    def optimizer_config(self) -> dict[str, Any]:
        """Return what `configure_optimizers` returns for this problem."""
        config: dict[str, Any] = {"optimizer": self.problem.optimizer}
        if self.problem.scheduler is not None:
            config["lr_scheduler"] = {"scheduler": self.problem.scheduler, "name": f"{self.problem.name}/lr"}
        return config

    def values(self, program: Program) -> dict[str, float]:
        """Return the step count and the hyperparameters: the learning rate, and what other problems give."""
        problem = self.problem
        values = {f"{problem.name}/step": float(problem.num_steps)}
        if problem.optimizer is not None:
            # Not every optimizer has one.
            rate = problem.optimizer.param_groups[0].get("lr")
            values |= {} if rate is None else {f"{problem.name}/lr": float(rate)}
        with torch.no_grad():
            given = program.hyperparameters(problem.name)
        for key in problem.settings.optimizer_roles:
            # Of several rates the mean.
            values[f"{problem.name}/{key}"] = torch.stack([each[key].mean() for each in given or ()]).mean().item()
        return values

    def step_scheduler(self, objective: float | None) -> None:
        """Advance a scheduler whose interval is the evaluation.

        Args:
            objective: the objective's last value, for ReduceLROnPlateau.
        """
        problem = self.problem
        if problem.scheduler is None or problem.settings.scheduler_interval != "evaluation":
            return
        if not isinstance(problem.scheduler, ReduceLROnPlateau):
            problem.optimizer_step.step_scheduler()
        elif objective is not None:
            problem.optimizer_step.step_scheduler(objective)


def check_scheduler(problem: Problem, objective: Objective) -> None:
    """Raise ConfigError if a scheduler waits for an objective that it is never given."""
    if not isinstance(problem.scheduler, ReduceLROnPlateau):
        return
    if problem.settings.scheduler_interval == "evaluation" and objective.monitor is not None:
        return
    raise ConfigError(
        f"problems.{problem.name}.scheduler: found ReduceLROnPlateau with scheduler_interval="
        f"{problem.settings.scheduler_interval} and objective={objective.key}; expected scheduler_interval=evaluation "
        "and an objective that is evaluated during training. "
        f"Set problems.{problem.name}.scheduler_interval=evaluation and "
        "give evaluate.splits a number of ticks for the objective's split."
    )


MAX_VALUES = 32
"""Of one problem: more are no curves that one could tell apart."""


class LearnedValues:
    """Reads the values of the small upper problems of a program: for each flush, not for each tick.

    A module that can be called without arguments gives what the losses see, `<problem>/learned_value`, or
    `learned_value_<number>` of several; of others the parameters are read, `<problem>/learned_<name>`. Nothing in
    training changes by it: random numbers and buffers stay as they are.

    Args:
        program: the problems; those count that shape others and have at most `MAX_VALUES` trainable numbers.
    """

    def __init__(self, program: Program) -> None:
        self._problems = [
            problem
            for name, problem in program.problems.items()
            if name in program.graph.upper_to_lower and _is_small(problem)
        ]
        self._called = {problem.name for problem in self._problems if _takes_no_arguments(problem.module)}

    def read(self) -> dict[str, float]:
        """Return the values by key."""
        found: dict[str, float] = {}
        for problem in self._problems:
            named = self._given(problem) or {f"learned_{key}": each for key, each in problem.constants().items()}
            for name, tensor in named.items():
                numbers = tensor.detach().double().flatten().tolist()
                keys = [name] if len(numbers) == 1 else [f"{name}_{index}" for index in range(len(numbers))]
                found.update((f"{problem.name}/{key}", number) for key, number in zip(keys, numbers, strict=True))
        return found

    def _given(self, problem: Problem) -> dict[str, Tensor]:
        """Return what the module gives when it is called; nothing where that is not a few numbers."""
        if problem.name not in self._called:
            return {}
        try:
            given = _call(problem)
        # Of a stranger's forward it may be any error: it is not how the losses use the module.
        except Exception:
            given = None
        named = given if isinstance(given, Mapping) else {"value": given}
        named = {f"learned_{key}": each for key, each in named.items()}
        if all(map(_is_real, named.values())) and sum(each.numel() for each in named.values()) <= MAX_VALUES:
            return named
        self._called.discard(problem.name)
        return {}


def _is_small(problem: Problem) -> bool:
    is_whole = problem.settings.tasks is None and problem.shards is None and problem.parallel is None
    tensors = list(problem.theta.values())
    return is_whole and all(map(_is_real, tensors)) and 0 < sum(each.numel() for each in tensors) <= MAX_VALUES


def _is_real(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _takes_no_arguments(module: torch.nn.Module) -> bool:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return all(each.default is not each.empty or each.kind in kinds for each in parameters)


@torch.no_grad()
def _call(problem: Problem) -> Any:
    devices = [device for device in problem.devices if device.type == "cuda"]
    with torch.random.fork_rng(devices):
        return problem.pure(None, False)()


Steps = Mapping[str, StepResult]


class Window:
    """Collects what ticks return, as tensors; turns it into numbers at a flush.

    Args:
        num_ticks: ticks that lie before the window.
        reduce: a mean over ranks, of which all flush and check after the same ticks: a NaN of one is one of all.
        explain: `(problem, problems that had stepped before) -> sentences`: what may have made its loss not finite.

    Attributes:
        stepped: the problems that have stepped, as far as losses were checked.

    Cost: a list append a tick; at a flush two stacks and two transfers from the device.

    Example:
        >>> from mlotool.program import StepResult
        >>> window = Window()
        >>> window.append({"line": StepResult(torch.tensor(1.0), {})})
        >>> window.append({"line": StepResult(torch.tensor(3.0), {})})
        >>> window.flush()
        {'line/loss': 2.0}
    """

    def __init__(
        self,
        num_ticks: int = 0,
        reduce: Reduce = identity_reduce,
        explain: Callable[[str, set[str]], str] | None = None,
    ) -> None:
        self._ticks: list[Steps] = []
        # Numbers of ticks that a checkpoint has read from the device already, by key.
        self._collected: dict[str, list[float]] = {}
        self._num_ticks_before = num_ticks
        self._num_checked = 0
        self._reduce = reduce
        self._explain = explain
        self.stepped: set[str] = set()
        self.append = self._ticks.append

    def restart(self, num_ticks: int) -> None:
        """Forget the collected steps; the next one belongs to tick `num_ticks + 1`."""
        self._collected = {}
        self._clear(num_ticks)

    def check(self) -> None:
        """Raise NonFiniteLossError, with the first bad tick, if a loss since the last check is NaN or infinite."""
        fresh = self._ticks[self._num_checked :]
        losses = [step.loss for steps in fresh for step in steps.values()]
        # One transfer for all.
        numbers = _numbers(losses, self._reduce)
        self._follow(fresh, numbers, self._num_ticks_before + self._num_checked)
        self._num_checked = len(self._ticks)

    def flush(self) -> dict[str, float]:
        """Check the losses, return the mean of each `<problem>/<metric>` over the window and begin the next one."""
        self._collect()
        means = {key: sum(numbers) / len(numbers) for key, numbers in self._collected.items()}
        self.restart(self._num_ticks_before)
        return means

    def state_dict(self) -> dict[str, Any]:
        """Check the losses, and return what was collected since the last flush, in plain containers."""
        self._collect()
        return {key: list(numbers) for key, numbers in self._collected.items()}

    def load_state_dict(self, state: Mapping[str, Any], num_ticks: int) -> None:
        """Take it back; the next step belongs to tick `num_ticks + 1`."""
        for key, numbers in state.items():
            is_right = isinstance(key, str) and isinstance(numbers, list) and len(numbers) > 0
            require(is_right and all(map(is_number, numbers)), f"window.{key}", numbers, "a list of numbers", ADVICE)
        self.restart(num_ticks)
        self._collected = {key: list(numbers) for key, numbers in state.items()}

    def _follow(self, fresh: list[Steps], numbers: list[float], num_ticks_before: int) -> None:
        """Note who has stepped, up to the first loss that is not finite, and raise for that one."""
        losses = iter(numbers)
        for tick, steps in enumerate(fresh, start=num_ticks_before + 1):
            for problem, value in zip(steps, losses, strict=False):
                if not math.isfinite(value):
                    explanation = "" if self._explain is None else self._explain(problem, self.stepped)
                    raise NonFiniteLossError(problem, tick, value, explanation)
                self.stepped.add(problem)

    def _clear(self, num_ticks: int) -> None:
        self._ticks.clear()
        self._num_ticks_before = num_ticks
        self._num_checked = 0

    def _collect(self) -> None:
        self.check()
        collected: dict[str, list[Tensor]] = {}
        for steps in self._ticks:
            for problem, step in steps.items():
                collected.setdefault(f"{problem}/loss", []).append(step.loss)
                for name, value in step.metrics.items():
                    collected.setdefault(f"{problem}/{name}", []).append(value)
        self._clear(self._num_ticks_before + len(self._ticks))
        numbers = iter(_numbers([value for values in collected.values() for value in values], self._reduce))
        for key, values in collected.items():
            self._collected.setdefault(key, []).extend(next(numbers) for _ in values)


def _numbers(values: list[Tensor], reduce: Reduce) -> list[float]:
    """Return the means over ranks of what tensors of one element hold, by one transfer from the device."""
    if not values:
        return []
    # Reshaping each of them would cost as much as the rest.
    numbers = [value if value.dim() == 0 else value.reshape(()) for value in values]
    # A metric may be on the CPU beside a loss on another device.
    device = numbers[0].device
    stacked = torch.stack([value if value.device == device else value.to(device) for value in numbers]).double()
    return reduce([stacked])[0].tolist()


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
        self.window = Window(
            schedule.num_ticks,
            self.ranks.mean,
            lambda problem, stepped: explain(problem, program.problems, stepped),
        )
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
        self.window.stepped.update(name for name, problem in self.program.problems.items() if problem.num_steps > 0)
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
        found = self.ranks.of_first(lambda: evaluator.evaluate(split, model))
        values = {f"{prefix}{key}": value for key, value in found.items()}
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
