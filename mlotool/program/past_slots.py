"""Modules that read a parameter or a buffer past its place: by a reference that they keep elsewhere.

A hypergradient evaluates a module with other tensors in the places of its parameters and buffers. What reads the
module's own by a list, a closure, a hook or an object that keeps them does not see those, and nothing would say so. So
a loss is evaluated twice, which must give the same: with other tensors in the places, and at the module itself, whose
own tensors are given the same values.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_leaves

from mlotool.core.errors import ConfigError
from mlotool.core.replay import RandomState
from mlotool.core.unchanged import fingerprint
from mlotool.core.user_code import WrongResultError, named
from mlotool.program.engine import Engine
from mlotool.program.loss_plan import LossPlan, Values

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
