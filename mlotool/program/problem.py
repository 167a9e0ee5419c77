"""One optimization problem: a module, a loss, a data stream, an optimizer, settings."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mlotool.core.bound_module import Places
from mlotool.core.errors import ConfigError
from mlotool.core.loss_output import LossOutput
from mlotool.program.differentiation import AbstractHypergradient
from mlotool.program.graph import ProblemNode
from mlotool.program.stream import Stream

LossFunction = Callable[..., Tensor | LossOutput]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Role:
    """Who plays a role of a loss.

    Args:
        problem: the problem's name.
        training: train or eval mode for this role; None leaves the module's mode.
    """

    problem: str
    training: bool | None = None


class Problem:
    """`min over theta of C(theta; U, L; D)`.

    Args:
        name: its name in the graph.
        module: holds theta: the parameters that require a gradient now. Frozen ones go along as constants.
        loss: `f(batch, *, <roles>) -> Tensor | LossOutput`, pure.
        roles: by keyword of the loss, a problem's name, or `{"problem": name, "mode": "train" | "eval"}`.
        stream: where its batches come from; None calls the loss with `batch=None`.
        optimizer: a torch optimizer, or a callable from parameters to one; None if it is never stepped.
        scheduler: a callable from the optimizer to a learning-rate scheduler.
        scheduler_interval: "step" advances the scheduler after each optimizer step; "evaluation" leaves it to the
            runner.
        hypergradient: how gradients pass through its solution; needed if a problem above both shapes and reads it.
        unroll_steps: optimizer steps it takes before the problems that read it step.
        warmup_steps: its first steps, which do not count for the problems above.
        roll_back: its steps are a look-ahead: after the upper step it returns to where it was, and takes one step.
        gradient_clip_norm: largest 2-norm of its gradient.
        accumulate_batches: batches over which one gradient is averaged.

    Raises:
        ConfigError: a setting is out of range, or the module has no parameter that requires a gradient.

    Example:
        >>> from functools import partial
        >>> problem = Problem("line", nn.Linear(1, 1), lambda batch, *, model: model(batch).square().mean(),
        ...                   roles={"model": "line"}, optimizer=partial(torch.optim.SGD, lr=0.1))
        >>> list(problem.theta)
        ['weight', 'bias']
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        loss: LossFunction,
        *,
        roles: Mapping[str, str | Mapping[str, str]] | None = None,
        stream: Stream | None = None,
        optimizer: Optimizer | OptimizerFactory | None = None,
        scheduler: Callable[[Optimizer], Any] | None = None,
        scheduler_interval: str = "step",
        hypergradient: AbstractHypergradient | None = None,
        unroll_steps: int = 1,
        warmup_steps: int = 0,
        roll_back: bool = False,
        gradient_clip_norm: float | None = None,
        accumulate_batches: int = 1,
    ) -> None:
        self.name = name
        self.module = module
        self.loss = loss
        self.roles = {role: _role(name, role, value) for role, value in (roles or {}).items()}
        self.stream = stream
        self.theta = {key: tensor for key, tensor in module.named_parameters() if tensor.requires_grad}
        if not self.theta:
            raise ConfigError(
                f"problems.{name}.module: {type(module).__name__} has no parameter that requires a gradient; expected "
                "at least one. Unfreeze a parameter, or remove the problem and use the module inside the loss."
            )
        for key, value in {"unroll_steps": unroll_steps, "accumulate_batches": accumulate_batches}.items():
            whole = isinstance(value, int) and value >= 1
            _require(whole, f"problems.{name}.{key}", value, "a whole number of at least 1")
        whole = isinstance(warmup_steps, int) and warmup_steps >= 0
        _require(whole, f"problems.{name}.warmup_steps", warmup_steps, "a whole number of at least 0")
        has_both = scheduler is None or optimizer is not None
        _require(has_both, f"problems.{name}.optimizer", optimizer, "an optimizer, since a scheduler is set")
        _require(
            gradient_clip_norm is None or gradient_clip_norm > 0,
            f"problems.{name}.gradient_clip_norm",
            gradient_clip_norm,
            "a positive norm or null",
        )
        _require(
            scheduler_interval in ("step", "evaluation"),
            f"problems.{name}.scheduler_interval",
            scheduler_interval,
            "'step' or 'evaluation'",
        )
        self.places = Places(module)
        built = optimizer if isinstance(optimizer, Optimizer) or optimizer is None else optimizer(self.theta.values())
        self.optimizer: Optimizer | None = built
        self.scheduler: Any = scheduler(built) if scheduler is not None and built is not None else None
        self.scheduler_interval = scheduler_interval
        self.hypergradient = hypergradient
        self.unroll_steps = unroll_steps
        self.warmup_steps = warmup_steps
        self.roll_back = roll_back
        self.gradient_clip_norm = gradient_clip_norm
        self.accumulate_batches = accumulate_batches
        self.num_steps = 0

    @property
    def node(self) -> ProblemNode:
        """What the graph's validation needs to know."""
        return ProblemNode({role: value.problem for role, value in self.roles.items()})

    def constants(self) -> dict[str, Tensor]:
        """Return theta, detached; the tensors share the parameters' memory."""
        return {key: tensor.detach() for key, tensor in self.theta.items()}

    def step(self, gradient: Sequence[Tensor | None]) -> Tensor | None:
        """Take one optimizer step along `gradient` (one tensor a parameter of theta; None where it is unused).

        Returns:
            The gradient's norm before clipping, 0-D, if it is clipped; else None.
        """
        assert self.optimizer is not None
        parameters = self.theta.values()
        for parameter, value in zip(parameters, gradient, strict=True):
            parameter.grad = value
        norm = None
        if self.gradient_clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(parameters, self.gradient_clip_norm)
        self.optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        if self.scheduler is not None and self.scheduler_interval == "step":
            self.scheduler.step()
        self.num_steps += 1
        return norm

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of what a step changes: module, optimizer, scheduler, step count."""
        return copy.deepcopy(self._learned_state())

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Take a snapshot back."""
        self._load_learned_state(copy.deepcopy(snapshot))

    def state_dict(self) -> dict[str, Any]:
        """Return what a bit-identical resume needs; plain containers and tensors."""
        state = self._learned_state()
        state["stream"] = None if self.stream is None else self.stream.state_dict()
        state["hypergradient"] = {} if self.hypergradient is None else self.hypergradient.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state back."""
        # The optimizer keeps what it loads: without a copy two problems would share their momentum.
        self._load_learned_state(copy.deepcopy(state))
        if self.stream is not None:
            self.stream.load_state_dict(state["stream"])
        if self.hypergradient is not None:
            self.hypergradient.load_state_dict(state["hypergradient"])

    def _learned_state(self) -> dict[str, Any]:
        return {
            "module": self.module.state_dict(),
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "num_steps": self.num_steps,
        }

    def _load_learned_state(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.num_steps = state["num_steps"]


def _role(name: str, role: str, value: str | Mapping[str, str]) -> Role:
    if isinstance(value, str):
        return Role(value)
    modes = {"train": True, "eval": False, None: None}
    key = f"problems.{name}.loss.roles.{role}"
    if "problem" not in value or not set(value) <= {"problem", "mode"} or value.get("mode") not in modes:
        raise ConfigError(
            f"{key}: found {dict(value)}; expected a problem's name, or {{problem: <name>, mode: train | eval}}. "
            f"Correct {key}."
        )
    return Role(value["problem"], modes[value.get("mode")])


def _require(condition: bool, key: str, value: object, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{key}: found {value!r}; expected {expected}. Correct {key}.")
