"""The bare loop once more, by hand in JAX: a whole cycle is one jitted function.

It does what `bare.py` does, forward passes and running statistics included. Where `bare.py` differentiates twice in
reverse, this one takes forward derivatives of a gradient, as is usual in JAX.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import torch
from jax import Array, lax
from jax import numpy as jnp

from benchmarks.betty.jaxed_models import Arrays, logits_of, weights_of
from benchmarks.betty.rival import Rival
from benchmarks.betty.task import (
    CG_PROXIMAL_WEIGHT,
    LEARNING_RATE_LOWER,
    LEARNING_RATE_UPPER,
    MOMENTUM,
    NUM_PRODUCTS,
    RADIUS,
    Batch,
    Task,
)

# It only allows float64: every array says its type. Dispatch in this thread spares a change of threads at each cycle.
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_cpu_enable_async_dispatch", False)

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
"""Torch's defaults for Adam."""

Product = Callable[[Arrays], Arrays]
"""The Hessian of the lower loss times a vector."""


class State(NamedTuple):
    """What a cycle takes and returns.

    Args:
        theta: the classifier's parameters.
        buffers: its running statistics.
        momentum: of SGD.
        phi: the weight net's parameters.
        mean, square: Adam's running averages.
        count: upper steps taken.
    """

    theta: Arrays
    buffers: Arrays
    momentum: Arrays
    phi: Arrays
    mean: Arrays
    square: Arrays
    count: Array


def build(task: Task, *, is_exact: bool = False) -> Rival:
    """Return the JAX loop.

    Args:
        task: the comparison, on the CPU and on a small model.
        is_exact: in place of finite differences, the exact product by a forward derivative, which takes the detached
            losses for constants.
    """
    classifier, weight_net = task.make_classifier(), task.make_weight_net()
    train, meta = ([_arrays(batch.items()) for batch in batches] for batches in task.batches())
    origin = _arrays(classifier.named_parameters())
    step = jax.jit(partial(_cycle, task.model, task.algorithm, is_exact), donate_argnums=0)
    state = _start(classifier, weight_net)
    num_cycles = 0

    def cycle() -> None:
        nonlocal state, num_cycles
        state = step(state, origin, train[num_cycles % len(train)], meta[num_cycles % len(meta)])
        jax.block_until_ready(state)
        num_cycles += 1

    def restart() -> None:
        nonlocal state, num_cycles
        state, num_cycles = _start(task.make_classifier(), task.make_weight_net()), 0

    def write_back() -> None:
        _write(classifier, state.theta | state.buffers)
        _write(weight_net, state.phi)

    return Rival(cycle, classifier, weight_net, restart, write_back)


def _cycle(
    model: str, algorithm: str, is_exact: bool, state: State, origin: Arrays, train: Arrays, meta: Arrays
) -> State:
    def lower_loss(theta: Arrays, phi: Arrays, buffers: Arrays) -> tuple[Array, Arrays]:
        logits, moved = logits_of(model, theta, buffers, train["input"])
        losses = _sample_losses(logits, train)
        loss = (weights_of(phi, lax.stop_gradient(losses)) * losses).mean()
        if algorithm == "cg":
            distance = _minus(theta, origin)
            loss += 0.5 * CG_PROXIMAL_WEIGHT * _dot(distance, distance)
        return loss, moved

    def upper_loss(theta: Arrays, buffers: Arrays) -> tuple[Array, Arrays]:
        logits, moved = logits_of(model, theta, buffers, meta["input"])
        return _sample_losses(logits, meta).mean(), moved

    phi = state.phi
    slope, buffers = jax.grad(lower_loss, has_aux=True)(state.theta, phi, state.buffers)
    momentum = _plus(slope, state.momentum, MOMENTUM)
    theta = _minus(state.theta, momentum, LEARNING_RATE_LOWER)
    vector, buffers = jax.grad(upper_loss, has_aux=True)(theta, buffers)
    hypergradient = _finite_difference if algorithm == "fd" and not is_exact else partial(_implicit, algorithm)
    slope, buffers = hypergradient(lower_loss, theta, phi, buffers, vector)
    return State(theta, buffers, momentum, *_adam(state, slope))


def _finite_difference(
    lower_loss: Callable[..., tuple[Array, Arrays]], theta: Arrays, phi: Arrays, buffers: Arrays, vector: Arrays
) -> tuple[Arrays, Arrays]:
    """Return the hypergradient of one lower step, and the buffers; the detached losses move with the perturbation."""
    scale = RADIUS / jnp.sqrt(_dot(vector, vector))
    gradient = jax.grad(lower_loss, argnums=1, has_aux=True)
    above, buffers = gradient(_plus(theta, vector, scale), phi, buffers)
    below, buffers = gradient(_minus(theta, vector, scale), phi, buffers)
    return _times(_minus(below, above), 0.5 / scale), buffers


