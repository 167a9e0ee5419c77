"""The optimizer steps of one problem: taken in place, again on copies, or as pure functions of parameters and state."""

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from mlotool.core.arguments import is_number, require
from mlotool.core.gradient import values_of
from mlotool.core.unchanged import SameForms, SameObjects
from mlotool.core.user_code import Call, noted
from mlotool.problem.arguments import check_scheduler, made, needs_closure
from mlotool.problem.optimizers import rule as rules
from mlotool.problem.optimizers.registry import RULES, find_rule, has_step_hooks, parts_of_step
from mlotool.problem.optimizers.rule import COUNTER, Gradient, Hyperparameters, Rates, State, States, Stepped, Vector
from mlotool.problem.settings import ProblemSettings
from mlotool.problem.shards import Shards
from mlotool.problem.trajectory import copied

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]

# Returns a step's loss and gradient, one tensor per parameter of theta, at the current parameters.
Evaluate = Callable[[], tuple[Tensor, Gradient]]

_SCHEDULER_ADVICE = "Correct its settings (total_steps, T_max, ...)."

_HOOKS = attrgetter("_post_accumulate_grad_hooks")
_SWITCHES = ("fused", "capturable", "differentiable")


@dataclass(slots=True)
class KernelGroup:
    """A group of an optimizer, with its tensors in the order of the kernel's arguments.

    Args:
        rule: of the optimizer, with kernels.
        param_group: the optimizer's own; a scheduler changes its values in place.
        positions: of its parameters' gradients.
        parameters: its parameters.
        vectors: by name of a state, one tensor per parameter.
        counts: the tensors that count steps, which a step adds one to.

    """

    rule: rules.OptimizerRule
    param_group: dict[str, Any]
    positions: list[int]
    parameters: list[Tensor]
    vectors: dict[str, list[Tensor]]
    counts: list[Tensor]

    def step(self, gradient: list[Tensor]) -> None:
        """Take a step along the gradients of the parameters."""
        if self.counts:
            # Torch takes twice as long with a number, which it makes a tensor for each of them.
            torch._foreach_add_(self.counts, [torch.ones_like(self.counts[0])] * len(self.counts))
        kernel, settings = self.rule.kernel(self.param_group)
        kept = [self.vectors.get(name, []) for name in self.rule.state]
        given = [aligned(value, like) for value, like in zip(gradient, self.parameters, strict=True)]
        kernel.in_place(self.parameters, given, *kept, **settings)

    def kind(self) -> tuple[Any, ...]:
        """Return what groups have in common whose steps may be one call, by the settings that they have now."""
        like, settings = self.parameters[0], map(self.param_group.get, self.rule.settings)
        values = [tuple(value) if isinstance(value, list) else value for value in settings]
        return self.rule, like.dtype, like.device, *self.vectors, *values


# A group of an optimizer, and the gradients of its parameters.
KernelStep = tuple[KernelGroup, list[Tensor]]


def take_steps(steps: Sequence[KernelStep]) -> None:
    """Take steps, of one problem or of several."""
    with torch.no_grad():
        for group, gradient in steps:
            group.step(gradient)


