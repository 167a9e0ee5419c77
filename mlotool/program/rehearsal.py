"""A trial evaluation of a loss before the first step, after which nothing has changed."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from mlotool.core.errors import ConfigError
from mlotool.core.fingerprint import fingerprint
from mlotool.core.gradient import values_of
from mlotool.core.loss_output import LossOutput
from mlotool.core.random_stream import RandomStream
from mlotool.core.replay import RandomState
from mlotool.core.unchanged import is_same, restore_torch_settings, torch_settings
from mlotool.core.user_code import WrongResultError, is_ours, named, note
from mlotool.problem.problem import Problem
from mlotool.program.graph import Graph
from mlotool.program.loss_plan import LossPlan, Values
from mlotool.program.python_places import PythonState
from mlotool.program.solution_plan import Engine

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


_TOLERANCE = 1e-3
"""Of a gradient's size: kernels on a GPU add in another order each time."""

_PAST = (
    "problems.{problem}.module: found {module} at '{path}', which reads {what} past its place in the module: it goes "
    "on reading the same tensor while a hypergradient puts another one there. Expected that a module reads self.<name> "
    "in each call. Keep no parameter or buffer in a list, a closure, a functools.partial, a hook or another object: "
    "look it up where it is used."
)

_AGAIN = (
    "a loss whose backward pass looks the module's parameters up again, so that its gradient is another one",
    "that it takes them from the evaluation, since this hypergradient takes gradients at other parameters than those "
    "that the module holds",
    "Write mlotool.remat(block, x) for torch.utils.checkpoint.checkpoint(block, x), or remat: auto for the problem; in "
    "an autograd function of your own, save the parameters that its backward reads.",
)


