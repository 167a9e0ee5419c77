"""A LightningModule as a problem: its `training_step` is the loss, its `configure_optimizers` the optimizer.

Nothing here imports Lightning: what has both methods counts as a LightningModule.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mlotool.core.arguments import is_whole, require
from mlotool.core.errors import ConfigError
from mlotool.core.messages import kind_of
from mlotool.core.user_code import named
from mlotool.problem.settings import ProblemSettings

# Methods that change what a step is, or what it sees.
_OF_STEPS = (
    *("backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "configure_model"),
)
# Methods that are called around steps.
_AROUND = (
    *("setup", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "configure_callbacks"),
    *("on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end"),
)
_LIGHTNINGS = ("lightning", "pytorch_lightning", "torch")
_OWN_LOOP = "Give the problem a loss and an optimizer: the module is then an nn.Module like any other."


def check_lightning_module(name: str, module: nn.Module) -> None:
    """Refuse a LightningModule whose steps are more than a loss and an optimizer; warn of hooks that are not called.

    Args:
        name: of the problem.
        module: has `training_step` and `configure_optimizers`.

    Raises:
        ConfigError: its steps are more.
    """
    key, kind = f"problems.{name}.module", type(module).__name__
    is_automatic = getattr(module, "automatic_optimization", True)
    expected = "a training_step that returns a loss, whose gradient a hypergradient passes through"
    if not is_automatic:
        raise ConfigError(f"{key}: found {kind} with automatic_optimization=False; expected {expected}. {_OWN_LOOP}")
    for hook in filter(lambda hook: _is_own(module, hook), _OF_STEPS):
        raise ConfigError(
            f"{key}: found {kind}.{hook}, which mlotool's steps do not call; expected {expected}, and no other method "
            f"that changes a step. Remove it, or use settings of the problem (gradient_clip_norm). {_OWN_LOOP}"
        )
    if around := [hook for hook in _AROUND if _is_own(module, hook)]:
        warnings.warn(
            f"{key}: {kind} has {', '.join(around)}; expected none of them, as they are not called here. Use a "
            "callback (runner.callbacks) instead, and do not store values for them in training_step: they would stay "
            "in memory.",
            stacklevel=3,
        )


def _is_own(module: nn.Module, hook: str) -> bool:
    """Say whether a hook is a class's of the user's, and not the empty one of Lightning's."""
    owner = next((kind for kind in type(module).__mro__ if hook in vars(kind)), None)
    return owner is not None and owner.__module__.partition(".")[0] not in _LIGHTNINGS


