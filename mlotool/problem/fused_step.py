"""Steps of SGD, Adam and AdamW by torch's fused kernels, called directly and not through `optimizer.step`."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from mlotool.core.gradient import Recording
from mlotool.core.unchanged import SameForms, SameObjects

_DEVICES = ("cpu", "cuda")
_GLOBAL_HOOKS = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
_STEPS: dict[Any, Any] = {kind: inspect.unwrap(kind.step) for kind in (SGD, Adam, AdamW)}


def prefer_fused_kernels(optimizer: Optimizer) -> None:
    """Let an optimizer take its steps by torch's fused kernel where its user has left the choice to torch."""
    if type(optimizer) not in (SGD, Adam, AdamW):
        return
    for group in optimizer.param_groups:
        is_open = group.get("fused") is None and group.get("foreach") is None
        is_plain = not group.get("capturable")
        if is_open and is_plain and all(_has_kernel(parameter) for parameter in group["params"]):
            group["fused"] = True


@dataclass(slots=True)
class KernelGroup:
    """A group of an optimizer, with its tensors in the order of the kernel's arguments.

    Args:
        param_group: the optimizer's own; a scheduler changes its values in place.
        positions: of its parameters' gradients.
        parameters: its parameters.
        vectors: by name of a state, one tensor a parameter.
        names: of the states.
        counts: the tensors that count steps, which a step adds one to.
        ones: to count steps by: adding tensors is twice as fast as adding a number.
        has_all: whether these are all parameters, in their order.
    """

    param_group: dict[str, Any]
    positions: list[int]
    parameters: list[Tensor]
    vectors: dict[str, list[Tensor]]
    names: tuple[str, ...]
    counts: list[Tensor]
    ones: list[Tensor]
    has_all: bool


Kernel = Callable[[KernelGroup, list[Tensor]], None]
"""Takes a step of a group along the gradients of its parameters."""

KernelStep = tuple[Kernel, KernelGroup, list[Tensor]]
"""A kernel, a group of an optimizer, and the gradients of its parameters."""


def take_steps(steps: Sequence[KernelStep]) -> None:
    """Take steps, of one problem or of several, in which no parameter is twice.

    Groups with the same settings are one call of their kernel, which goes through its tensors one by one: the bits are
    those of a call for each.
    """
    if not steps:
        return
    with Recording(False):
        for found in _by_kind(steps) if len(steps) > 1 else (steps,):
            kernel, group, gradient = found[0]
            if len(found) > 1:
                group, gradient = _joined([each[1] for each in found]), [*chain(*[each[2] for each in found])]
            kernel(group, gradient)


def _by_kind(steps: Sequence[KernelStep]) -> Iterable[list[KernelStep]]:
    together: dict[Any, list[KernelStep]] = {}
    for step in steps:
        kernel, group, _ = step
        together.setdefault(kind_of(kernel, group), []).append(step)
    return together.values()


def kind_of(kernel: Kernel, group: KernelGroup) -> tuple[Any, ...]:
    """Return what groups have in common whose steps may be one call.

    Args:
        kernel: that of the group's optimizer.
        group: with the settings that it has now.
    """
    like, settings = group.parameters[0], group.param_group
    return kernel, like.dtype, like.device, group.names, *[_hashable(settings.get(name)) for name in _SETTINGS[kernel]]


