"""A trial evaluation of a loss before the first step, after which nothing has changed."""

import warnings
from collections.abc import Iterable, Set
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from mlotool.core.errors import ConfigError
from mlotool.core.gradient import values_of
from mlotool.core.loss_output import LossOutput
from mlotool.core.random_stream import RandomStream
from mlotool.core.replay import RandomState
from mlotool.core.unchanged import is_same, restore_torch_settings, torch_settings
from mlotool.core.user_code import WrongResultError, is_ours, named, note
from mlotool.problem.problem import Problem
from mlotool.program.engine import Engine
from mlotool.program.graph import Graph
from mlotool.program.loss_plan import LossPlan, Values
from mlotool.program.past_slots import PastSlots, foreign_parameter
from mlotool.program.python_state import PythonState

MAX_DIFFERENCE = 1e-3
"""Between two evaluations of a loss, relative to it: kernels on a GPU add in another order each time."""

# How Python sees `tensor.requires_grad_()` and `tensor.requires_grad = ..`.
_SETTERS = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


class Rehearsals:
    """Evaluates losses before the first step.

    Args:
        engine: of the program, whose solutions are at hand.
        graph: of the problems.
        solved: the problems whose solutions others read.
    """

    def __init__(self, engine: Engine, graph: Graph, solved: Set[str]) -> None:
        self._engine, self._graph, self._solved = engine, graph, solved
        # Losses that a hypergradient evaluates, or that read a solution.
        self._waiting = [
            number for name, number in engine.numbers.items() if name in solved or engine.solutions[number]
        ]

    def __call__(self, number: int, batch: Any) -> LossOutput:
        """Return a loss as its next step will meet it.

        Args:
            number: of the problem.
            batch: its batch.
        """
        engine, name = self._engine, self._engine.problems[number].name
        self._waiting = [each for each in self._waiting if each != number]
        read = {each.number for each in engine.solutions[number]}
        shaping = {engine.numbers[each] for each in self._graph.uppers(name)}
        return rehearsed_loss(engine, number, read, shaping, batch, is_read=name in self._solved)

    def once(self, random: RandomStream) -> None:
        """Rehearse the losses that have a part in hypergradients, each on its next batch, unless that was done.

        Left out are those with a part that can only be evaluated in a step: of modules that are sharded,
        layer-parallel, or whose parameters get their shape in the first call.

        Args:
            random: the program's random numbers, which go on as if nothing had been.
        """
        waiting, self._waiting = self._waiting, []
        for number in waiting:
            problem = self._engine.problems[number]
            names = [problem.name, *(role.problem for role in problem.roles.values())]
            players = [self._engine.problems[self._engine.numbers[each]] for each in names]
            if all(map(_can_be_rehearsed, players)):
                devices = tuple({device for each in players for device in each.devices})
                with random, RandomState(devices).replayed(), warnings.catch_warnings():
                    # The steps give them.
                    warnings.simplefilter("ignore")
                    self(number, None if problem.stream is None else problem.stream.peek())


def _can_be_rehearsed(problem: Problem) -> bool:
    is_whole = problem.shards is None and problem.parallel is None
    return is_whole and not any(map(is_lazy, problem.module.parameters()))


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
    modules = [module for player in players for module in engine.problems[player].submodules]
    is_foreign = not is_ours(problem.loss, *modules) or any(map(_has_hooks, modules))
    python = PythonState([engine.problems[player] for player in players])
    random, plan = (
        RandomState(tuple(device for each in engine.problems for device in each.devices)),
        engine.losses[number],
    )
    with torch.enable_grad(), _Guard(names) if is_foreign else nullcontext():
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
    if is_foreign:
        past = PastSlots(engine, plan, values, batch, random, python.restore)
        try:
            if is_repeated:
                _check_repeated(plan, values, batch, output.loss, random)
            if is_repeated or solved or foreign_parameter(output.loss) is not None:
                past.check(output.loss, is_moved=is_repeated and _is_evaluated_elsewhere(problem))
            if output.loss.requires_grad:
                _check_backward(engine, plan, values, output.loss, shaping)
        except Exception as error:
            note(error, lambda: plan.call_of(batch))
            raise
        finally:
            python.restore()
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
    foreign = foreign_parameter(loss)
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
    return algorithm is not None and (
        algorithm.sees_steps or algorithm.needs_full_precision or algorithm.is_zeroth_order
    )


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


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
