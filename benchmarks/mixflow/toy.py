"""The motivating example of Kemaev et al. 2025 (Eq. 9): peak memory against the length of the inner map, beside JAX.

    y_0 = x theta,   y_i = i (2 + sin y_i-1)^cos y_i-1,   i = 1, ..., M

A start theta is learned through T steps of gradient descent on the mean squared error of y_M.
"""

import gc
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.mixflow.setting import WAYS, Way
from mlotool import Graph, Problem, Program, Schedule, Stream, Unrolled
from tests.live_storage import LiveStorage

PLAIN, CHECKPOINTED = "torch, plain unroll", "torch, checkpoint of each step"
LARGEST_DIFFERENCE = 1e-10
CHECKED = {"num_maps": 3, "batch_size": 4, "width": 6, "dtype": "float64", "rate": 0.1}
"""A rate at which second-order terms are no small part of the gradient."""


@dataclass(frozen=True)
class Toy:
    """The sizes of the paper's example.

    Args:
        num_maps: M, how often the map is taken.
        batch_size: B.
        width: D.
        num_steps: T.
        dtype: of all numbers.
        rate: of the steps.
    """

    num_maps: int
    batch_size: int = 64
    width: int = 256
    num_steps: int = 2
    dtype: str = "float32"
    rate: float = 1e-3

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the start, and inputs and targets of all steps with those of the upper loss in the last place."""
        random, shape = np.random.default_rng(0), (self.num_steps + 1, self.batch_size, self.width)
        start = random.standard_normal((self.width, self.width))
        inputs, targets = random.standard_normal(shape), random.standard_normal(shape)
        return {key: x.astype(self.dtype) for key, x in {"start": start, "x": inputs, "target": targets}.items()}


class Map(nn.Module):
    """One application of the map."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, y: Tensor) -> Tensor:
        """Return `i (2 + sin y)^cos y`."""
        return self.number * (2 + torch.sin(y)) ** torch.cos(y)