class FusedStep:
    """Takes an optimizer's steps by its kernel, with the same bits as the optimizer itself would.

    The first step is the optimizer's own, which makes the state; so is the first one after a state was loaded.

    Args:
        optimizer: of any kind; SGD, Adam and AdamW with `fused: true` have a kernel.
        parameters: those of its problem, in the order of their gradients.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        self.optimizer: Any = optimizer
        self._parameters = parameters
        self._step = {SGD: _sgd, Adam: _adam, AdamW: _adam}.get(type(optimizer))
        self._groups: list[tuple[Kernel, KernelGroup]] | None = None
        self._same: SameObjects | None = None
        self._tensors: list[Tensor] = []
        self._same_forms = SameForms([])
        self._is_plain = False
        self._is_first = True

    def __call__(self, gradient: Sequence[Tensor | None]) -> bool:
        """Take a step; return False, with nothing done, where the optimizer has to take it itself."""
        found = self.ready(gradient)
        if found is None:
            return False
        take_steps(found)
        return True

    def ready(self, gradient: Sequence[Tensor | None]) -> "list[KernelStep] | None":
        """Return the calls of the kernel that are a step; None where the optimizer has to take it itself."""
        if self._is_first:
            # A scheduler, too, wants to see it. It may be the first one of a run that goes on.
            self._is_first = False
            return None
        found = self.groups()
        if found is None:
            return None
        given = [value for value in gradient if value is not None and not value.is_sparse]
        if len(given) < len(self._parameters):
            return None
        if not (self._is_plain and all(map(Tensor.is_contiguous, given))):
            given = [aligned(value, like) for value, like in zip(given, self._parameters, strict=True)]
        return [
            (kernel, group, given if group.has_all else [given[position] for position in group.positions])
            for kernel, group in found
        ]

    def groups(self) -> "list[tuple[Kernel, KernelGroup]] | None":
        """Return what a step consists of, the same list as long as nothing changes but values.

        None where the optimizer has to take the next step itself. Every step looks whether the optimizer still has the
        objects that the list was made of: a user may regroup parameters, replace what is kept of them, add hooks.
        """
        if self._is_first or self._step is None:
            return None
        if self._same is None or not self._same() or not self._same_forms(self._tensors):
            self._groups = None if has_step_hooks(self.optimizer) else self._find()
            # Finding may put what is kept into its parameter's layout.
            self._same = SameObjects(self._parts)
            kept = [each for _, group in self._groups or () for each in group.vectors.values()]
            self._tensors = [*self._parameters, *chain(*kept)]
            self._same_forms = SameForms(self._tensors)
            self._is_plain = all(map(Tensor.is_contiguous, self._parameters))
        return self._groups

    def _parts(self) -> list[Any]:
        """Return what the list of calls was made of, with the settings that `_names` reads."""
        keys, groups = _DECIDING[type(self.optimizer)], self.optimizer.param_groups
        return [*parts_of_step(self.optimizer), *[group.get(key) for group in groups for key in keys]]

    def mend(self) -> None:
        """Let torch's fused kernels be right where the optimizer takes a step itself.

        What is kept of a parameter has the parameter's layout, and a group of SGD in which some parameters had no
        gradient yet is taken by a loop: the kernels fail at both, in silence at the first.
        """
        for group in self.optimizer.param_groups if self._step is not None else ():
            if not group.get("fused"):
                continue
            states = [self.optimizer.state.get(each, {}) for each in group["params"]]
            for parameter, state in zip(group["params"], states, strict=True):
                for name, value in state.items():
                    if name != "step" and isinstance(value, Tensor) and value.shape == parameter.shape:
                        state[name] = aligned(value, parameter)
            has_state = [state.get("momentum_buffer") is not None for state in states]
            if group.get("momentum") and any(has_state) and not all(has_state):
                group["fused"] = False

    def _find(self) -> "list[tuple[Kernel, KernelGroup]] | None":
        """Look up the state of all groups; None unless every one has a kernel and a state."""
        optimizer = self.optimizer
        self.mend()
        positions = {id(parameter): position for position, parameter in enumerate(self._parameters)}
        found: list[tuple[Kernel, KernelGroup]] = []
        for param_group in optimizer.param_groups:
            names, parameters = _names(optimizer, param_group), param_group["params"]
            if names is None or not parameters:
                return None
            states = [optimizer.state.get(parameter, {}) for parameter in parameters]
            is_whole = all(isinstance(state.get(name), Tensor) for state in states for name in names)
            has_places = all(id(parameter) in positions for parameter in parameters)
            if not (is_whole and has_places and _are_alike(parameters)):
                return None
            if not all(_fits(state, names, parameter) for parameter, state in zip(parameters, states, strict=True)):
                return None
            vectors = {name: [state[name] for state in states] for name in names}
            counts = vectors.get("step", [])
            ones = [torch.ones_like(count) for count in counts]
            places = [positions[id(parameter)] for parameter in parameters]
            has_all = places == list(range(len(self._parameters)))
            group = KernelGroup(param_group, places, [*parameters], vectors, names, counts, ones, has_all)
            assert self._step is not None
            found.append((self._step, group))
        # What no group holds the optimizer does not step.
        is_each_once = sum(len(group.positions) for _, group in found) == len(positions)
        return found if found and is_each_once else None


def parts_of_step(optimizer: Any) -> list[Any]:
    """Return the objects that an optimizer's step consists of: its method, groups, parameters, what is kept of each.

    Beside them the numbers of hooks; they are small, and equal ones are the same object.
    """
    groups, state = optimizer.param_groups, optimizer.state
    kept = [each for each in state.values() if isinstance(each, dict)]
    return [
        type(optimizer).step,
        vars(optimizer).get("step"),
        *map(len, (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, *_GLOBAL_HOOKS)),
        *groups,
        *chain(*[group["params"] for group in groups]),
        *state,
        *kept,
        *chain.from_iterable(map(dict.values, kept)),
    ]


def has_step_hooks(optimizer: Any) -> bool:
    """Return whether somebody wants to see an optimizer's steps: by hooks, or a method in the place of torch's."""
    own = optimizer.__dict__.get("step")
    kind: Any = type(optimizer)
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or any(_GLOBAL_HOOKS)
        or (own is not None and not _only_counts(own, kind.step))
        or (kind in _STEPS and not _is_torchs(kind, kind.step))
    )


@cache
def _is_torchs(kind: Any, step: Any) -> bool:
    """Return whether nobody has put another method into torch's class."""
    return inspect.unwrap(step) is _STEPS[kind]


