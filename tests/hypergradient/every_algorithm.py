"""Every hypergradient that the package exports, on one Meta-Weight-Net in small."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mlotool import KFAC, SABA, EvolutionStrategies, Exact, FixedPoint, Identity, LossOutput, Neumann, Nystrom, Penalty
from mlotool.core import stop_gradient
from mlotool.hypergradient import AbstractSolver, ConjugateGradient, FirstOrder, Implicit, OptimizerPreconditioner
from mlotool.hypergradient.solvers.conjugate_gradient import NormalEquationConjugateGradient
from mlotool.hypergradient.unrolled import Unrolled
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Stream
from tests.program.small import Mlp, momentum, samples, sgd

SOLVERS: dict[str, Callable[[], AbstractSolver]] = {
    "identity": lambda: Identity(0.1),
    "neumann": lambda: Neumann(3, 0.1),
    "fixed_point": lambda: FixedPoint(3, 0.1),
    "cg": lambda: ConjugateGradient(3, 1e-8, damping=10.0),
    "normal_cg": lambda: NormalEquationConjugateGradient(3, 1e-8, damping=10.0),
    "nystrom": lambda: Nystrom(rank=4, rho=10.0),
    "exact": lambda: Exact(damping=10.0),
    "ggn": lambda: KFAC(damping=1.0, kind="ggn", loss="mean_squared_error"),
    "optimizer": OptimizerPreconditioner,
}


def _implicit(make: Callable[[], AbstractSolver], product: Any) -> Callable[[], AbstractHypergradient]:
    return lambda: Implicit(make(), product)


DIFFERENTIATED: dict[str, Callable[[], AbstractHypergradient]] = {
    **{name: _implicit(make, "reverse") for name, make in SOLVERS.items()},
    # Solvers see a product as a function: tests/hypergradient/test_references.py has each with each.
    **{f"{name}_difference": _implicit(SOLVERS[name], "finite_difference") for name in ("identity", "cg", "optimizer")},
    **{f"{name}_forward": _implicit(SOLVERS[name], "forward") for name in ("neumann", "cg")},
    "fresh": lambda: Implicit(Neumann(3, 0.1), batch="fresh"),
    "warm": lambda: Implicit(FixedPoint(3, 0.1), warm_start=True, report_every=2),
    "unrolled": Unrolled,
    "unrolled_forward": lambda: Unrolled(product="forward"),
    "unrolled_last": lambda: Unrolled(horizon=1),
    "unrolled_first_order": lambda: Unrolled(second_order=False),
    "penalty": lambda: Penalty(multiplier=20.0, num_steps=2, step_size=0.1),
    "barrier": lambda: Penalty(rule="barrier", barrier=0.5, num_steps=2, step_size=0.1),
    "saba": lambda: SABA(step_size=0.1),
}
"""All that carry a gradient through the lower problem's solution by a backward of its own."""

EVERY: dict[str, Callable[[], AbstractHypergradient]] = {
    **DIFFERENTIATED,
    "evolution": lambda: EvolutionStrategies(num_pairs=2, sigma=0.01),
    "first_order": FirstOrder,
}

Batch = Mapping[str, Tensor]


class Rows:
    """Samples of three features with their sum; `pack` puts a batch into another shape."""

    def __init__(self, seed: int, pack: Callable[[Batch], Any] = dict) -> None:
        self._inputs, self._pack = samples(12, seed), pack

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int] | Tensor) -> Any:
        inputs = self._inputs[torch.as_tensor(indices)]
        return self._pack({"input": inputs, "target": inputs.sum(1)})


def sample_losses(batch: Batch, model: Any) -> Tensor:
    return (model(batch["input"]) - batch["target"]) ** 2


def weighted(batch: Batch, *, model: Any, weigher: Any) -> Tensor:
    losses = sample_losses(batch, model)
    return (torch.sigmoid(weigher(stop_gradient(losses)[:, None])) * losses).mean()


def clean_and_decayed(batch: Batch, *, model: Any, weigher: Any) -> Tensor:
    """The upper parameters also have a gradient of their own."""
    return sample_losses(batch, model).mean() + 0.1 * sum((tensor**2).sum() for tensor in weigher.parameters())


def program(
    make: Callable[[], AbstractHypergradient],
    model: nn.Module | None = None,
    weigher: nn.Module | None = None,
    *,
    lower: Callable[..., Tensor | LossOutput] = weighted,
    upper: Callable[..., Tensor | LossOutput] = clean_and_decayed,
    pack: Callable[[Batch], Any] = dict,
    **settings: Any,
) -> Program:
    """Return it; `settings` go to the lower problem, which takes two steps for one of the upper problem."""
    roles = {"model": "model", "weigher": "weigher"}
    return Program(
        [
            Problem(
                "model",
                Mlp() if model is None else model,
                lower,
                roles=roles,
                stream=Stream(Rows(1, pack), 4, shuffle=False),
                hypergradient=make(),
                **{"optimizer": momentum, "unroll_steps": 2, **settings},
            ),
            Problem(
                "weigher",
                Mlp(num_inputs=1, seed=1) if weigher is None else weigher,
                upper,
                roles=roles,
                stream=Stream(Rows(2, pack), 4, seed=2),
                optimizer=sgd,
            ),
        ],
        Graph({"weigher": ["model"]}, {"model": ["weigher"]}),
    )
