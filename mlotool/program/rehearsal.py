"""A trial evaluation of a loss before the first step, after which nothing has changed.

A hypergradient evaluates a loss many times, and a module with other tensors in the places of its parameters and
buffers. What reads the module's own by a list, a closure, a hook or an object that keeps them does not see those, and
nothing would say so. So a loss is evaluated twice with other tensors in the places, which must give the same: the
second time the module's own tensors have other values.
"""

import warnings
from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy

from mlotool.core.errors import ConfigError
from mlotool.core.gradient import values_of
from mlotool.core.loss_output import LossOutput
from mlotool.core.random_stream import RandomStream
from mlotool.core.replay import RandomState
from mlotool.core.unchanged import EVALUATIONS, SAME_OPERATIONS, is_same, restore_torch_settings, torch_settings
from mlotool.core.user_code import WrongResultError, is_ours, named, noted
from mlotool.problem.interface import AbstractZerothOrder
from mlotool.problem.problem import Problem
from mlotool.program.graph import Graph
from mlotool.program.guard import PythonState
from mlotool.program.solution_plan import Engine

_PLACES = "that a module reads self.<name> in each call, since a hypergradient puts other tensors in its place"
_KEEP = "Keep no parameter or buffer in a list, a closure, a hook or another object; make layers in __init__."


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

    def __call__(self, number: int, batch: object) -> LossOutput:
        """Return a loss as its next step will meet it, with a graph, of copies of parameters and buffers.

        Args:
            number: of the problem.
            batch: its batch.

        Raises:
            ConfigError: the loss has changed parameters, or its forward has made some.
            WrongResultError: its gradient cannot be taken, another evaluation gives another loss, or it reads tensors
                past their places.
        """
        self._waiting = [other for other in self._waiting if other != number]
        problem = self._engine.problems[number]
        shaping = {self._engine.numbers[name] for name in self._graph.uppers(problem.name)}
        return _Rehearsal(self._engine, number, batch, shaping, is_read=problem.name in self._solved).output()

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
            players = [self._engine.problems[self._engine.numbers[name]] for name in names]
            if all(_is_whole(player) and not any(map(is_lazy, player.module.parameters())) for player in players):
                devices = tuple({device for player in players for device in player.devices})
                with random, RandomState(devices).replayed(), warnings.catch_warnings():
                    # The steps give them.
                    warnings.simplefilter("ignore")
                    self(number, None if problem.stream is None else problem.stream.peek())


def _is_whole(problem: Problem) -> bool:
    return problem.shards is None and problem.parallel is None


