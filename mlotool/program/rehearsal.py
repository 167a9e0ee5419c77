"""A trial evaluation of a loss before the first step, after which nothing has changed."""

import warnings
from collections.abc import Iterable, Sequence, Set
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mlotool.core.errors import ConfigError
from mlotool.core.gradient import values_of
from mlotool.core.loss_output import LossOutput
from mlotool.core.replay import RandomState
from mlotool.core.unchanged import is_same, restore_torch_settings, torch_settings
from mlotool.core.user_code import WrongResultError, is_of_user, named, note
from mlotool.problem.problem import Problem
from mlotool.program.engine import Engine
from mlotool.program.loss_plan import LossPlan, Values

MAX_DIFFERENCE = 1e-3
"""Between two evaluations of a loss, relative to it: kernels on a GPU add in another order each time."""

# How Python sees `tensor.requires_grad_()` and `tensor.requires_grad = ..`.
_SETTERS = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


def rehearsed_loss(
    engine: Engine,
    number: int,
    solved: Set[int],
    shaping: Set[int],
    batch: Any,
    *,
    is_read: bool = False,
) -> LossOutput:
    """Return a loss in training mode, with a graph. Parameters and buffers are copies, solutions have no backwards.

    Args:
        engine: of the program.
        number: of the problem.
        solved: numbers of the problems whose solutions its total gradient passes through.
        shaping: numbers of the problems that shape it.
        batch: the problem's batch.
        is_read: whether another problem reads its solution, so that a pullback may evaluate the loss again, and
            count on the same value.

    Raises:
        ConfigError: the loss has changed parameters, or its forward has made some.
        WrongResultError: its gradient cannot be taken, or another evaluation gives another loss.
    """
    problem, values = engine.problems[number], engine.nothing()
    algorithm = problem.hypergradient
    is_repeated = is_read and algorithm is not None and not algorithm.is_constant
    if not is_repeated or algorithm is None or algorithm.is_zeroth_order:
        # No pullback takes the loss's gradient with respect to their parameters.
        shaping = frozenset()
    players = dict.fromkeys([number, *(engine.numbers[role.problem] for role in problem.roles.values())])
    names: list[tuple[Tensor, str, str]] = []
    for player in players:
        other, is_leaf = engine.problems[player], player == number or player in solved or player in shaping
        tensors = [each.clone().requires_grad_(is_leaf) for each in other.current()]
        names += [(tensor, other.name, key) for key, tensor in zip(other.theta, tensors, strict=True)]
        values[player] = tensors
    before = {player: _parameters(engine.problems[player].module) for player in players}
    is_users = is_of_user(problem.loss, *(engine.problems[each].module for each in players))
    random, plan = (
        RandomState(tuple(device for each in engine.problems for device in each.devices)),
        engine.losses[number],
    )
    with torch.enable_grad(), _Guard(names) if is_users else nullcontext():
        settings = torch_settings()
        output = plan(values, batch)
        changed = restore_torch_settings(settings)
    if changed:
        error = WrongResultError(
            f"its loss, and {changed[0]} changed for all that follows",
            "that torch's settings stay as they were",
            f"Use a context (with torch.no_grad():, with torch.device(...):), or call {changed[0]} where the package "
            "is imported.",
        )
        note(error, lambda: plan.call_of(batch))
        raise error
    for player in players:
        other, given = engine.problems[player], values[player]
        assert given is not None
        for key, now, tensor in zip(other.theta, given, other.current(), strict=True):
            if not is_same(now, tensor):
                raise ConfigError(
                    f"problems.{problem.name}.loss: {named(problem.loss)} has changed the parameter '{key}' of "
                    f"'{other.name}'; expected a pure function, since a step may evaluate a loss many times. Leave "
                    "steps to the optimizer, and bounds to the module's forward."
                )
        made = _parameters(other.module) - before[player]
        if made:
            raise ConfigError(
                f"problems.{other.name}.module: {named(other.module)} has made the parameter '{min(made)}' in "
                "its forward; expected all of them in __init__, since no optimizer knows of this one. Make it there."
            )
    if is_users:
        try:
            if is_repeated:
                _check_repeated(plan, values, batch, output.loss, random)
            if output.loss.requires_grad:
                _check_backward(engine, plan, values, output.loss, shaping)
                if _is_evaluated_elsewhere(problem):
                    _check_elsewhere(engine, plan, values, batch, random)
        except Exception as error:
            note(error, lambda: plan.call_of(batch))
            raise
    return output


class _Guard(TorchFunctionMode):
    """Refuses, where it happens, that a loss freezes parameters or thaws them.

    Afterwards it would not show: those of other problems are constants in this evaluation, and are not in a pullback.
    """

    def __init__(self, tensors: Iterable[tuple[Tensor, str, str]]) -> None:
        super().__init__()
        self._names = {id(tensor): (player, key) for tensor, player, key in tensors}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if func in _SETTERS and id(args[0]) in self._names:
            value = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            if not value or not args[0].requires_grad:
                player, key = self._names[id(args[0])]
                raise RuntimeError(
                    f"requires_grad of the parameter '{key}' of '{player}' is set to {bool(value)}; a loss leaves that "
                    "to mlotool. Take stop_gradient(role(x)) (from mlotool) for what is to have no gradient, and "
                    "freeze parameters in the module's __init__"
                )
        return func(*args, **kwargs)


