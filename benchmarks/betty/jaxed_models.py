"""The models of the comparison as JAX functions of arrays, by the names that these have in torch.

Inputs are (b, channels, height, width); every function of the classifier returns its running statistics too.
"""

import jax
from jax import Array, lax

Arrays = dict[str, Array]

DECAY, EPSILON = 0.1, 1e-5
"""Of torch's BatchNorm: the share of a new batch in the running statistics, and what is added to a variance."""


def logits_of(model: str, theta: Arrays, buffers: Arrays, inputs: Array) -> tuple[Array, Arrays]:
    """Return the classifier's logits (b, 10) in train mode, and its buffers as this pass leaves them."""
    return {"mlp": _mlp, "resnet": _resnet}[model](theta, buffers, inputs)


def weights_of(phi: Arrays, losses: Array) -> Array:
    """Return the weight net's output (b, 1) for losses (b, 1)."""
    return jax.nn.sigmoid(_linear(phi, "2", jax.nn.relu(_linear(phi, "0", losses))))


def _mlp(theta: Arrays, buffers: Arrays, inputs: Array) -> tuple[Array, Arrays]:
    x = inputs.reshape(len(inputs), -1)
    x = jax.nn.relu(_linear(theta, "1", x))
    x = jax.nn.relu(_linear(theta, "3", x))
    return _linear(theta, "5", x), buffers


def _resnet(theta: Arrays, buffers: Arrays, inputs: Array) -> tuple[Array, Arrays]:
    moved = dict(buffers)
    x = jax.nn.relu(_batch_norm(theta, moved, "1", _convolve(theta, "0", inputs)))
    x = _block(theta, moved, "3", x, stride=1)
    x = _block(theta, moved, "4", x, stride=2)
    return _linear(theta, "7", x.mean((2, 3))), moved


def _block(theta: Arrays, moved: Arrays, name: str, inputs: Array, stride: int) -> Array:
    x = _convolve(theta, f"{name}.path.0", inputs, stride)
    x = jax.nn.relu(_batch_norm(theta, moved, f"{name}.path.1", x))
    x = _batch_norm(theta, moved, f"{name}.path.4", _convolve(theta, f"{name}.path.3", x))
    shortcut = inputs if stride == 1 else _convolve(theta, f"{name}.shortcut", inputs, stride, padding=0)
    return jax.nn.relu(x + shortcut)


def _linear(parameters: Arrays, name: str, x: Array) -> Array:
    return x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]


def _convolve(theta: Arrays, name: str, x: Array, stride: int = 1, padding: int = 1) -> Array:
    pads = [(padding, padding)] * 2
    kernel = theta[f"{name}.weight"]
    return lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=("NCHW", "OIHW", "NCHW"))


def _batch_norm(theta: Arrays, moved: Arrays, name: str, x: Array) -> Array:
    """Return x normalized over its batch; the running statistics in `moved` are replaced."""
    mean = x.mean((0, 2, 3))
    centred = x - _channels(mean)
    variance = (centred**2).mean((0, 2, 3))
    count = x.size // len(mean)
    news = {"running_mean": mean, "running_var": variance * (count / (count - 1))}
    for key, new in news.items():
        old = moved[f"{name}.{key}"]
        moved[f"{name}.{key}"] = old + DECAY * (lax.stop_gradient(new) - old)
    moved[f"{name}.num_batches_tracked"] = moved[f"{name}.num_batches_tracked"] + 1
    scale = theta[f"{name}.weight"] * lax.rsqrt(variance + EPSILON)
    return centred * _channels(scale) + _channels(theta[f"{name}.bias"])


def _channels(vector: Array) -> Array:
    return vector[:, None, None]
