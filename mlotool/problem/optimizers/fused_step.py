"""Steps by torch's fused kernels, called directly and not through `optimizer.step`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mlotool.core.gradient import Recording
from mlotool.core.unchanged import SameForms, SameObjects
from mlotool.problem.optimizers.registry import RULES, has_step_hooks, parts_of_step
from mlotool.problem.optimizers.rule import COUNTER, OptimizerRule

_DEVICES = ("cpu", "cuda")
_SWITCHES = ("fused", "capturable", "differentiable")


def prefer_fused_kernels(optimizer: Optimizer) -> None:
    """Let an optimizer take its steps by torch's fused kernel where its user has left the choice to torch."""
    for group in optimizer.param_groups if _rule_with_kernels(optimizer) else ():
        is_open = group.get("fused") is None and group.get("foreach") is None
        is_plain = not group.get("capturable")
        if is_open and is_plain and all(_has_kernel(parameter) for parameter in group["params"]):
            group["fused"] = True


@dataclass(slots=True)
class KernelGroup:
    """A group of an optimizer, with its tensors in the order of the kernel's arguments.

    Args:
        rule: of the optimizer, with kernels.
        param_group: the optimizer's own; a scheduler changes its values in place.
        positions: of its parameters' gradients.
        parameters: its parameters.
        vectors: by name of a state, one tensor a parameter.
        counts: the tensors that count steps, which a step adds one to.

    Attributes:
        kept: the lists of `vectors`, as the kernels take them.
        ones: to count steps by: adding a number to four counts takes 15 us more than adding tensors.
    """

    rule: OptimizerRule
    param_group: dict[str, Any]
    positions: list[int]
    parameters: list[Tensor]
    vectors: dict[str, list[Tensor]]
    counts: list[Tensor]
    kept: list[list[Tensor]] = field(init=False)
    ones: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.kept = [self.vectors.get(name, []) for name in self.rule.state]
        self.ones = [torch.ones_like(count) for count in self.counts]

    def step(self, gradient: list[Tensor]) -> None:
        """Take a step along the gradients of the parameters."""
        if self.counts:
            torch._foreach_add_(self.counts, self.ones)
        assert self.rule.kernel is not None
        kernel, settings = self.rule.kernel(self.param_group)
        kernel.in_place(self.parameters, gradient, *self.kept, **settings)

    def kind(self) -> tuple[Any, ...]:
        """Return what groups have in common whose steps may be one call, by the settings that they have now."""
        like, settings = self.parameters[0], map(self.param_group.get, self.rule.settings)
        values = [tuple(value) if isinstance(value, list) else value for value in settings]
        return self.rule, like.dtype, like.device, *self.vectors, *values


KernelStep = tuple[KernelGroup, list[Tensor]]
"""A group of an optimizer, and the gradients of its parameters."""


def take_steps(steps: Sequence[KernelStep]) -> None:
    """Take steps, of one problem or of several."""
    with Recording(False):
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
        self._parameters = parameters
        self._rule = rule = _rule_with_kernels(optimizer)
        self._deciding = () if rule is None else (*_SWITCHES, *rule.deciding)
        self._groups: list[KernelGroup] | None = None
        self._same: SameObjects | None = None
        self._tensors: list[Tensor] = []
        self._same_forms = SameForms([])
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
        given = [aligned(value, like) for value, like in zip(given, self._parameters, strict=True)]
        return [(group, [given[place] for place in group.positions]) for group in found]

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

    def _find(self, rule: OptimizerRule) -> "list[KernelGroup] | None":
        """Look up the state of all groups; None unless every one has a kernel and a state."""
        optimizer = self.optimizer
        self.mend()
        positions = {id(parameter): position for position, parameter in enumerate(self._parameters)}
        found: list[KernelGroup] = []
        for param_group in optimizer.param_groups:
            parameters = param_group["params"]
            is_fused, *others = map(param_group.get, _SWITCHES)
            if not is_fused or any(others) or not parameters:
                return None
            names = rule.names(param_group)
            states = [optimizer.state.get(parameter, {}) for parameter in parameters]
            is_whole = all(isinstance(state.get(name), Tensor) for state in states for name in names)
            has_places = all(id(parameter) in positions for parameter in parameters)
            if not (is_whole and has_places and _are_alike(parameters)):
                return None
            if not all(_fits(state, names, parameter) for parameter, state in zip(parameters, states, strict=True)):
                return None
            vectors = {name: [state[name] for state in states] for name in names}
            places = [positions[id(parameter)] for parameter in parameters]
            found.append(KernelGroup(rule, param_group, places, [*parameters], vectors, vectors.get(COUNTER, [])))
        # What no group holds the optimizer does not step.
        is_each_once = sum(len(group.positions) for group in found) == len(positions)
        return found if found and is_each_once else None


def _fits(state: dict[str, Any], names: Sequence[str], parameter: Tensor) -> bool:
    """Return whether a kernel may read what is kept of a parameter, of whose size and type it takes all for granted."""
    like = parameter.shape, parameter.stride(), parameter.dtype, parameter.device
    return all(
        value.numel() == 1 if name == COUNTER else (value.shape, value.stride(), value.dtype, value.device) == like
        for name, value in ((name, state[name]) for name in names)
    )


def _rule_with_kernels(optimizer: Optimizer) -> OptimizerRule | None:
    rule = RULES.get(type(optimizer))
    return rule if rule is not None and rule.kernel is not None else None


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