def _check_repeated(plan: LossPlan, values: Values, batch: Any, loss: Tensor, random: RandomState) -> None:
    """Refuse a loss that has another value at the same parameters, batch and random numbers of torch."""
    try:
        with torch.no_grad(), random.replayed():
            again = plan(values, batch).loss
    except RuntimeError:
        # A loss that takes gradients itself, a penalty on them for instance, has none without a graph.
        with random.replayed():
            again = plan(values, batch).loss
    first, second = float(loss.detach().mean()), float(again.detach().mean())
    if abs(first - second) > MAX_DIFFERENCE * max(abs(first), abs(second)):
        raise WrongResultError(
            f"{first:.6g}, and {second:.6g} for the same batch, parameters and random numbers of torch",
            "the same value, since a hypergradient evaluates a loss many times",
            "Draw by torch's own generator (torch.rand) in place of numpy's, Python's or another one, and let no value "
            "that a call leaves behind, in a variable or an attribute of a module, change the next one.",
        )


def _check_backward(engine: Engine, plan: LossPlan, values: Values, loss: Tensor, shaping: Set[int]) -> None:
    """Take the gradient of a loss in which code of the user's has a part: that it can be, and that there is one."""
    problem = plan.problem
    taken = [
        (tensor, number in shaping)
        for number, tensors in enumerate(values)
        for tensor in tensors or ()
        if tensor.requires_grad
    ]
    foreign = _foreign_parameter(loss)
    if foreign is not None:
        raise WrongResultError(*_told_foreign(engine, foreign))
    slopes = torch.autograd.grad(loss, [leaf for leaf, _ in taken], allow_unused=True)
    # Where nothing but what shapes it moves the loss, no step would.
    gradient = [slope for slope, (_, is_shaping) in zip(slopes, taken, strict=True) if not is_shaping]
    found = [values_of(each) for each in gradient if each is not None]
    if not found:
        raise WrongResultError(
            "a tensor whose gradient does not reach the parameters",
            f"a loss that depends on the parameters of '{problem.name}' through the modules that it was given",
            "Call those modules themselves, no copies of them.",
        )
    if problem.settings.precision == "fp16":
        # Without its loss scale it overflows, or vanishes.
        return
    if not bool(loss.isfinite().all()):
        # It is told itself.
        return
    if not all(bool(each.isfinite().all()) for each in found):
        raise WrongResultError(
            "a loss whose gradient is not finite before the first step",
            "finite numbers",
            "Look for sqrt, norm, log or a division at zero: add a small number inside, as in (x + 1e-12).sqrt().",
        )
    if not any(bool(each.any()) for each in found):
        warnings.warn(
            f"problems.{problem.name}.loss: the gradient of {named(problem.loss)} is exactly 0 at its first batch; "
            "expected that it moves the parameters. Look for a factor of 0, a clamp or relu that cuts all of it, and "
            "weights that all begin at 0.",
            stacklevel=2,
        )


def _is_evaluated_elsewhere(problem: Problem) -> bool:
    """Return whether gradients of a loss are taken at other parameters than those in its module at that time."""
    algorithm = problem.hypergradient
    return algorithm is not None and (algorithm.sees_steps or algorithm.needs_full_precision)


def _check_elsewhere(engine: Engine, plan: LossPlan, values: Values, batch: Any, random: RandomState) -> None:
    """Refuse a loss whose backward pass looks up the module's parameters again, as torch.utils.checkpoint does.

    A module holds other parameters only while it is called: a backward pass later would mix them with its own.
    """
    if plan.problem.settings.precision == "fp16":
        return
    moved = {player: [_moved(tensor) for tensor in tensors] for player, tensors in enumerate(values) if tensors}
    there: Values = [moved.get(player) for player in range(len(values))]
    leaves = [tensor for tensors in moved.values() for tensor in tensors if tensor.requires_grad]

    def gradient() -> Sequence[Tensor]:
        with random.replayed():
            return torch.autograd.grad(plan(there, batch).loss, leaves, materialize_grads=True)

    found = gradient()
    slots = [engine.problems[player].slots for player in moved]
    own = [each.put(tensors) for each, tensors in zip(slots, moved.values(), strict=True)]
    try:
        expected = gradient()
    finally:
        for each, tensors in zip(slots, own, strict=True):
            each.put_back(tensors)
    size = max(float(each.norm()) for each in expected)
    error = max(float((x - y).norm()) for x, y in zip(found, expected, strict=True))
    if error > MAX_DIFFERENCE * size:
        raise WrongResultError(
            "a loss whose backward pass looks the module's parameters up again (the gradient is off by "
            f"{error / size:.1g} of its size)",
            "that it takes them from the evaluation, since this hypergradient takes gradients at other parameters than "
            "those that the module holds",
            "Write mlotool.remat(block, x) for torch.utils.checkpoint.checkpoint(block, x), or remat: auto for the "
            "problem; in an autograd function of your own, save the parameters that its backward reads.",
        )


def _moved(tensor: Tensor) -> Tensor:
    return (1.1 * tensor.detach()).requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor


def _foreign_parameter(loss: Tensor) -> nn.Parameter | None:
    """Return a parameter that a loss depends on and was not given."""
    # What a rehearsal gives are plain tensors.
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            return variable
        waiting += [each for each, _ in node.next_functions]
    return None


def _told_foreign(engine: Engine, parameter: nn.Parameter) -> tuple[str, str, str]:
    """Return what was found, what was expected and what to do."""
    for problem in engine.problems:
        for key, tensor in problem.theta.items():
            if tensor is parameter:
                return (
                    f"a loss that depends on the parameter '{key}' of the module of '{problem.name}' itself",
                    "that a loss takes modules by its roles alone, whose parameters mlotool moves",
                    f"Give the loss a role that '{problem.name}' plays, and call that.",
                )
    return (
        f"a loss that depends on a parameter of shape {tuple(parameter.shape)} which no problem trains",
        "parameters of the problems' modules alone",
        "Make layers in a module's __init__, none in its forward; call requires_grad_(False) on what is to stay.",
    )


def _parameters(module: nn.Module) -> set[str]:
    return {key for key, _ in module.named_parameters()}