class StandInTrainer:
    """What `self.trainer` of a LightningModule is while its problem's losses are evaluated; counts are the problem's.

    Args:
        problem: whose steps and stream are counted.

    Attributes:
        of_run: Lightning's Trainer of a run; None outside of one.
    """

    sanity_checking = False

    def __init__(self, problem: Any) -> None:
        self._problem = problem
        self.of_run: Any = None

    @property
    def global_step(self) -> int:
        """Optimizer steps of the problem."""
        steps: int = self._problem.num_steps
        return steps

    @property
    def num_training_batches(self) -> int:
        """Batches of an epoch of the problem's stream."""
        return self._num_batches("trainer.num_training_batches")

    @property
    def current_epoch(self) -> int:
        """Epochs of the problem's stream that its steps have gone through."""
        return self._num_drawn // self._num_batches("current_epoch")

    @property
    def batch_idx(self) -> int:
        """Number of the step's batch in its epoch; of all batches where the stream has no epochs."""
        num_batches = _num_batches_of(self._problem.stream)
        return self._num_drawn if num_batches is None else self._num_drawn % num_batches

    def steps_of_epoch(self) -> int:
        """Return the optimizer steps that go through an epoch."""
        return -(-self._num_batches("a scheduler that advances with each epoch") // self._accumulated)

    @property
    def logger(self) -> Any:
        """The run's; None outside of a run."""
        return getattr(self.of_run, "logger", None)

    @property
    def loggers(self) -> list[Any]:
        """The run's."""
        return list(getattr(self.of_run, "loggers", ()))

    @property
    def _num_drawn(self) -> int:
        return self.global_step * self._accumulated

    @property
    def _accumulated(self) -> int:
        batches: int = self._problem.settings.accumulate_batches
        return batches

    def _num_batches(self, asked: str) -> int:
        num_batches = _num_batches_of(self._problem.stream)
        if num_batches is None:
            self._refuse(asked, "a stream with a number of batches")
        return num_batches

    def _refuse(self, asked: str, expected: str) -> NoReturn:
        problem = self._problem
        raise ConfigError(
            f"problems.{problem.name}.module: {type(problem.module).__name__} asks for {asked}; expected {expected}. "
            "Make it an argument of the module, or give the problem a loss, an optimizer or a scheduler that does not "
            "need it."
        )

    def __getattr__(self, name: str) -> Any:
        """Refuse what there is no answer to: an empty one would change the training without a word."""
        if name.startswith("__"):
            raise AttributeError(name)
        known = "current_epoch, global_step, num_training_batches or logger, as mlotool runs the loop"
        return self._refuse(f"trainer.{name}", known)


def _num_batches_of(stream: Any) -> int | None:
    """Return the batches of an epoch, of a `SameBatch` those of the other stream; None where there are no epochs."""
    stream = getattr(stream, "stream", stream)
    num_batches = getattr(stream, "num_batches", None)
    return num_batches if is_whole(num_batches, 1) else None


class EveryFewSteps(LRScheduler):
    """A scheduler that is asked after each optimizer step, and advances another one after each so many.

    Args:
        scheduler: the other one.
        num_steps: from one advance to the next.
    """

    def __init__(self, scheduler: Any, num_steps: int) -> None:
        # Not LRScheduler's, which would step and set initial rates: the other one has done so.
        self.scheduler, self.optimizer = scheduler, scheduler.optimizer
        self._every, self._count = num_steps, 0

    def step(self, epoch: int | None = None) -> None:
        """Count a step."""
        self._count += 1
        if self._count % self._every == 0:
            self.scheduler.step()

    def get_last_lr(self) -> list[Any]:
        """Return the current rates."""
        rates: list[Any] = self.scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the count and the other scheduler's state."""
        return {"count": self._count, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them back."""
        self._count = state_dict["count"]
        self.scheduler.load_state_dict(state_dict["scheduler"])


_FORMS = "an optimizer, [optimizer], ([optimizer], [scheduler]) or {optimizer: .., lr_scheduler: ..}"


def configured(name: str, module: Any, trainer: StandInTrainer, settings: ProblemSettings) -> tuple[Optimizer, Any]:
    """Return the optimizer and the scheduler (None where there is none) that `configure_optimizers` returns.

    Args:
        name: of the problem.
        module: a LightningModule.
        trainer: stands in for Lightning's meanwhile, and knows the length of an epoch.
        settings: of the problem; `scheduler_interval: evaluation` leaves the advances to the runner.

    Raises:
        ConfigError: it returns something else, or several optimizers.
    """
    key = f"problems.{name}.optimizer"
    before, vars(module)["_trainer"] = vars(module).get("_trainer"), trainer
    try:
        returned = module.configure_optimizers()
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{key}: {named(module.configure_optimizers)} failed ({error}); expected {_FORMS}. Correct it."
        ) from error
    finally:
        vars(module)["_trainer"] = before
    optimizers, schedulers = _parts(returned)
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer) or len(schedulers) > 1:
        found = kind_of(returned) if len(optimizers) < 2 else f"{len(optimizers)} optimizers"
        found = f"{len(schedulers)} schedulers" if len(schedulers) > 1 else found
        raise ConfigError(
            f"{key}: found {found} from {named(module.configure_optimizers)}; expected one: {_FORMS}. Make a problem "
            f"for each optimizer, and one scheduler of several (torch's SequentialLR, ChainedScheduler). {_OWN_LOOP}"
        )
    chosen = schedulers[0] if schedulers else None
    entry: dict[str, Any] = dict(chosen) if isinstance(chosen, Mapping) else {"scheduler": chosen}
    scheduler = entry.get("scheduler")
    place = f"problems.{name}.scheduler"
    if scheduler is not None and settings.optimizer_roles:
        given = ", ".join(f"{setting} by '{giver}'" for setting, giver in settings.optimizer_roles.items())
        warnings.warn(
            f"{place}: found {type(scheduler).__name__} from {named(module.configure_optimizers)}, beside {given}; "
            "expected none, since another problem sets hyperparameters. It is left out.",
            stacklevel=3,
        )
        scheduler = None
    is_asked_elsewhere = settings.scheduler_interval == "evaluation" or isinstance(scheduler, ReduceLROnPlateau)
    if scheduler is None or is_asked_elsewhere:
        return optimizers[0], scheduler
    frequency: Any
    unit, frequency = entry.get("interval", "epoch"), entry.get("frequency", 1)
    require(unit in ("step", "epoch"), f"{place}.interval", unit, "step or epoch")
    require(is_whole(frequency, 1), f"{place}.frequency", frequency, "a whole number of at least 1")
    every = frequency * (1 if unit == "step" else trainer.steps_of_epoch())
    return optimizers[0], scheduler if every == 1 else EveryFewSteps(scheduler, every)


def _parts(returned: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the optimizers and the schedulers among what `configure_optimizers` returns."""
    if isinstance(returned, Mapping):
        scheduler = returned.get("lr_scheduler")
        return [returned.get("optimizer")], [] if scheduler is None else [scheduler]
    if not isinstance(returned, list | tuple):
        return [returned], []
    if len(returned) == 2 and isinstance(returned[0], list | tuple):
        schedulers = returned[1] if isinstance(returned[1], list | tuple) else [returned[1]]
        return returned[0], schedulers
    parts = [_parts(part) for part in returned]
    return [one for optimizers, _ in parts for one in optimizers], [one for _, rest in parts for one in rest]