class FusedStep:
    """Takes an optimizer's steps by its kernel, with the same bits as the optimizer itself would.

    The first step is the optimizer's own, which makes the state; so is the first one after a state was loaded.

    Args:
        optimizer: of any kind; one whose rule has kernels takes them with `fused: true`.
        parameters: those of its problem, in the order of their gradients.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        self.optimizer: Any = optimizer
        self._parameters, self._rule = parameters, (rule := _rule_with_kernels(optimizer))
        self._deciding = () if rule is None else (*_SWITCHES, *rule.deciding)
        self._groups: list[KernelGroup] | None = None
        self._same: SameObjects | None = None
        self._tensors: list[Tensor] = []
        self._same_forms = SameForms([])
        self._is_first = True

    def __call__(self, gradient: Gradient) -> bool:
        """Take a step; return False, with nothing done, where the optimizer has to take it itself."""
        if self._is_first:
            # A scheduler, too, wants to see it. It may be the first one of a run that goes on.
            self._is_first = False
            return False
        groups = self.groups()
        if groups is None or any(value is None or value.is_sparse for value in gradient):
            return False
        take_steps([(group, [gradient[place] for place in group.positions]) for group in groups])  # type: ignore[misc]
        return True

    def groups(self) -> "list[KernelGroup] | None":
        """Return what a step consists of, the same list as long as nothing changes but values.

        None where the optimizer has to take the next step itself. Every step looks whether the optimizer still has the
        objects that the list was made of: a user may regroup parameters, replace what is kept of them, add hooks.
        """
        if self._is_first or self._rule is None:
            return None
        if self._same is None or not self._same() or not self._same_forms(self._tensors):
            self._groups = None if has_step_hooks(self.optimizer) else self._find(self._rule)
            # Finding may put what is kept into its parameter's layout.
            self._same = SameObjects(self._parts)
            kept = [value for group in self._groups or () for value in group.vectors.values()]
            self._tensors = [*self._parameters, *chain(*kept)]
            self._same_forms = SameForms(self._tensors)
        return self._groups

    def _parts(self) -> list[Any]:
        """Return what the list of calls was made of, with the settings by which a kernel may take its steps or not."""
        keys, groups = self._deciding, self.optimizer.param_groups
        return [*parts_of_step(self.optimizer), *[group.get(key) for group in groups for key in keys]]

    def mend(self) -> None:
        """Let torch's fused kernels be right where the optimizer takes a step itself.

        What is kept of a parameter has the parameter's layout. A group in which some parameters had no gradient yet is
        taken by a loop, unless the optimizer counts steps: then it makes their state before it calls the kernel. The
        kernels fail at both, in silence at the first.
        """
        rule = self._rule
        if rule is None:
            return
        for group in self.optimizer.param_groups:
            if not group.get("fused"):
                continue
            states = [self.optimizer.state.get(entry, {}) for entry in group["params"]]
            for parameter, state in zip(group["params"], states, strict=True):
                for name, value in state.items():
                    if name != COUNTER and isinstance(value, Tensor) and value.shape == parameter.shape:
                        state[name] = aligned(value, parameter)
            names = rule.names(group)
            has_state = {state.get(name) is not None for state in states for name in names}
            if COUNTER not in names and len(has_state) > 1:
                group["fused"] = False

    def _find(self, rule: rules.OptimizerRule) -> "list[KernelGroup] | None":
        """Look up the state of all groups; None unless every one has a kernel and a state."""
        self.mend()
        positions = {id(parameter): position for position, parameter in enumerate(self._parameters)}
        groups: list[KernelGroup] = []
        for param_group in self.optimizer.param_groups:
            parameters, names = param_group["params"], rule.names(param_group)
            states = [self.optimizer.state.get(parameter, {}) for parameter in parameters]
            has_kernel = [bool(param_group.get(name)) for name in _SWITCHES] == [True, False, False]
            has_kernel = has_kernel and len({(parameter.dtype, parameter.device) for parameter in parameters}) == 1
            has_kernel = has_kernel and all(id(x) in positions and _has_kernel(x) for x in parameters)
            if not has_kernel or not all(map(partial(_fits, names), states, parameters)):
                return None
            vectors = {name: [state[name] for state in states] for name in names}
            places = [positions[id(parameter)] for parameter in parameters]
            groups.append(KernelGroup(rule, param_group, places, [*parameters], vectors, vectors.get(COUNTER, [])))
        # What no group holds the optimizer does not step.
        is_each_once = sum(len(group.positions) for group in groups) == len(positions)
        return groups if groups and is_each_once else None


def _fits(names: Sequence[str], state: dict[str, Any], parameter: Tensor) -> bool:
    """Return whether a kernel may read what is kept of a parameter, of whose size and type it takes all for granted."""
    like = parameter.shape, parameter.stride(), parameter.dtype, parameter.device
    kept = {name: x for name in names if isinstance(x := state.get(name), Tensor)}
    forms = [(x.shape, x.stride(), x.dtype, x.device) == like for name, x in kept.items() if name != COUNTER]
    return len(kept) == len(names) and all(forms) and all(kept[name].numel() == 1 for name in kept if name == COUNTER)


def _rule_with_kernels(optimizer: Optimizer) -> rules.OptimizerRule | None:
    rule = RULES.get(type(optimizer))
    return rule if rule is not None and rule.kernel is not None else None


def _has_kernel(x: Tensor) -> bool:
    return type(x) is nn.Parameter and x.is_floating_point() and x.device.type in ("cpu", "cuda")


def aligned(value: Tensor, like: Tensor) -> Tensor:
    """Return a gradient in its parameter's order, in which the kernels read it whatever its own strides are.

    Args:
        value: the gradient; a sparse one has no strides, and stays.
        like: the parameter, of the same shape.

    Example:
        >>> aligned(torch.ones(1, 2).expand(3, 2), torch.ones(3, 2)).stride()
        (2, 1)
    """
    return value if value.is_sparse or value.stride() == like.stride() else torch.empty_like(like).copy_(value)


# Of the factors: a gradient that is not finite with this one is no overflow of fp16.
SMALLEST = 2.0**-24


class LossScale:
    """The factor of one problem's loss, as large as its gradients stay finite (as `torch.amp.GradScaler`).

    Each problem has its own: an overflow in one does not touch the gradients of another. A hypergradient's pullback
    sees cotangents without the factor.

    Args:
        value: the first factor.
        growth_interval: finite steps in a row after which it doubles.

    Source: Micikevicius et al. 2018, Mixed Precision Training, section 3.2.

    Example:
        >>> scale = LossScale(8.0)
        >>> scale.accepts([torch.tensor([float("inf")])]), scale.value
        (False, 4.0)
    """

    def __init__(self, value: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.value = value
        self._growth_interval = growth_interval
        self._num_finite = 0

    def unscaled(self, gradient: Gradient) -> list[Tensor | None]:
        """Return the gradient of the loss from that of the scaled one."""
        return [None if tensor is None else tensor / self.value for tensor in gradient]

    def accepts(self, gradient: Gradient) -> bool:
        """Say whether a gradient is finite, and adapt the factor: to a half if it is not.

        One that is not finite with the smallest factor either is accepted: else a NaN would end all steps unnoticed.

        Cost: a transfer from the device.
        """
        norms = torch._foreach_norm([values_of(tensor) for tensor in gradient if tensor is not None], float("inf"))
        is_finite = not norms or bool(torch.stack(list(norms)).isfinite().all())
        if not is_finite and self.value > SMALLEST:
            self.value, self._num_finite = self.value / 2, 0
            return False
        self._num_finite += 1
        if self._num_finite == self._growth_interval:
            self.value, self._num_finite = self.value * 2, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the factor and the count."""
        return {"value": self.value, "num_finite": self._num_finite}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self.value, self._num_finite = state["value"], state["num_finite"]