class Maps(nn.Module):
    """The product with theta, and all maps."""

    def __init__(self, start: Tensor, num_maps: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(start)
        self.blocks = nn.ModuleList(Map(number) for number in range(1, num_maps + 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return y_M."""
        y = x @ self.theta
        for block in self.blocks:
            y = block(y)
        return y


def measure(lengths: tuple[int, ...], *, is_small: bool = False) -> dict[str, Any]:
    """Return the peak of each rival at each length, and how far their gradients are apart in float64."""
    differences = _differences()
    if max(differences.values()) > LARGEST_DIFFERENCE:
        raise SystemExit(
            f"toy: in float64 the gradients differ by {differences}; expected at most {LARGEST_DIFFERENCE}. The rivals "
            "do different work: no memory is reported."
        )
    sizes = {"batch_size": 8, "width": 16} if is_small else {}
    rows = [{"num_maps": each, "peak_bytes": _peaks(Toy(each, **sizes))} for each in lengths]
    return {"sizes": Toy(0, **sizes).__dict__, "difference": differences, "rows": rows}


def show(found: Mapping[str, Any]) -> None:
    """Print a table."""
    rows = found["rows"]
    heads = ["peak, MiB", *(f"M = {row['num_maps']}" for row in rows)]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name in rows[0]["peak_bytes"]:
        cells = [name, *(_mebibytes(row["peak_bytes"][name]) for row in rows)]
        print(f"| {' | '.join(cells)} |")


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:.1f}"


def _peaks(toy: Toy) -> dict[str, int]:
    found = {name: _peak(rival) for name, rival in _rivals(toy).items()}
    return found | (_jaxed().peaks(toy) if _has_jax() else {})


def _rivals(toy: Toy) -> dict[str, Callable[[], Callable[[], Tensor]]]:
    rivals: dict[str, Callable[[], Callable[[], Tensor]]] = {
        PLAIN: partial(_by_hand, toy, is_checkpointed=False),
        CHECKPOINTED: partial(_by_hand, toy, is_checkpointed=True),
    }
    return rivals | {f"mlotool, {way.name}": partial(_ours, toy, way) for way in WAYS}


def _peak(build: Callable[[], Callable[[], Tensor]]) -> int:
    """Return the most bytes of what is made from the first step on; what those start from does not count."""
    run = build()
    gc.collect()
    # The first forward product is held to a reverse one. Where derivatives overflow there is nothing to compare.
    with patch("mlotool.hypergradient.products.forward.check_forward_product"), LiveStorage() as live:
        run()
    return live.peak


def _differences() -> dict[str, float]:
    toy = Toy(**CHECKED)
    found = {name: build()().numpy() for name, build in _rivals(toy).items()}
    if _has_jax():
        found |= _jaxed().gradients(toy)
    base = found[PLAIN]
    return {name: float(np.linalg.norm(each - base) / np.linalg.norm(base)) for name, each in found.items()}


def _by_hand(toy: Toy, *, is_checkpointed: bool) -> Callable[[], Tensor]:
    arrays = {key: torch.from_numpy(each) for key, each in toy.arrays().items()}
    maps = Maps(arrays["start"], toy.num_maps)

    def loss(theta: Tensor, number: int) -> Tensor:
        found = torch.func.functional_call(maps, {"theta": theta}, (arrays["x"][number],))
        return (found - arrays["target"][number]).square().mean()

    def step(theta: Tensor, number: int) -> Tensor:
        (slope,) = torch.autograd.grad(loss(theta, number), theta, create_graph=True)
        return theta - toy.rate * slope

    def run() -> Tensor:
        start = arrays["start"].requires_grad_()
        theta = start
        for number in range(toy.num_steps):
            theta = checkpoint(step, theta, number, use_reentrant=False) if is_checkpointed else step(theta, number)
        return torch.autograd.grad(loss(theta, toy.num_steps), start)[0]

    return run


class _Rows:
    """Inputs and targets as samples, in the order of the steps."""

    def __init__(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        self._x, self._target = (torch.from_numpy(each).flatten(0, -2) for each in (inputs, targets))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"x": self._x[number], "target": self._target[number]}


def _ours(toy: Toy, way: Way) -> Callable[[], Tensor]:
    arrays, count = toy.arrays(), toy.num_steps
    start = torch.from_numpy(arrays["start"])
    roles = {"model": "lower"}
    # One step more than are taken, so that no tick takes the upper step.
    lower = Problem(
        "lower",
        Maps(start.clone(), toy.num_maps),
        _loss,
        roles=roles,
        stream=Stream(_Rows(arrays["x"][:count], arrays["target"][:count]), toy.batch_size, shuffle=False),
        optimizer=partial(torch.optim.SGD, lr=toy.rate),
        hypergradient=Unrolled(product=way.product),
        unroll_steps=count + 1,
        reset_to="upper",
        remat=["blocks.*"] if way.remat else None,
    )
    upper = Problem(
        "upper",
        Maps(start.clone(), toy.num_maps),
        _loss,
        roles=roles,
        stream=Stream(_Rows(arrays["x"][count:], arrays["target"][count:]), toy.batch_size, shuffle=False),
        optimizer=partial(torch.optim.SGD, lr=toy.rate),
    )
    program = Program([lower, upper], Graph({"upper": ["lower"]}, {"lower": ["upper"]}))
    schedule = Schedule(program)

    def run() -> Tensor:
        for _ in range(count):
            schedule.tick()
        return program.gradient("upper")["theta"]

    return run


def _loss(batch: Mapping[str, Tensor], *, model: Any) -> Tensor:
    return (model(batch["x"]) - batch["target"]).square().mean()


def _has_jax() -> bool:
    return importlib.util.find_spec("jax") is not None


def _jaxed() -> Any:
    # JAX need not be there, and its import sets it up.
    from benchmarks.mixflow import jaxed

    return jaxed
