"""The toy by hand in JAX, after listings 3 to 5 of Kemaev et al. 2025: plain, by checkpoints, and in mixed mode."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

if TYPE_CHECKING:
    from benchmarks.mixflow.toy import Toy

# It only allows float64: every array says its type.
jax.config.update("jax_enable_x64", True)

WAYS = ("plain", "checkpoint of each step", "mixed mode")

Loss = Callable[..., Array]


def peaks(toy: "Toy") -> dict[str, int]:
    """Return the bytes that XLA sets aside for temporaries; arguments and the result do not count."""
    found = {}
    for way in WAYS:
        run, _ = _compiled(toy, way)
        found[f"jax, {way}"] = int(run.memory_analysis().temp_size_in_bytes)
    return found


def gradients(toy: "Toy") -> dict[str, np.ndarray]:
    """Return the meta-gradient each way."""
    found = {}
    for way in WAYS:
        run, arguments = _compiled(toy, way)
        found[f"jax, {way}"] = np.asarray(run(*arguments))
    return found


def _compiled(toy: "Toy", way: str) -> tuple[Any, tuple[Array, ...]]:
    arrays = {key: jnp.asarray(each) for key, each in toy.arrays().items()}
    arguments = (arrays["start"], arrays["x"], arrays["target"])
    return jax.jit(jax.grad(partial(_meta_loss, toy, way))).lower(*arguments).compile(), arguments


def _meta_loss(toy: "Toy", way: str, start: Array, inputs: Array, targets: Array) -> Array:
    loss = partial(_loss, toy.num_maps)
    slope = _forward_over_reverse(loss) if way == "mixed mode" else jax.grad(loss)

    def step(theta: Array, batch: tuple[Array, Array]) -> tuple[Array, None]:
        return theta - toy.rate * slope(theta, *batch), None

    taken = jax.checkpoint(step) if way == "checkpoint of each step" else step
    theta, _ = lax.scan(taken, start, (inputs[:-1], targets[:-1]))
    return loss(theta, inputs[-1], targets[-1])


def _loss(num_maps: int, theta: Array, x: Array, target: Array) -> Array:
    def apply(y: Array, number: Array) -> tuple[Array, None]:
        return number * (2 + jnp.sin(y)) ** jnp.cos(y), None

    y, _ = lax.scan(apply, x @ theta, jnp.arange(1, num_maps + 1).astype(x.dtype))
    return jnp.mean((y - target) ** 2)


def _forward_over_reverse(loss: Loss) -> Callable[..., Array]:
    """Return the gradient of a loss, with a derivative in forward mode; the batch is constant."""

    @jax.custom_vjp
    def slope(theta: Array, x: Array, target: Array) -> Array:
        return jax.grad(loss)(theta, x, target)

    def forward(*arguments: Array) -> tuple[Array, tuple[Array, ...]]:
        return slope(*arguments), arguments

    def backward(arguments: tuple[Array, ...], vector: Array) -> tuple[Array, Array, Array]:
        theta, x, target = arguments
        _, product = jax.jvp(lambda point: jax.grad(loss)(point, x, target), (theta,), (vector,))
        return product, jnp.zeros_like(x), jnp.zeros_like(target)

    slope.defvjp(forward, backward)
    return slope