class OptimizerStep:
    """Takes the optimizer steps of one problem.

    Args:
        name: the problem's, for messages.
        theta: its parameters by name.
        optimizer: of them, or what makes one; None where it is never stepped.
        scheduler: makes one of the optimizer; None keeps its learning rate.
        settings: the problem's.

    Raises:
        ConfigError: the optimizer or the scheduler is of a wrong kind, or does not fit the settings.
    """

    def __init__(
        self, name: str, theta: Mapping[str, Tensor], optimizer: Any, scheduler: Any, settings: ProblemSettings
    ) -> None:
        key, is_stepped = f"problems.{name}", optimizer is not None
        for user, value in (("a scheduler", scheduler), ("reset_to", settings.reset_to)):
            require(is_stepped or value is None, f"{key}.optimizer", None, f"an optimizer, since {user} is set")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            optimizer = made(f"{key}.optimizer", optimizer, theta.values(), "a torch optimizer", Optimizer)
        groups = [] if optimizer is None else optimizer.param_groups
        held = {id(parameter) for group in groups for parameter in group["params"]}
        missing = next((name for name, tensor in theta.items() if groups and id(tensor) not in held), None)
        # It would step other parameters, or nothing.
        expected, advice = f"one of all parameters, '{missing}' too", "Pass a callable: optimizer=partial(SGD, lr=0.1)."
        require(missing is None, f"{key}.optimizer", optimizer, expected, advice)
        is_plain = not any(group.get("differentiable") for group in groups)
        require(is_plain, f"{key}.optimizer.differentiable", True, "false", "Unrolled differentiates steps by itself.")
        built = None if scheduler is None else made(f"{key}.scheduler", scheduler, optimizer, "a scheduler")
        check_scheduler(name, built, optimizer, settings.scheduler_interval)
        roles, expected = settings.optimizer_roles, "an optimizer whose settings they are"
        advice = "Give the problem an optimizer: optimizer='sgd', lr=0.1."
        require(bool(groups or not roles), f"{key}.optimizer_roles", roles, expected, advice)
        known = [setting for setting, value in groups[0].items() if is_number(value)] if groups else []
        for setting in settings.optimizer_roles:
            require(setting in known, f"{key}.optimizer.{setting}", "a problem", f"one of {', '.join(known)}")
        self._name, self.scheduler, self._settings = name, built, settings
        self._optimizer: Any = optimizer
        self.loss_scale = LossScale() if settings.precision == "fp16" else None
        self.evaluates_again = optimizer is not None and needs_closure(optimizer)
        self._parameters: tuple[Tensor, ...]
        self._shards: Shards | None = None
        self._fused: FusedStep

    def bind(self, parameters: tuple[Tensor, ...], shards: Shards | None) -> None:
        """Step these parameters from now on.

        Args:
            parameters: those that are trained, in order.
            shards: their division among ranks; None where they are whole.
        """
        self._parameters, self._shards = parameters, shards
        self._bind_kernel()

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; one that is put in its place steps from then on."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._bind_kernel()

    def __call__(self, gradient: Gradient, rates: Rates | None = None, evaluate: Evaluate | None = None) -> Any:
        """Take one step; in fp16 none, if the gradient has overflown. Arguments and value as for `Problem.step`."""
        if self.loss_scale is not None and not self.loss_scale.accepts(gradient):
            # An overflow: the factor is smaller from now on.
            return None
        gradient, norm = self.clip(gradient if self.evaluates_again else self.hooked(gradient))
        if rates is not None:
            self._step_with(gradient, rates)
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

    def hooked(self, gradient: Gradient) -> Gradient:
        """Return what hooks that a user has put after the accumulation of gradients (`Tensor.grad`) make of them."""
        if not any(map(_HOOKS, self._parameters)):
            return gradient
        # A hook may write into the tensor, which others have kept.
        self._set_gradient([None if slope is None else slope.clone() for slope in gradient])
        for parameter in self._parameters:
            for hook in [*(parameter._post_accumulate_grad_hooks or {}).values()]:
                if parameter.grad is not None:
                    hook(parameter)
        hooked = [parameter.grad for parameter in self._parameters]
        self._clear_gradient()
        return hooked

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
        with noted(lambda: Call(f"problems.{self._name}.scheduler", self.scheduler, advice=_SCHEDULER_ADVICE)):
            self.scheduler.step(*objective)

    def clip(self, gradient: Gradient) -> tuple[Gradient, Tensor | None]:
        """Return the gradient within `gradient_clip_norm`, and its norm before (mean over tasks) if that is set."""
        largest = self._settings.gradient_clip_norm
        if largest is None:
            return gradient, None
        if self._shards is None:
            limited, norm = clipped(gradient, largest, self._settings.tasks)
        else:
            limited, norm = clipped(gradient, largest, total=partial(self._shards.total, like=self._parameters))
        return limited, norm.mean()

    def pure(self, theta: Vector, gradient: Gradient, state: Sequence[State], hyperparameters: Rates) -> Stepped:
        """Return parameters and optimizer state after a step; differentiable, and nothing is changed.

        Args:
            theta: the parameters, one tensor each.
            gradient: before clipping.
            state: of the optimizer, one a parameter.
            hyperparameters: one mapping per parameter.

        Raises:
            ConfigError: the optimizer has no pure form.
        """
        return self._updated(theta, self.clip(gradient)[0], state, hyperparameters)

    def pull_back(
        self,
        theta: Sequence[Tensor],
        gradient: Gradient,
        state: Sequence[State],
        hyperparameters: Rates,
        cotangent: list[Tensor],
        of_state: list[dict[str, Tensor]] | None = None,
    ) -> rules.StepCotangents:
        """Return the derivative of a pure step, transposed, times cotangents of what it returns.

        Arguments as for `pure`, and the cotangents as for `mlotool.problem.optimizers.rule.pull_back`.
        """
        clip = None if self._settings.gradient_clip_norm is None else self.clip
        rule = find_rule(self._name, self._optimizer)
        step = rules.StepArguments(rule, theta, gradient, state, hyperparameters, clip)
        return rules.pull_back(step, cotangent, of_state)

    def again(self, theta: Vector, gradient: Gradient, state: States, rates: Rates, inputs: Vector) -> Stepped:
        """Return parameters and state after a step that was taken, as `Unroll.replay`: to the bit, nothing is changed.

        Arguments as for `pure`; the inputs, which shape the problem, shape no update.
        """
        return replayed_step(self._optimizer, self._parameters, theta, self.clip(gradient)[0], state, rates)

    def hyperparameters(self) -> tuple[Hyperparameters, ...]:
        """Return a copy of the optimizer's current hyperparameters, one mapping per parameter of theta."""
        rates: dict[int, Hyperparameters] = {}
        for group in self._optimizer.param_groups:
            # A scheduler fills a rate that is a tensor in place.
            values = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
            rates.update(dict.fromkeys(map(id, values.pop("params")), values))
        return tuple(rates[id(parameter)] for parameter in self._parameters)

    def next_hyperparameters(self, count: int) -> list[tuple[Hyperparameters, ...]]:
        """Return those of the next `count` steps, as the scheduler will set them; nothing is changed."""
        if not self.has_schedule:
            return [self.hyperparameters()] * count
        # Both in one copy, so that the copied scheduler sets the copied optimizer.
        twin = copy.copy(self)
        kept = [value for state in self._optimizer.state.values() for value in state.values()]
        memo = {id(value): value for value in (*self._parameters, *kept) if isinstance(value, Tensor)}
        twin._optimizer, twin.scheduler = copy.deepcopy((self._optimizer, self.scheduler), memo)
        settings: list[tuple[Hyperparameters, ...]] = []
        with warnings.catch_warnings():
            # torch warns of a scheduler that steps without its optimizer.
            warnings.simplefilter("ignore")
            for _ in range(count):
                settings.append(tuple(map(dict, twin.hyperparameters())))
                twin.scheduler.step()  # type: ignore[union-attr]
        return settings

    def state(self) -> tuple[State, ...]:
        """Return a copy of the optimizer's state, one mapping per parameter of theta."""
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
        if self._optimizer is None:
            return
        is_open = self._shards is None and _rule_with_kernels(self._optimizer) is not None
        # By torch's fused kernel, where its user has left the choice to torch.
        for group in self._optimizer.param_groups if is_open else ():
            is_free = group.get("fused") is None and group.get("foreach") is None and not group.get("capturable")
            if is_free and all(map(_has_kernel, group["params"])):
                group["fused"] = True
        self._fused = FusedStep(self._optimizer, self._parameters)

    def _updated(self, theta: Vector, gradient: Gradient, state: Sequence[State], hyperparameters: Rates) -> Stepped:
        update = find_rule(self._name, self._optimizer).update
        new_theta, new_state = [], []
        for point, slope, old, rates in zip(theta, gradient, state, hyperparameters, strict=True):
            moved, kept = (point, old) if slope is None else update(point, slope, old, rates)
            new_theta.append(moved)
            new_state.append(kept)
        return new_theta, new_state

    def _step_with(self, gradient: Gradient, hyperparameters: Rates) -> None:
        with torch.no_grad():
            theta, states = self._updated(self._parameters, gradient, self.state(), hyperparameters)
            for parameter, slope, moved, state in zip(self._parameters, gradient, theta, states, strict=True):
                if slope is not None:
                    parameter.copy_(moved)
                    self._optimizer.state[parameter] = dict(state)

    def _by_optimizer(self, gradient: Gradient) -> None:
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

    def _set_gradient(self, gradient: Gradient) -> None:
        for parameter, value in zip(self._parameters, gradient, strict=True):
            if value is not None and self._shards is not None:
                value = self._shards.put_together(value, parameter)
            parameter.grad = None if value is None else aligned(value, parameter)

    def _clear_gradient(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def clipped(
    gradient: Gradient,
    max_norm: float,
    num_tasks: int | None = None,
    total: Callable[[Gradient], Tensor] | None = None,
) -> tuple[list[Tensor | None], Tensor]:
    """Return the gradient with a 2-norm of at most `max_norm`, and its norm before.

    Args:
        gradient: one tensor per parameter; None where it is unused.
        max_norm: as for `torch.nn.utils.clip_grad_norm_`.
        num_tasks: length of the leading task axis, each of which is clipped by itself; None without one.
        total: where tensors are divided among ranks, returns the sum of the squares of all elements, from the squares
            of this rank's part of each tensor.

    Returns:
        The gradient, and the norm: 0-D, or one a task.
    """
    start = 0 if num_tasks is None else 1
    # Of complex numbers, those of their sizes.
    values = [None if tensor is None else values_of(tensor) for tensor in gradient]
    sizes = [value.abs() if value is not None and value.is_complex() else value for value in values]
    squares = [None if size is None else size.square().flatten(start).sum(start) for size in sizes]
    there = [square for square in squares if square is not None]
    norm = rules.safe_sqrt(torch.stack(there).sum(0) if total is None else total(squares))
    factor = (max_norm / (norm + 1e-6)).clamp_max(1.0)
    return [None if tensor is None else tensor * _on_axis(factor, tensor) for tensor in gradient], norm


def replayed_step(
    optimizer: Optimizer,
    parameters: Vector,
    theta: Vector,
    gradient: Gradient,
    state: Sequence[State],
    hyperparameters: Rates,
) -> Stepped:
    """Return parameters and optimizer state after a step; the optimizer and its parameters stay as they are.

    Args:
        optimizer: of torch.
        parameters: its parameters, in the order of the others; only to tell which is in which group.
        theta: their values before the step.
        gradient: after clipping; None of a parameter that is left alone.
        state: of the optimizer before the step, one mapping per parameter.
        hyperparameters: at the step, one mapping per parameter.

    Example:
        >>> parameter = nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([parameter], lr=0.5)
        >>> rates = [{"lr": 0.5}]
        >>> replayed_step(optimizer, [parameter], [torch.full((1,), 3.0)], [torch.ones(1)], [{}], rates)[0]
        [tensor([2.5000])]
    """
    copies = [nn.Parameter(tensor.detach().clone()) for tensor in theta]
    for parameter, slope in zip(copies, gradient, strict=True):
        parameter.grad = None if slope is None else aligned(slope, parameter)
    # A deep copy has no hooks; in the place of parameters and state it has those of the step.
    kept = defaultdict(dict, {twin: copied(entry) for twin, entry in zip(copies, state, strict=True) if entry})
    memo = {id(parameter): twin for parameter, twin in zip(parameters, copies, strict=True)}
    twin = copy.deepcopy(optimizer, {id(optimizer.state): kept, **memo})
    rates = dict(zip(copies, hyperparameters, strict=True))
    for group in twin.param_groups:
        members = [parameter for parameter in group["params"] if parameter in rates]
        group.update({**(rates[members[0]] if members else {}), "params": members})
    twin.step()
    return [entry.detach() for entry in copies], [dict(kept.get(entry, {})) for entry in copies]


def _on_axis(factor: Tensor, tensor: Tensor) -> Tensor:
    """Return `factor`, 0-D or one a task, so that it multiplies a tensor with a leading task axis."""
    return factor if factor.dim() == 0 else factor.reshape(factor.shape + (1,) * (tensor.dim() - factor.dim()))
