"""The optimizer steps of one problem: taken in place, again on copies, or as pure functions of parameters and state."""

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from mlotool.core.arguments import is_number, require
from mlotool.core.errors import ConfigError
from mlotool.core.gradient import values_of
from mlotool.core.user_code import Call, note
from mlotool.problem.arguments import check_scheduler, check_used, is_lazy, made, needs_closure
from mlotool.problem.loss_scale import LossScale
from mlotool.problem.optimizers.fused_step import FusedStep, KernelGroup, KernelStep, aligned, prefer_fused_kernels
from mlotool.problem.optimizers.registry import find_rule
from mlotool.problem.optimizers.rule import Hyperparameters, State, StepArguments, StepCotangents, pull_back, safe_sqrt
from mlotool.problem.settings import ProblemSettings
from mlotool.problem.shards import Shards
from mlotool.problem.trajectory import copied

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]

Evaluate = Callable[[], tuple[Tensor, Sequence[Tensor | None]]]
"""Returns a step's loss and gradient, one tensor a parameter of theta, at the current parameters."""

_SCHEDULER_ADVICE = "Correct its settings (total_steps, T_max, ...)."

_HOOKS = attrgetter("_post_accumulate_grad_hooks")


class OptimizerStep:
    """Takes the optimizer steps of one problem.

    Args:
        name: the problem's, for messages.
        optimizer: of its parameters; None where it is never stepped.
        scheduler: of the optimizer's learning rate; None keeps it.
        settings: the problem's.
    """

    def __init__(self, name: str, optimizer: Optimizer | None, scheduler: Any, settings: ProblemSettings) -> None:
        self.scheduler = scheduler
        self.loss_scale = LossScale() if settings.precision == "fp16" else None
        self.evaluates_again = optimizer is not None and needs_closure(optimizer)
        self._name = name
        self._optimizer = optimizer
        self._settings = settings
        self._module: nn.Module
        self._parameters: tuple[Tensor, ...]
        self._shards: Shards | None = None
        self._fused: FusedStep

    def bind(self, module: nn.Module, parameters: tuple[Tensor, ...], shards: Shards | None) -> None:
        """Step these parameters from now on.

        Args:
            module: the problem's.
            parameters: those that are trained, in order.
            shards: their division among ranks; None where they are whole.
        """
        self._module, self._parameters, self._shards = module, parameters, shards
        self._bind_kernel()

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; one that is put in its place steps from then on."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._bind_kernel()

    def __call__(
        self,
        gradient: Sequence[Tensor | None],
        hyperparameters: Sequence[Hyperparameters] | None = None,
        evaluate: Evaluate | None = None,
    ) -> Tensor | None:
        """Take one step; in fp16 none, if the gradient has overflown. Arguments and value as for `Problem.step`."""
        assert self._optimizer is not None
        if self.loss_scale is not None and not self.loss_scale.accepts(gradient):
            # An overflow: the factor is smaller from now on.
            return None
        gradient, norm = self.clip(gradient if self.evaluates_again else self.hooked(gradient))
        if hyperparameters is not None:
            self._step_with(gradient, hyperparameters)
        elif self.evaluates_again:
            assert evaluate is not None
            self._optimizer.step(partial(self._evaluate_again, evaluate))
            self._clear_gradient()
        elif not self._fused(gradient):
            self._by_optimizer(gradient)
        self.advance()
        return norm

    @property
    def takes_sparse(self) -> bool:
        """Whether a step is along sparse gradients as they are; for all others they are made dense.

        By SGD and Adagrad it has the values of a step along the dense ones, by SparseAdam it has not.
        """
        optimizer = self._optimizer
        if optimizer is None:
            return False
        if type(optimizer) not in (SGD, Adagrad):
            # Other optimizers of torch refuse them; one of the user's may want them.
            return type(optimizer) is SparseAdam or not type(optimizer).__module__.startswith("torch.")
        groups = optimizer.param_groups
        has_more = any(group.get("momentum") or group["weight_decay"] for group in groups)
        return not (has_more or self._settings.optimizer_roles)

    @property
    def is_plain(self) -> bool:
        """Whether every step is along its gradient: no overflow is looked for, and nothing is evaluated again."""
        return self.loss_scale is None and not self.evaluates_again

    def kernel_groups(self) -> list[KernelGroup] | None:
        """Return what a step is that is nothing but calls of a kernel; None where it is more."""
        is_bare = self.is_plain and self._settings.gradient_clip_norm is None
        return self._fused.groups() if is_bare and not any(map(_HOOKS, self._parameters)) else None

    @property
    def has_schedule(self) -> bool:
        """Whether a step changes the settings of the next."""
        return self.scheduler is not None and self._settings.scheduler_interval == "step"

    def align_state(self) -> None:
        """Put what is kept of each parameter into its layout in memory, in which kernels read it."""
        if self._shards is None:
            self._fused.mend()

    def hooked(self, gradient: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return what hooks that a user has put after the accumulation of gradients (`Tensor.grad`) make of them."""
        if not any(map(_HOOKS, self._parameters)):
            return gradient
        # A hook may write into the tensor, which others have kept.
        self._set_gradient([None if slope is None else slope.clone() for slope in gradient])
        for parameter in self._parameters:
            for hook in [*(parameter._post_accumulate_grad_hooks or {}).values()]:
                if parameter.grad is not None:
                    hook(parameter)
        found = [parameter.grad for parameter in self._parameters]
        self._clear_gradient()
        return found

    def begin(self, gradient: Sequence[Tensor | None]) -> list[KernelStep]:
        """Take a plain step along a clipped gradient, but for what is left to `take_steps`, and then to `advance`."""
        found = self._fused.ready(gradient)
        if found is None:
            self._by_optimizer(gradient)
        return found or []

    def advance(self) -> None:
        """Advance the scheduler after a step, if that is when it advances."""
        if self.has_schedule:
            self.step_scheduler()

    def step_scheduler(self, *objective: float) -> None:
        """Advance the scheduler.

        Args:
            objective: its value, for ReduceLROnPlateau.
        """
        assert self.scheduler is not None
        try:
            self.scheduler.step(*objective)
        except Exception as error:
            note(error, lambda: Call(f"problems.{self._name}.scheduler", self.scheduler, advice=_SCHEDULER_ADVICE))
            raise

    def clip(self, gradient: Sequence[Tensor | None]) -> tuple[Sequence[Tensor | None], Tensor | None]:
        """Return the gradient within `gradient_clip_norm`, and its norm before (mean over tasks) if that is set."""
        largest = self._settings.gradient_clip_norm
        if largest is None:
            return gradient, None
        if self._shards is None:
            found, norm = clipped(gradient, largest, self._settings.tasks)
        else:
            found, norm = clipped(gradient, largest, total=partial(self._shards.total, like=self._parameters))
        return found, norm.mean()

    def pure(
        self,
        theta: Sequence[Tensor],
        gradient: Sequence[Tensor | None],
        state: Sequence[State],
        hyperparameters: Sequence[Hyperparameters],
    ) -> tuple[list[Tensor], list[State]]:
        """Return parameters and optimizer state after a step; differentiable, and nothing is changed.

        Args:
            theta: the parameters, one tensor each.
            gradient: before clipping.
            state: of the optimizer, one a parameter.
            hyperparameters: one mapping a parameter.

        Raises:
            ConfigError: the optimizer has no pure form.
        """
        update = find_rule(self._name, self._optimizer).update
        new_theta, new_state = [], []
        for point, slope, old, rates in zip(theta, self.clip(gradient)[0], state, hyperparameters, strict=True):
            moved, kept = (point, old) if slope is None else update(point, slope, old, rates)
            new_theta.append(moved)
            new_state.append(kept)
        return new_theta, new_state

    def pull_back(
        self,
        theta: Sequence[Tensor],
        gradient: Sequence[Tensor | None],
        state: Sequence[State],
        hyperparameters: Sequence[Hyperparameters],
        cotangent: list[Tensor],
        of_state: list[dict[str, Tensor]] | None = None,
    ) -> StepCotangents:
        """Return the derivative of a pure step, transposed, times cotangents of what it returns.

        Arguments as for `pure`, and the cotangents as for `mlotool.problem.optimizers.rule.pull_back`.
        """
        clip = None if self._settings.gradient_clip_norm is None else self.clip
        rule = find_rule(self._name, self._optimizer)
        return pull_back(StepArguments(rule, theta, gradient, state, hyperparameters, clip), cotangent, of_state)

    def again(
        self,
        theta: Sequence[Tensor],
        gradient: Sequence[Tensor | None],
        state: Sequence[State],
        hyperparameters: Sequence[Hyperparameters],
        inputs: Sequence[Tensor],
    ) -> tuple[list[Tensor], list[State]]:
        """Return parameters and state after a step that was taken, as `Unroll.replay`: to the bit, nothing is changed.

        Arguments as for `pure`; the inputs, which shape the problem, shape no update.
        """
        assert self._optimizer is not None
        return replayed_step(self._optimizer, self._parameters, theta, self.clip(gradient)[0], state, hyperparameters)

    def hyperparameters(self) -> tuple[Hyperparameters, ...]:
        """Return a copy of the optimizer's current hyperparameters, one mapping a parameter of theta."""
        assert self._optimizer is not None
        found: dict[int, Hyperparameters] = {}
        for group in self._optimizer.param_groups:
            # A scheduler fills a rate that is a tensor in place.
            values = {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            found.update((id(parameter), values) for parameter in group["params"])
        return tuple(found[id(parameter)] for parameter in self._parameters)

    def next_hyperparameters(self, count: int) -> list[tuple[Hyperparameters, ...]]:
        """Return those of the next `count` steps, as the scheduler will set them; nothing is changed."""
        if not self.has_schedule:
            return [self.hyperparameters()] * count
        # Both in one copy, so that the copied scheduler sets the copied optimizer.
        twin = copy.copy(self)
        assert self._optimizer is not None
        kept = [
            entry for state in self._optimizer.state.values() for entry in state.values() if isinstance(entry, Tensor)
        ]
        memo: dict[int, Any] = {id(tensor): tensor for tensor in (*self._parameters, *kept)}
        twin._optimizer, twin.scheduler = copy.deepcopy((self._optimizer, self.scheduler), memo)
        found: list[tuple[Hyperparameters, ...]] = []
        with warnings.catch_warnings():
            # torch warns of a scheduler that steps without its optimizer.
            warnings.simplefilter("ignore")
            for _ in range(count):
                found.append(tuple(dict(rates) for rates in twin.hyperparameters()))
                twin.scheduler.step()
        return found

    def state(self) -> tuple[State, ...]:
        """Return a copy of the optimizer's state, one mapping a parameter of theta."""
        assert self._optimizer is not None
        return tuple(copied(self._optimizer.state.get(parameter, {})) for parameter in self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizer, scheduler and loss scale."""
        return {
            "optimizer": None if self._optimizer is None else self._optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state back."""
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])
            self._bind_kernel()
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])

    def replace_parameters(self, parameters: Mapping[int, nn.Parameter]) -> None:
        """Let the optimizer hold other tensors, with no state.

        Args:
            parameters: by the `id` of a parameter, the one in its place.
        """
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            group["params"] = [parameters.get(id(parameter), parameter) for parameter in group["params"]]
        self._optimizer.state.clear()

    def _bind_kernel(self) -> None:
        if self._optimizer is not None:
            if self._shards is None:
                prefer_fused_kernels(self._optimizer)
            self._fused = FusedStep(self._optimizer, self._parameters)

    def _step_with(self, gradient: Sequence[Tensor | None], hyperparameters: Sequence[Hyperparameters]) -> None:
        optimizer = self._optimizer
        assert optimizer is not None
        update = find_rule(self._name, optimizer).update
        with torch.no_grad():
            for parameter, slope, rates in zip(self._parameters, gradient, hyperparameters, strict=True):
                if slope is not None:
                    moved, state = update(parameter, slope, copied(optimizer.state.get(parameter, {})), rates)
                    parameter.copy_(moved)
                    optimizer.state[parameter] = dict(state)

    def _by_optimizer(self, gradient: Sequence[Tensor | None]) -> None:
        assert self._optimizer is not None
        if any(value is not None and value.is_sparse for value in gradient):
            # The kernels refuse it.
            for group in self._optimizer.param_groups:
                group["fused"] = False if group.get("fused") else group.get("fused")
        self.align_state()
        self._set_gradient(gradient)
        self._optimizer.step()
        self._clear_gradient()

    def _evaluate_again(self, evaluate: Evaluate) -> float:
        loss, gradient = evaluate()
        self._set_gradient(self.clip(self.hooked(gradient))[0])
        return float(loss)

    def _set_gradient(self, gradient: Sequence[Tensor | None]) -> None:
        for parameter, value in zip(self._parameters, gradient, strict=True):
            if value is None and is_lazy(parameter):
                check_used(self._name, self._module)
            if value is not None and self._shards is not None:
                value = self._shards.put_together(value, parameter)
            parameter.grad = None if value is None else aligned(value, parameter)

    def _clear_gradient(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def optimizer_step(
    name: str,
    theta: Mapping[str, Tensor],
    optimizer: Optimizer | OptimizerFactory | None,
    scheduler: Callable[[Optimizer], Any] | None,
    settings: ProblemSettings,
) -> OptimizerStep:
    """Return how a problem steps.

    Args:
        name: the problem.
        theta: its parameters by name.
        optimizer: of them, or what makes one; None where it is never stepped.
        scheduler: makes one of the optimizer; None keeps its learning rate.
        settings: the problem's.

    Raises:
        ConfigError: the optimizer or the scheduler is of a wrong kind, or does not fit the settings.
    """
    key = f"problems.{name}"
    for user, is_set in (("a scheduler", scheduler is not None), ("reset_to", settings.reset_to is not None)):
        expected = f"an optimizer, since {user} is set"
        require(optimizer is not None or not is_set, f"{key}.optimizer", None, expected)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        is_optimizer = lambda value: isinstance(value, Optimizer)  # noqa: E731
        optimizer = made(f"{key}.optimizer", optimizer, theta.values(), is_optimizer, "a torch optimizer")
    assert optimizer is None or isinstance(optimizer, Optimizer)
    _check_optimizer(f"{key}.optimizer", optimizer, theta)
    built = None
    if scheduler is not None:
        is_scheduler = lambda value: value is None or hasattr(value, "step")  # noqa: E731
        built = made(f"{key}.scheduler", scheduler, optimizer, is_scheduler, "a scheduler")
    check_scheduler(name, built, optimizer, settings.scheduler_interval)
    if settings.optimizer_roles:
        assert optimizer is not None
        known = [setting for setting, value in optimizer.param_groups[0].items() if is_number(value)]
        for setting in settings.optimizer_roles:
            require(setting in known, f"{key}.optimizer.{setting}", "a problem", f"one of {', '.join(known)}")
    return OptimizerStep(name, optimizer, built, settings)


def _check_optimizer(key: str, optimizer: Optimizer | None, theta: Mapping[str, Tensor]) -> None:
    """Refuse an optimizer of other parameters, which would step them, or nothing, and one whose steps are a graph."""
    groups = () if optimizer is None else optimizer.param_groups
    held = {id(parameter) for group in groups for parameter in group["params"]}
    missing = next((name for name, tensor in theta.items() if groups and id(tensor) not in held), None)
    if missing is not None:
        raise ConfigError(
            f"{key}: it does not hold the parameter '{missing}' of the module; expected all of them. Pass a callable: "
            "optimizer=functools.partial(torch.optim.SGD, lr=0.1)."
        )
    if any(group.get("differentiable") for group in groups):
        raise ConfigError(
            f"{key}.differentiable: found true; expected false. Leave it out: Unrolled differentiates steps by itself."
        )


def clipped(
    gradient: Sequence[Tensor | None],
    max_norm: float,
    num_tasks: int | None = None,
    total: Callable[[Sequence[Tensor | None]], Tensor] | None = None,
) -> tuple[list[Tensor | None], Tensor]:
    """Return the gradient with a 2-norm of at most `max_norm`, and its norm before.

    Args:
        gradient: one tensor a parameter; None where it is unused.
        max_norm: as for `torch.nn.utils.clip_grad_norm_`.
        num_tasks: length of the leading task axis, each of which is clipped by itself; None without one.
        total: where tensors are divided among ranks, returns the sum of the squares of all elements, from the squares
            of this rank's part of each tensor.

    Returns:
        The gradient, and the norm: 0-D, or one a task.
    """
    start = 0 if num_tasks is None else 1
    squares = [None if tensor is None else _squares(tensor).flatten(start).sum(start) for tensor in gradient]
    if total is None:
        norm = safe_sqrt(torch.stack([square for square in squares if square is not None]).sum(0))
    else:
        norm = safe_sqrt(total(squares))
    factor = (max_norm / (norm + 1e-6)).clamp_max(1.0)
    return [None if tensor is None else tensor * _on_axis(factor, tensor) for tensor in gradient], norm


def replayed_step(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    theta: Sequence[Tensor],
    gradient: Sequence[Tensor | None],
    state: Sequence[State],
    hyperparameters: Sequence[Hyperparameters],
) -> tuple[list[Tensor], list[State]]:
    """Return parameters and optimizer state after a step; the optimizer and its parameters stay as they are.

    Args:
        optimizer: of torch.
        parameters: its parameters, in the order of the others; only to tell which is in which group.
        theta: their values before the step.
        gradient: after clipping; None of a parameter that is left alone.
        state: of the optimizer before the step, one mapping a parameter.
        hyperparameters: at the step, one mapping a parameter.

    Example:
        >>> parameter = nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([parameter], lr=0.5)
        >>> rates = [{"lr": 0.5}]
        >>> replayed_step(optimizer, [parameter], [torch.full((1,), 3.0)], [torch.ones(1)], [{}], rates)[0]
        [tensor([2.5000])]
    """
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    copies = [nn.Parameter(tensor.detach().clone()) for tensor in theta]
    for parameter, slope in zip(copies, gradient, strict=True):
        parameter.grad = None if slope is None else aligned(slope, parameter)
    twin: Any = copy.copy(optimizer)
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    twin.param_groups = []
    for group in optimizer.param_groups:
        members = [places[id(parameter)] for parameter in group["params"] if id(parameter) in places]
        if members:
            values = {**group, **hyperparameters[members[0]]}
            twin.param_groups.append({**values, "params": [copies[place] for place in members]})
    twin.state = defaultdict(dict)
    for place, entry in enumerate(state):
        if entry:
            twin.state[copies[place]] = {
                name: value.clone() if isinstance(value, Tensor) else value for name, value in entry.items()
            }
    type(optimizer).step(twin)
    return [entry.detach() for entry in copies], [dict(twin.state.get(entry, {})) for entry in copies]


def _squares(tensor: Tensor) -> Tensor:
    values = values_of(tensor)
    return (values.abs() if values.is_complex() else values).square()


def _on_axis(factor: Tensor, tensor: Tensor) -> Tensor:
    """Return `factor`, 0-D or one a task, so that it multiplies a tensor with a leading task axis."""
    return factor if factor.dim() == 0 else factor.reshape(factor.shape + (1,) * (tensor.dim() - factor.dim()))
