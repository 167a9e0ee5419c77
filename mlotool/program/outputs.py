"""What the modules of upper problems return inside the losses of the problems that they shape."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlotool.core.private import tree_leaves
from mlotool.core.random_stream import own_random
from mlotool.core.replay import RandomState
from mlotool.problem.streams.batches import Share
from mlotool.program.program import Program


@dataclass(frozen=True)
class Output:
    """One tensor that the module of an upper problem has returned.

    Args:
        problem: the upper one.
        name: "output" for a call of the module, else the method's name; with `_<key>` for an entry of a dict, and
            `_<index>` for one of a tuple.
        values: detached, 1-D.
        losses: the loss of each value's sample, 1-D, as `b dC/dvalue` for the lower loss C and b samples. It is l_i
            where C = 1/b sum_i w_i l_i, and an affine function of l_i where the weights are divided by their sum. None
            where the tensor has not one value for each sample, or C does not depend on it.
    """

    problem: str
    name: str
    values: Tensor
    losses: Tensor | None


def shaping_roles(program: Program, name: str) -> list[str]:
    """Return the upper problems that shape problem `name` and play a role in its loss."""
    players = {role.problem for role in program.problems[name].roles.values()}
    return [upper for upper in program.graph.uppers(name) if upper in players]


def can_watch(program: Program, name: str) -> bool:
    """Say whether the loss of a problem can be evaluated beside its steps: no part is in shards, tasks or stages."""
    problem = program.problems[name]
    players = [problem, *(program.problems[role.problem] for role in problem.roles.values())]
    return all(x.shards is None and x.parallel is None and x.settings.tasks is None for x in players)


def watched_outputs(program: Program, name: str) -> list[Output]:
    """Evaluate the loss of a problem once more on its last batch, and return what its upper problems' modules returned.

    Parameters, buffers, streams and random numbers stay as they are.

    Args:
        program: the problems.
        name: one whose loss `can_watch`.

    Cost: a forward pass of the loss, and a backward pass from the loss to the outputs alone.
    """
    engine, problem = program.internals.engine, program.problems[name]
    uppers, seen = shaping_roles(program, name), list[tuple[str, str, Tensor]]()

    def see(upper: str, method: str, output: Any) -> Any:
        if upper not in uppers:
            return output

        def leaf(key: str, tensor: Tensor) -> Tensor:
            seen.append((upper, key, tensor.detach().requires_grad_()))
            # A leaf itself could not be changed in place.
            return seen[-1][2].clone()

        return _mapped(method or "output", output, leaf)

    values, number = engine.nothing(), engine.numbers[name]
    # A loss that takes gradients itself needs its own parameters to have some.
    values[number] = [tensor.requires_grad_() for tensor in problem.current()]
    batch = None if problem.stream is None else problem.stream.last()
    with own_random(), program.random, ExitStack() as contexts:
        # Of the program's own stream, which is the global one here.
        contexts.enter_context(RandomState(program.devices).replayed())
        contexts.enter_context(warnings.catch_warnings())
        # The steps give them.
        warnings.simplefilter("ignore")
        with torch.enable_grad(), program.internals.watched(name, see):
            loss = engine.losses[number](values, batch).loss
        leaves = [tensor for *_, tensor in seen]
        has_slopes = loss.requires_grad and bool(leaves)
        slopes = torch.autograd.grad(loss, leaves, allow_unused=True) if has_slopes else [None] * len(leaves)
    samples, weight = Share.opened(batch)
    size, outputs = num_samples(samples), []
    for (upper, key, tensor), slope in zip(seen, slopes, strict=True):
        is_each = size is not None and size > 1 and tensor.dim() > 0 and tensor.shape[0] == size == tensor.numel()
        has_losses = is_each and slope is not None
        losses = slope.detach().reshape(-1) * (size / weight) if has_losses else None  # type: ignore[operator,union-attr]
        outputs.append(Output(upper, key, tensor.detach().reshape(-1), losses))
    return outputs


def num_samples(batch: Any) -> int | None:
    """Return how many samples a batch has, the length of its first tensor; None where it has no tensor."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    sizes = (len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0)
    return next(sizes, None)


def _mapped(key: str, output: Any, leaf: Callable[[str, Tensor], Tensor]) -> Any:
    """Return an output with what `leaf` makes of each of its dense tensors of real numbers."""
    if isinstance(output, Tensor):
        is_dense = output.is_floating_point() and output.layout is torch.strided and output.numel() > 0
        return leaf(key, output) if is_dense else output
    if type(output) is dict:
        return {name: _mapped(f"{key}_{name}", value, leaf) for name, value in output.items()}
    if type(output) in (tuple, list):
        return type(output)(_mapped(f"{key}_{index}", value, leaf) for index, value in enumerate(output))
    return output