def _implicit(
    algorithm: str,
    lower_loss: Callable[..., tuple[Array, Arrays]],
    theta: Arrays,
    phi: Arrays,
    buffers: Arrays,
    vector: Arrays,
) -> tuple[Arrays, Arrays]:
    """Return `-(d^2 loss / dphi dtheta) s` for the solution s of the algorithm, and the buffers."""

    def slope(theta: Arrays) -> tuple[Arrays, Arrays]:
        return jax.grad(lower_loss, has_aux=True)(theta, phi, buffers)

    def upper_slope(theta: Arrays) -> tuple[Arrays, Arrays]:
        return jax.grad(lower_loss, argnums=1, has_aux=True)(theta, phi, buffers)

    if algorithm != "fd":
        _, product, _ = jax.linearize(slope, theta, has_aux=True)
        vector = (_neumann if algorithm == "neumann" else _conjugate_gradient)(product, vector)
    _, cross, moved = jax.jvp(upper_slope, (theta,), (vector,), has_aux=True)
    return _times(cross, -1.0), moved


def _neumann(product: Product, vector: Arrays) -> Arrays:
    term = total = vector
    for _ in range(NUM_PRODUCTS):
        term = _minus(term, product(term), LEARNING_RATE_LOWER)
        total = _plus(total, term)
    return _times(total, LEARNING_RATE_LOWER)


def _conjugate_gradient(product: Product, vector: Arrays) -> Arrays:
    solution = _times(vector, 0.0)
    residual = direction = vector
    squared = _dot(residual, residual)
    for _ in range(NUM_PRODUCTS):
        image = product(direction)
        step = squared / _dot(direction, image)
        solution = _plus(solution, direction, step)
        residual = _minus(residual, image, step)
        previous, squared = squared, _dot(residual, residual)
        direction = _plus(residual, direction, squared / previous)
    return solution


def _adam(state: State, slope: Arrays) -> tuple[Arrays, Arrays, Arrays, Array]:
    """Return phi, Adam's running averages and the count after a step."""
    count = state.count + 1
    mean = _plus(_times(state.mean, BETA_1), slope, 1 - BETA_1)
    square = jax.tree.map(lambda old, new: BETA_2 * old + (1 - BETA_2) * new**2, state.square, slope)
    rate, root = LEARNING_RATE_UPPER / (1 - BETA_1**count), jnp.sqrt(1 - BETA_2**count)
    phi = jax.tree.map(lambda x, m, s: x - rate * m / (jnp.sqrt(s) / root + EPSILON), state.phi, mean, square)
    return phi, mean, square, count


def _sample_losses(logits: Array, batch: Arrays) -> Array:
    """Return (b, 1) cross entropies."""
    # A product with ones and zeros: on a CPU it is faster than picking entries, whose derivative scatters.
    is_target = jax.nn.one_hot(batch["target"], logits.shape[1], dtype=logits.dtype)
    return -(is_target * jax.nn.log_softmax(logits)).sum(1, keepdims=True)


def _plus(a: Arrays, b: Arrays, factor: float | Array = 1.0) -> Arrays:
    return jax.tree.map(lambda x, y: x + factor * y, a, b)


def _minus(a: Arrays, b: Arrays, factor: float | Array = 1.0) -> Arrays:
    return jax.tree.map(lambda x, y: x - factor * y, a, b)


def _times(a: Arrays, factor: float | Array) -> Arrays:
    return jax.tree.map(lambda x: factor * x, a)


def _dot(a: Arrays, b: Arrays) -> Array:
    return sum(jnp.vdot(a[name], b[name]) for name in a)


def _start(classifier: torch.nn.Module, weight_net: torch.nn.Module) -> State:
    theta, phi = _arrays(classifier.named_parameters()), _arrays(weight_net.named_parameters())
    buffers = _arrays(classifier.named_buffers())
    zeros = [jax.tree.map(jnp.zeros_like, each) for each in (theta, phi, phi)]
    # Adam's powers are taken in the precision of the parameters.
    count = jnp.zeros((), next(iter(phi.values())).dtype)
    return State(theta, buffers, zeros[0], phi, zeros[1], zeros[2], count)


def _arrays(tensors: Iterable[tuple[str, torch.Tensor]] | Batch) -> Arrays:
    """Return copies: a cycle gives the memory of its arguments away."""
    return {name: jnp.array(tensor.detach().numpy(), copy=True) for name, tensor in tensors}


def _write(module: torch.nn.Module, arrays: Arrays) -> None:
    module.load_state_dict({name: torch.from_numpy(np.array(each)) for name, each in arrays.items()})