def _only_counts(step: Any, wrapped: Any) -> bool:
    """Return whether a method is the one that a scheduler of torch's puts there, to count calls of the class's own."""
    is_torchs = getattr(getattr(step, "__code__", None), "co_filename", "") == lr_scheduler.__file__
    return is_torchs and getattr(step, "__wrapped__", None) is wrapped


def _fits(state: dict[str, Any], names: Sequence[str], parameter: Tensor) -> bool:
    """Return whether a kernel may read what is kept of a parameter, of whose size and type it takes all for granted."""
    like = parameter.shape, parameter.stride(), parameter.dtype, parameter.device
    return all(
        value.numel() == 1 if name == "step" else (value.shape, value.stride(), value.dtype, value.device) == like
        for name, value in ((name, state[name]) for name in names)
    )


_DECIDING: dict[type[Optimizer], tuple[str, ...]] = {
    SGD: ("fused", "capturable", "differentiable", "momentum"),
    Adam: ("fused", "capturable", "differentiable", "amsgrad"),
    AdamW: ("fused", "capturable", "differentiable", "amsgrad"),
}
"""By kind of optimizer, the settings of a group by which a kernel may take its steps or not."""
_OF_SGD: dict[bool, tuple[str, ...]] = {False: (), True: ("momentum_buffer",)}
_OF_ADAM: dict[bool, tuple[str, ...]] = {
    False: ("exp_avg", "exp_avg_sq", "step"),
    True: ("exp_avg", "exp_avg_sq", "step", "max_exp_avg_sq"),
}


def _names(optimizer: Optimizer, param_group: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the names of what the optimizer keeps of each parameter; None where it takes its steps without a kernel.

    Equal ones are the same object.
    """
    if not param_group.get("fused") or param_group.get("capturable") or param_group.get("differentiable"):
        return None
    if type(optimizer) is SGD:
        return _OF_SGD[bool(param_group["momentum"])]
    return _OF_ADAM[bool(param_group["amsgrad"])]


def _has_kernel(parameter: Tensor) -> bool:
    is_plain = type(parameter) is nn.Parameter and parameter.is_floating_point()
    return is_plain and parameter.device.type in _DEVICES


def _are_alike(parameters: Sequence[Tensor]) -> bool:
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
    return len(kinds) == 1 and all(_has_kernel(parameter) for parameter in parameters)


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


def _sgd(group: KernelGroup, gradient: list[Tensor]) -> None:
    param_group = group.param_group
    torch._fused_sgd_(
        group.parameters,
        gradient,
        group.vectors.get("momentum_buffer", []),
        weight_decay=param_group["weight_decay"],
        momentum=param_group["momentum"],
        lr=param_group["lr"],
        dampening=param_group["dampening"],
        nesterov=param_group["nesterov"],
        maximize=param_group["maximize"],
        is_first_step=False,
        grad_scale=None,
        found_inf=None,
    )


def _adam(group: KernelGroup, gradient: list[Tensor]) -> None:
    param_group, vectors = group.param_group, group.vectors
    beta1, beta2 = param_group["betas"]
    torch._foreach_add_(group.counts, group.ones)
    kernel = torch._fused_adamw_ if param_group.get("decoupled_weight_decay") else torch._fused_adam_
    kernel(
        group.parameters,
        gradient,
        vectors["exp_avg"],
        vectors["exp_avg_sq"],
        vectors.get("max_exp_avg_sq", []),
        vectors["step"],
        amsgrad=param_group["amsgrad"],
        lr=param_group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=param_group["weight_decay"],
        eps=param_group["eps"],
        maximize=param_group["maximize"],
        grad_scale=None,
        found_inf=None,
    )


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _joined(groups: Sequence[KernelGroup]) -> KernelGroup:
    """Return groups with the same settings as one."""
    parameters = [*chain(*[each.parameters for each in groups])]
    vectors = {name: [*chain(*[each.vectors[name] for each in groups])] for name in groups[0].vectors}
    counts, ones = [*chain(*[each.counts for each in groups])], [*chain(*[each.ones for each in groups])]
    return replace(groups[0], parameters=parameters, vectors=vectors, counts=counts, ones=ones)


_SETTINGS: dict[Any, tuple[str, ...]] = {
    _sgd: ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize"),
    _adam: ("amsgrad", "lr", "betas", "weight_decay", "eps", "maximize", "decoupled_weight_decay"),
}
"""By kernel, the settings of a group that it takes."""
