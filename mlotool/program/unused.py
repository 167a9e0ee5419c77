"""Whether a hypergradient is zero because nothing depends on what it is the gradient of.

The graph says that u shapes l, but l's loss never uses u's parameters, or under `no_grad` alone: then l's solution does
not depend on u, and training goes on as if all were well. Autograd knows: a tensor that a loss does not use has no
gradient, where one that has no effect at the moment has the gradient zero.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from mlotool.core.gradient import values_of
from mlotool.core.replay import RandomState
from mlotool.problem.problem import Problem

NUM_LOOKS = 3
"""Steps after which a problem's gradient is no longer checked; the first one that is not zero ends the check, too."""

Loss = Callable[[str, Mapping[str, Sequence[Tensor]]], Tensor]
"""`(problem, tensors by problem) -> loss` on the problem's last batch, all solutions held fixed."""

_IGNORES_UPPER = (
    "graph.upper_to_lower: '{upper}' shapes '{lower}', but at {count} steps of '{upper}' the loss of '{lower}' did not "
    "depend on the parameters of '{upper}'; expected that it does. Use the role that '{upper}' plays in "
    "problems.{lower}.loss, without detach or torch.no_grad, or remove the edge."
)
_IGNORES_LOWER = (
    "problems.{upper}.loss: the hypergradient of '{upper}' was exactly 0 at {count} steps, since its loss does not "
    "depend on the parameters of '{lower}'; expected that it does. Evaluate that role in the loss, without detach or "
    "torch.no_grad."
)
_ZERO = (
    "problems.{upper}.loss: the hypergradient of '{upper}' was exactly 0 at {count} steps, though autograd finds that "
    "the losses depend on what they read; expected another number. Look for saturated or dead units, for factors that "
    "are zero at the start, and whether '{upper}' stands in a term of its own in the loss of what it shapes."
)


class UnusedWatch:
    """Looks at the first gradients of each problem above others, and warns once of what cannot be meant.

    Args:
        problems: by name.
        shaped: by problem, those that it shapes.
        read: by problem whose gradient is differentiated, those whose solutions it passes through.

    Cost: an evaluation and a gradient of each shaped problem's loss at the first gradients; nothing later. Random
    numbers go on as if nothing had been.
    """

    def __init__(
        self, problems: Mapping[str, Problem], shaped: Mapping[str, Iterable[str]], read: Mapping[str, Sequence[str]]
    ) -> None:
        self._problems = problems
        self._shaped = {
            name: [each for each in lowers if self._is_judged(name, each)] for name, lowers in shaped.items()
        }
        self._read = read
        # By problem: the steps in a row at which the loss of another one did not depend on it; by "" its zeros.
        self._found: dict[str, dict[str, set[int]]] = {}
        self.waiting = {name for name, lowers in read.items() if lowers}

    def look(self, name: str, gradient: Sequence[Tensor | None], loss: Loss) -> None:
        """Look at a gradient of `name`, one of its first."""
        values = [values_of(tensor) for tensor in gradient if tensor is not None and tensor.numel()]
        is_zero = not values or not bool(torch.stack(torch._foreach_norm(values, float("inf"))).any())
        with RandomState(self._problems[name].devices).replayed():
            found = [lower for lower in self._shaped.get(name, ()) if not self._uses(lower, name, loss)]
            found += [""] if is_zero else []
            # The batches of one step (accumulate_batches) are one look.
            step, before = self._problems[name].num_steps, self._found.get(name, {})
            self._found[name] = {key: before.get(key, set()) | {step} for key in found}
            if not found:
                self.waiting.discard(name)
            elif NUM_LOOKS in map(len, self._found[name].values()):
                self.waiting.discard(name)
                warnings.warn(self._message(name, found[0], loss), stacklevel=2)

    def _message(self, name: str, unused: str, loss: Loss) -> str:
        if unused:
            return _IGNORES_UPPER.format(upper=name, lower=unused, count=NUM_LOOKS)
        # A solution that it passes through need not be one that the loss reads itself.
        if not any(self._uses(name, lower, loss) for lower in self._read[name]):
            return _IGNORES_LOWER.format(upper=name, lower="', '".join(self._read[name]), count=NUM_LOOKS)
        return _ZERO.format(upper=name, count=NUM_LOOKS)

    def _uses(self, reader: str, source: str, loss: Loss) -> bool:
        """Return whether the loss of `reader` depends on the parameters of `source`, as autograd sees it."""
        # A loss that takes gradients itself, as a penalty on them does, needs its own parameters to have some.
        tensors = {name: [x.requires_grad_() for x in self._problems[name].current()] for name in (reader, source)}
        with torch.enable_grad():
            value = loss(reader, tensors)
        if not value.requires_grad:
            return False
        slopes = torch.autograd.grad(value, tensors[source], allow_unused=True)
        return any(slope is not None for slope in slopes)

    def _is_judged(self, upper: str, lower: str) -> bool:
        problem = self._problems[lower]
        algorithm = problem.hypergradient
        # It may shape the steps or the start in place of the loss.
        is_elsewhere = upper in problem.node.other_uses.values()
        is_special = problem.parallel is not None or problem.shards is not None
        return algorithm is not None and not algorithm.is_constant and not is_elsewhere and not is_special
