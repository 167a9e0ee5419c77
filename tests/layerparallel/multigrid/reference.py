"""MGRIT with full approximation storage in plain numpy loops, written from algorithm 1 of arXiv 1812.04352.

Nothing is skipped and nothing is reused: every residual and every operator is evaluated where the algorithm names it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from mlotool import layerparallel
from mlotool.layerparallel.multigrid.solver import Method

Array = np.ndarray
Phi = Callable[[int, int, Array], Array]
"""`phi(level, n, u)`: the value after point n of a level."""


def levels_of(num_layers: int, factor: int, levels: int | None) -> list[int]:
    factors, count = [], num_layers
    while count % factor == 0 and count // factor >= 2 and (levels is None or len(factors) < levels - 1):
        factors.append(factor)
        count //= factor
    return factors


@dataclass
class Reference:
    phi: Phi
    factors: Sequence[int]
    relaxation: str = "F"
    kind: str = "V"
    num_calls: list[int] = field(default_factory=lambda: [0])

    def operator(self, level: int, values: list[Array]) -> list[Array]:
        rest = [values[n] - self.phi(level, n - 1, values[n - 1]) for n in range(1, len(values))]
        return [values[0], *rest]

    def residual(self, level: int, values: list[Array], right: list[Array]) -> list[Array]:
        return [g - a for g, a in zip(right, self.operator(level, values), strict=True)]

    def relax_f(self, level: int, values: list[Array], right: list[Array]) -> None:
        factor = self.factors[level]
        for n in range(1, len(values)):
            if n % factor:
                values[n] = self.phi(level, n - 1, values[n - 1]) + right[n]

    def relax_c(self, level: int, values: list[Array], right: list[Array]) -> None:
        factor, old = self.factors[level], list(values)
        for n in range(factor, len(values), factor):
            values[n] = self.phi(level, n - 1, old[n - 1]) + right[n]

    def cycle(self, level: int, values: list[Array], right: list[Array], kind: str) -> list[Array]:
        if level == len(self.factors):
            solved = [right[0]]
            for n in range(1, len(values)):
                solved.append(self.phi(level, n - 1, solved[-1]) + right[n])
            return solved
        values, factor = list(values), self.factors[level]
        self.relax_f(level, values, right)
        if self.relaxation == "FCF":
            self.relax_c(level, values, right)
            self.relax_f(level, values, right)
        residual = self.residual(level, values, right)[::factor]
        injected = values[::factor]
        coarse_right = [a + r for a, r in zip(self.operator(level + 1, injected), residual, strict=True)]
        coarse = self.cycle(level + 1, injected, coarse_right, kind)
        if kind == "F" and level + 1 < len(self.factors):
            coarse = self.cycle(level + 1, coarse, coarse_right, "V")
        for k in range(len(injected)):
            values[k * factor] = values[k * factor] + (coarse[k] - injected[k])
        self.relax_f(level, values, right)
        return values

    def norm(self, values: list[Array], right: list[Array]) -> float:
        return float(np.sqrt(sum((r**2).sum() for r in self.residual(0, values, right))))

    def run(self, first: Array, num_layers: int, cycles: int) -> tuple[Array, list[float]]:
        values = [first.copy() for _ in range(num_layers + 1)]
        right = [first] + [np.zeros_like(first) for _ in range(num_layers)]
        self.relax_f(0, values, right)
        norms = [self.norm(values, right)]
        for _ in range(cycles):
            values = self.cycle(0, values, right, self.kind)
            norms.append(self.norm(values, right))
        return np.stack(values), norms


@dataclass
class Network:
    """`u + h tanh(u K_n^T + b_n)`, by hand."""

    weight: Array
    bias: Array
    h: float

    @staticmethod
    def random(num_layers: int, width: int = 3, depth: float = 4.0, seed: int = 0) -> "Network":
        # Layers that are samples of a smooth curve, as the grids assume, and a rough part that they do not know.
        random = np.random.default_rng(seed)
        time = np.linspace(0, 1, num_layers)[:, None, None]
        a, b, c = random.normal(size=(3, width, width))
        weight = a * np.cos(3 * time) + b * np.sin(2 * time) + 0.1 * c * np.cos(40 * time)
        return Network(weight, 0.3 * random.normal(size=(num_layers, width)), depth / num_layers)

    def states(self, u0: Array) -> Array:
        values = [u0]
        for n in range(len(self.weight)):
            values.append(self.step(n, values[-1], self.h))
        return np.stack(values)

    def adjoints(self, states: Array, cotangent: Array) -> Array:
        values = [cotangent]
        for n in reversed(range(len(self.weight))):
            values.append(self.pull(n, states[n], values[-1], self.h))
        return np.stack(values[::-1])

    def step(self, n: int, u: Array, h: float) -> Array:
        return u + h * np.tanh(u @ self.weight[n].T + self.bias[n])

    def pull(self, n: int, u: Array, w: Array, h: float) -> Array:
        slope = 1 - np.tanh(u @ self.weight[n].T + self.bias[n]) ** 2
        return w + h * (w * slope) @ self.weight[n]

    def forward_phi(self, factors: Sequence[int]) -> Phi:
        strides = np.cumprod([1, *factors])
        return lambda level, n, u: self.step(n * strides[level], u, self.h * strides[level])

    def adjoint_phi(self, factors: Sequence[int], states: Array) -> Phi:
        strides = np.cumprod([1, *factors])

        def phi(level: int, m: int, w: Array) -> Array:
            stride = strides[level]
            n = (len(self.weight) // stride - m - 1) * stride
            return self.pull(n, states[n], w, self.h * stride)

        return phi


KEYS = [each.name for each in fields(Method)]


def mgrit(step: Any, u0: Any, num_layers: int, h: float, *method: Any, **more: Any) -> Any:
    """Call the package's with the fields of its method by position, in the order of `Method`."""
    return layerparallel.mgrit(step, u0, num_layers, h, **dict(zip(KEYS, method, strict=False)), **more)


def mgrit_adjoint(step: Any, states: Any, cotangent: Any, num_layers: int, h: float, *method: Any, **more: Any) -> Any:
    """Call the package's in the same way."""
    found = dict(zip(KEYS, method, strict=False))
    return layerparallel.mgrit_adjoint(step, states, cotangent, num_layers, h, **found, **more)