class _Rehearsal:
    """One loss in training mode.

    Args:
        engine: of the program.
        number: of the problem.
        batch: its batch.
        shaping: numbers of the problems that shape it.
        is_read: whether another problem reads its solution, so that a pullback may evaluate the loss again, and
            count on the same value.
    """

    def __init__(self, engine: Engine, number: int, batch: object, shaping: Set[int], *, is_read: bool) -> None:
        self._engine, self._batch, self._plan = engine, batch, engine.losses[number]
        self._problem = engine.problems[number]
        algorithm = self._problem.hypergradient
        self._is_repeated = is_read and algorithm is not None and not algorithm.is_constant
        self._is_moved, self._shaping = False, frozenset[int]()
        if self._is_repeated and algorithm is not None:
            is_estimate = isinstance(algorithm, AbstractZerothOrder)
            # At other parameters than those in its module at that time.
            self._is_moved = is_estimate or algorithm.sees_steps or algorithm.needs_full_precision
            # No pullback of an estimate takes the loss's gradient with respect to their parameters.
            self._shaping = frozenset(() if is_estimate else shaping)
        self._solved = {plan.number for plan in engine.solutions[number]}
        numbers = dict.fromkeys([number, *(engine.numbers[role.problem] for role in self._problem.roles.values())])
        self._players = {player: engine.problems[player] for player in numbers}
        self._leaves = {number, *self._solved, *self._shaping}
        self._values = engine.nothing()
        for player, problem in self._players.items():
            copies = [tensor.clone() for tensor in problem.current()]
            self._values[player] = [copy.requires_grad_(player in self._leaves) for copy in copies]
        buffers = [problem.slots.buffers() for problem in self._players.values()]
        self._buffers = [[x if x is None else x.detach().clone() for x in tensors] for tensors in buffers]
        self._random = RandomState(tuple(device for other in engine.problems for device in other.devices))
        self._python = PythonState([*self._players.values()])

    def output(self) -> LossOutput:
        """Return the loss, checked."""
        modules = [module for player in self._players.values() for module in player.submodules]
        is_foreign = not is_ours(self._problem.loss, *modules) or any(map(_has_hooks, modules))
        before = {player: _names(problem) for player, problem in self._players.items()}
        try:
            with noted(lambda: self._plan.call_of(self._batch)):
                with torch.enable_grad():
                    settings = torch_settings()
                    output = self._plan(self._values, self._batch)
                    changed = restore_torch_settings(settings)
                if changed:
                    returned, advice = f"its loss, but left {changed[0]} changed", "Use a context."
                    raise WrongResultError(returned, "that torch's settings stay as they were", advice)
                self._check_parameters(before)
                if is_foreign:
                    self._check_values(output.loss)
        finally:
            if is_foreign:
                self._python.restore()
        return output

    def _check_parameters(self, before: Mapping[int, set[str]]) -> None:
        for player, problem in self._players.items():
            values = self._values[player] or ()
            for key, value, tensor in zip(problem.theta, values, problem.current(), strict=True):
                if not is_same(value, tensor) or (player in self._leaves and not value.requires_grad):
                    fault = f"problems.{self._problem.name}.loss: {named(self._problem.loss)} has changed the parameter"
                    advice = "Leave steps to the optimizer; write stop_gradient(role(x)) for values without a gradient."
                    raise ConfigError(f"{fault} '{key}' of '{problem.name}'; expected a pure function. {advice}")
            if made := _names(problem) - before[player]:
                fault = f"problems.{problem.name}.module: {named(problem.module)} has made the parameter '{min(made)}'"
                raise ConfigError(f"{fault} in its forward; expected all of them in __init__. Make it there.")

    def _check_values(self, loss: Tensor) -> None:
        if self._is_repeated:
            self._check_repeated(loss)
        parameter = _foreign_parameter(loss)
        if parameter is not None:
            owners = {
                id(x): (problem.name, key) for problem in self._engine.problems for key, x in problem.theta.items()
            }
            name, key = owners.get(id(parameter), ("", ""))
            place = f"the parameter '{key}' of the module of '{name}'"
            place = place if name else f"a parameter of shape {tuple(parameter.shape)} which no problem trains, by"
            advice = (
                "Give the loss a role for its problem, or call requires_grad_(False) on parameters that are not "
                "trained."
            )
            raise WrongResultError(f"a loss that depends on {place} itself", _PLACES, f"{_KEEP} {advice}")
        # Without its loss scale a loss in fp16 overflows or vanishes.
        is_whole = self._problem.settings.precision != "fp16" and all(map(_is_whole, self._players.values()))
        if is_whole and self._is_moved:
            self._check_places()
        if loss.requires_grad:
            self._check_gradient(loss)

    def _check_repeated(self, loss: Tensor) -> None:
        """Refuse a loss that has another value at the same parameters, batch and random numbers of torch."""
        with self._random.replayed():
            again = self._plan(self._values, self._batch).loss
        first, second = loss.detach().mean(), again.detach().mean()
        if not (SAME_OPERATIONS if loss.device.type == "cpu" else EVALUATIONS).covers(first, second):
            values = f"{first:.6g}, and {second:.6g} for the same batch, parameters and random numbers of torch"
            advice = "Use torch's own generator (torch.rand), and let no call change the result of the next one."
            raise WrongResultError(values, "the same value, since a hypergradient evaluates a loss many times", advice)

    def _check_gradient(self, loss: Tensor) -> None:
        """Take the gradient of a loss in which code of the user's has a part: that it can be, and that there is one."""
        # Where nothing but what shapes it moves the loss, no step would.
        own = [player for player in self._players if player not in self._shaping]
        leaves = [tensor for player in own for tensor in self._values[player] or () if tensor.requires_grad]
        slopes = torch.autograd.grad(loss, leaves, allow_unused=True)
        gradient = [values_of(slope) for slope in slopes if slope is not None]
        if not gradient:
            raise WrongResultError(
                "a tensor whose gradient does not reach the parameters",
                f"a loss that depends on the parameters of '{self._problem.name}' through its roles",
                "Call these modules themselves, not copies of them.",
            )
        is_scaled = self._problem.settings.precision == "fp16"
        if not is_scaled and bool(loss.isfinite().all()) and not all(bool(x.isfinite().all()) for x in gradient):
            raise WrongResultError(
                "a loss whose gradient is not finite before the first step",
                "finite numbers",
                "Look for sqrt, norm, log or a division at zero: add a small number inside, as in (x + 1e-12).sqrt().",
            )

    def _check_places(self) -> None:
        """Refuse a loss that the modules' own tensors move, in whose places there are others."""
        tensors = [x for problem in self._players.values() for x in (*problem.own, *problem.slots.buffers())]
        # What is sparse cannot be given other values in place.
        own = list({id(x): x for x in tensors if x is not None and x.layout is torch.strided}.values())
        first, before = self._evaluated(), [x.detach().clone() for x in own]
        try:
            _fill(own, [1.1 * x + 0.01 if x.is_floating_point() else x for x in before])
            second = self._evaluated()
        finally:
            _fill(own, before)
        # A loss that is never the same has no places to be blamed.
        if not _agree(first, second) and _agree(first, self._evaluated()):
            advice = "Write mlotool.remat(block, x) for torch.utils.checkpoint.checkpoint(block, x)."
            returned = "a loss that uses a parameter or a buffer without reading it from the module"
            raise WrongResultError(returned, _PLACES, f"{_KEEP} {advice}")

    def _evaluated(self) -> list[Tensor]:
        """Return loss and gradient with copies in the places, as parameters and buffers were at first."""
        self._python.restore()
        leaves = [x for player in self._players for x in self._values[player] or () if x.requires_grad]
        kept = [(problem.slots, problem.slots.buffers()) for problem in self._players.values()]
        try:
            for (slots, _), buffers in zip(kept, self._buffers, strict=True):
                slots.put_buffers([x if x is None else x.clone() for x in buffers])
            with self._random.replayed(), torch.enable_grad():
                loss = self._plan(self._values, self._batch).loss
                if not loss.requires_grad or any(x._backward_hooks for x in leaves):
                    return [loss.detach()]
                return [loss.detach(), *map(values_of, torch.autograd.grad(loss, leaves, materialize_grads=True))]
        finally:
            for slots, buffers in kept:
                slots.put_buffers(buffers)


def _foreign_parameter(tensor: Tensor) -> nn.Parameter | None:
    """Return a parameter that a tensor depends on and was not given: what a rehearsal gives are plain tensors."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            return variable
        waiting += [source for source, _ in node.next_functions]
    return None


def _agree(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Return whether a loss and its gradient are the same but for rounding; where only one has a gradient, True."""
    # A bias before a BatchNorm has a gradient of rounding alone.
    floor = 1e-2 * max((float(slope.norm()) for slope in first[1:]), default=0.0)
    if len(first) != len(second):
        return True
    return all(EVALUATIONS.covers(a, b, floor) for a, b in zip(first, second, strict=True))


@torch.no_grad()
def _fill(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    # The values come back: who has noted versions of these tensors (a graph, a shared part) may go on.
    with _unsafe_preserve_version_counter(tuple(tensors)):
        torch._foreach_copy_([*tensors], [*values])


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _names(problem: Problem) -> set[str]:
    return {key for key, _ in problem.module.named_parameters()}