class PastSlots:
    """Compares a loss with other tensors in the places of its modules' with the loss at the modules themselves.

    Args:
        engine: of the program.
        plan: of the loss.
        values: by player, tensors; those that require a gradient are what it is taken with respect to.
        batch: of the loss.
        random: the random numbers of its first evaluation.
        restore: puts back what evaluations change in Python.
    """

    def __init__(
        self,
        engine: Engine,
        plan: LossPlan,
        values: Values,
        batch: Any,
        random: RandomState,
        restore: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._batch = batch
        self._random = random
        self._restore = restore
        self._noting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._num_problems = len(engine.problems)
        self._players = {player: engine.problems[player] for player, tensors in enumerate(values) if tensors}
        self._flags = {player: [each.requires_grad for each in values[player] or ()] for player in self._players}
        self._modules = {
            id(module): (problem.name, path, module)
            for problem in self._players.values()
            for path, module in problem.module.named_modules()
        }

    def check(self, loss: Tensor, *, is_moved: bool) -> None:
        """Refuse modules that read past their places.

        Args:
            loss: with other tensors in the places, with its graph.
            is_moved: whether hypergradients evaluate it at other values than those of the modules themselves.

        Raises:
            ConfigError: a module does.
            WrongResultError: a backward pass does, as that of torch.utils.checkpoint.
        """
        is_scaled = self._plan.problem.settings.precision == "fp16"
        if is_scaled or any(each.parallel is not None or each.shards is not None for each in self._players.values()):
            return
        foreign = foreign_parameter(loss)
        if foreign is not None and self._name_of(foreign) is None:
            # One that a forward has made: whoever looks at the loss's parameters says so.
            return
        if foreign is None and self._is_same(is_moved):
            return
        module = self._culprit()
        if module is not None:
            problem, path, found = module
            what = self._name_of(foreign) or "a parameter or a buffer"
            raise ConfigError(_PAST.format(problem=problem, module=named(found), path=path or "the top", what=what))
        if foreign is None:
            raise WrongResultError(*_AGAIN)

    def _is_same(self, is_moved: bool) -> bool:
        with self._moved(is_moved):
            there, here = self._with_others(), self._at_modules()
            # A loss that is never the same has no places to be blamed.
            return _agree(there, here) or not _agree(here, self._at_modules())

    @contextmanager
    def _moved(self, is_moved: bool) -> Iterator[None]:
        """Hold other values of parameters and buffers."""
        own = [tensor for tensor in self._own_tensors() if tensor.is_floating_point()]
        self._values = {id(x): (1.1 * x.detach() + 0.01 if is_moved else x.detach().clone()) for x in own}
        try:
            yield
        finally:
            del self._values

    def _own_tensors(self) -> list[Tensor]:
        found = [each for problem in self._players.values() for each in (*problem.own, *problem.slots.buffers())]
        # What is sparse cannot be given other values in place.
        return list({id(each): each for each in found if each is not None and each.layout is torch.strided}.values())

    def _with_others(self) -> list[Tensor]:
        """Return loss and gradient with other tensors in the places."""
        values: Values = [None] * self._num_problems
        for player, problem in self._players.items():
            given = [self._values.get(id(each), each.detach()).clone() for each in problem.own]
            values[player] = [x.requires_grad_(flag) for x, flag in zip(given, self._flags[player], strict=True)]
        buffers = [(problem.slots, problem.slots.buffers()) for problem in self._players.values()]
        try:
            for slots, own in buffers:
                slots.put_buffers([each if each is None else self._values.get(id(each), each).clone() for each in own])
            return self._taken(self._plan, values)
        finally:
            for slots, own in buffers:
                slots.put_buffers(own)

    def _at_modules(self) -> list[Tensor]:
        """Return loss and gradient at the modules themselves, whose tensors are put back afterwards."""
        own = self._own_tensors()
        buffers = [(problem.slots, problem.slots.buffers()) for problem in self._players.values()]
        before = [each.detach().clone() for each in own]
        values: Values = [None] * self._num_problems
        for player, problem in self._players.items():
            values[player] = problem.own if all(self._flags[player]) else problem.current()
        try:
            _fill(own, [self._values.get(id(each), each.detach()) for each in own])
            return self._taken(self._plan.live, values)
        finally:
            for slots, tensors in buffers:
                slots.put_buffers(tensors)
            _fill(own, before)

    def _taken(self, evaluate: Callable[[Values, Any], Any], values: Values) -> list[Tensor]:
        self._restore()
        leaves = [each for tensors in values for each in tensors or () if each.requires_grad]
        with self._random.replayed(), torch.enable_grad():
            # After `restore`, which would take hooks for a change.
            with self._noting():
                loss = evaluate(values, self._batch).loss
            if not loss.requires_grad or any(each._backward_hooks for each in leaves):
                return [loss.detach()]
            return [loss.detach(), *torch.autograd.grad(loss, leaves, materialize_grads=True)]

    def _culprit(self) -> tuple[str, str, nn.Module] | None:
        """Return the first module that brings in a parameter that was not given, or returns something else."""
        runs: list[list[_Call]] = []
        for evaluate in (self._with_others, self._at_modules):
            calls: list[_Call] = []
            runs.append(calls)
            self._noting = partial(_noting, [module for _, _, module in self._modules.values()], calls)
            with self._moved(True):
                evaluate()
        for there, here in zip(*runs, strict=False):
            is_other = there.module is here.module and _agree(there.inputs, here.inputs)
            if there.is_foreign or (is_other and not _agree(there.results, here.results)):
                return self._modules[id(there.module)]
        return None

    def _name_of(self, tensor: Tensor | None) -> str | None:
        names = [(name, each) for problem in self._players.values() for name, each in problem.theta.items()]
        return next((f"the parameter '{name}'" for name, each in names if each is tensor), None)


def foreign_parameter(tensor: Tensor) -> nn.Parameter | None:
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
        waiting += [each for each, _ in node.next_functions]
    return None


class _Call(NamedTuple):
    """A call of a module.

    Args:
        module: that was called.
        inputs: the fingerprints of what it was given.
        results: of what it has returned.
        is_foreign: whether the results depend on a parameter itself, and the inputs do not.
    """

    module: nn.Module
    inputs: list[Tensor]
    results: list[Tensor]
    is_foreign: bool


@contextmanager
def _noting(modules: Sequence[nn.Module], calls: list[_Call]) -> Iterator[None]:
    """Note the calls of modules, in the order in which they end."""

    def note(module: nn.Module, inputs: Any, options: Any, result: Any) -> None:
        given, found = _tensors((inputs, options)), _tensors(result)
        is_foreign = _depends(found) and not _depends(given)
        calls.append(_Call(module, list(map(fingerprint, given)), list(map(fingerprint, found)), is_foreign))

    handles = [each.register_forward_hook(note, with_kwargs=True) for each in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _depends(tensors: Sequence[Tensor]) -> bool:
    return any(foreign_parameter(each) is not None for each in tensors)


def _tensors(value: Any) -> list[Tensor]:
    tensors = [each for each in tree_leaves(value) if isinstance(each, Tensor)]
    return [each for each in tensors if not is_functorch_wrapped_tensor(each)]


def _agree(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Return whether tensors are the same but for rounding; those that are not finite tell nothing."""
    if len(first) != len(second):
        return True
    sizes = [torch.maximum(a.norm(), b.norm()) for a, b in zip(first, second, strict=True)]
    floor = 1e-2 * max((float(each) for each in sizes[1:]), default=0.0)
    return not any(
        float((a - b).norm()) > _TOLERANCE * max(float(size), floor)
        for a, b, size in zip(first, second, sizes, strict=True)
    )


@torch.no_grad()
def _fill(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        # The values come back: who has noted versions of these tensors (a graph, a shared part) may go on.
        with _unsafe_preserve_version_counter(tensor):
            tensor.copy_(value)
