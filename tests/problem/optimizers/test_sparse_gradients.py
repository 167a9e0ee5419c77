"""Embeddings with sparse gradients take the steps of torch's own loop, and those of dense embeddings."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, RMSprop, SparseAdam

from mlotool import SABA, Exact, Graph, Identity, Implicit, Penalty, Problem, Program, Stream, Unrolled
from mlotool.core.errors import ConfigError
from tests.program.small import parameters, run_ticks
from tests.programs import Point

WORDS = 6


class Words(nn.Module):
    def __init__(self, sparse: bool, layer: type[nn.Module] = nn.Embedding) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = layer(WORDS, 2, sparse=sparse, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x).flatten(1).square().sum(1)


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(WORDS, (9, 2), generator=generator)
    y = torch.rand(9, generator=generator, dtype=torch.float64)
    return [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]


def fit(batch: Any, *, model: Any, rates: Any = None) -> Tensor:
    weight = 1.0 if rates is None else rates()[batch["x"][:, 0]].exp()
    return (weight * (model(batch["x"]) - batch["y"]).square()).mean()


def plain(module: nn.Module, optimizer: Any, **settings: Any) -> Program:
    stream = Stream(batches(), 3, shuffle=False)
    given = {"roles": {"model": "words"}, "stream": stream, "optimizer": optimizer, **settings}
    return Program([Problem("words", module, fit, **given)], Graph(), trace=None)


def bilevel(module: nn.Module, algorithm: Any) -> Program:
    settings: dict[str, Any] = {"optimizer": partial(SGD, lr=0.1), "roles": {"model": "words", "rates": "rates"}}
    stream = partial(Stream, batches(), 3, shuffle=False)
    lower = Problem("words", module, fit, stream=stream(), hypergradient=algorithm, unroll_steps=2, **settings)
    settings["roles"] = {"model": "words"}
    upper = Problem("rates", Point(torch.zeros(WORDS, dtype=torch.float64)), fit, stream=stream(), **settings)
    return Program([upper, lower], Graph({"rates": ["words"]}, {"words": ["rates"]}))


def by_torch(module: nn.Module, optimizer: Optimizer, clip: float | None) -> nn.Module:
    for start in (0, 3, 6, 0, 3):
        part = batches()[start : start + 3]
        optimizer.zero_grad()
        fit({key: torch.stack([each[key] for each in part]) for key in part[0]}, model=module).backward()
        for parameter in module.parameters():
            assert parameter.grad is not None
            if clip is not None:
                # torch.nn.utils.clip_grad_norm_ takes no sparse gradient.
                norm = parameter.grad.coalesce().values().norm() if parameter.grad.is_sparse else parameter.grad.norm()
                parameter.grad = parameter.grad * min(1.0, clip / float(norm + 1e-6))
        optimizer.step()
    return module


def ticked(program: Program) -> dict[str, Tensor]:
    return parameters(run_ticks(program, 5).program)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # Adagrad's
@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize(
    ("optimizer", "is_sparse"),
    [
        (partial(SGD, lr=0.1), True),
        (partial(SGD, lr=0.1, fused=True), False),
        (partial(SGD, lr=0.1, momentum=0.9, nesterov=True), False),
        (partial(SGD, lr=0.1, weight_decay=0.1), False),
        (partial(Adam, lr=0.1), False),
        (partial(RMSprop, lr=0.01), False),
        (partial(Adagrad, lr=0.1), True),
        (partial(SparseAdam, lr=0.1), True),
    ],
    ids=str,
)
def test_steps_are_those_of_torch(optimizer: Any, is_sparse: bool, clip: float | None) -> None:
    found = ticked(plain(Words(sparse=True), optimizer, gradient_clip_norm=clip))["words.words.weight"]
    module = Words(is_sparse)
    expected = by_torch(module, optimizer(list(module.parameters())), clip).words.weight
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_a_bag_of_words_and_several_batches_a_step() -> None:
    found, expected = (
        ticked(plain(Words(sparse, partial(nn.EmbeddingBag, mode="sum")), partial(SGD, lr=0.1), accumulate_batches=2))
        for sparse in (True, False)
    )
    assert torch.allclose(found["words.words.weight"], expected["words.words.weight"], rtol=1e-12)


@pytest.mark.parametrize(
    "algorithm",
    [Implicit(Exact(damping=1.0)), Implicit(Identity(0.1), "finite_difference"), Unrolled(), Penalty(0.1), SABA(0.1)],
    ids=repr,
)
def test_hypergradients_are_those_of_dense_embeddings(algorithm: Any) -> None:
    found, expected = (ticked(bilevel(Words(sparse), algorithm)) for sparse in (True, False))
    for key, value in expected.items():
        assert torch.allclose(found[key], value, rtol=1e-9, atol=1e-12)


def test_what_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"SparseAdam does not support dense gradients"):
        ticked(plain(Words(sparse=False), partial(SparseAdam, lr=0.1)))
    with pytest.raises(
        ConfigError, match=r"words.module: found tasks with sparse gradients; .* torch.vmap, which has no"
    ):
        plain(Words(sparse=True), partial(SGD, lr=0.1), tasks=2)
    with pytest.raises(ConfigError, match=r"under product: forward; .*Write product: reverse"):
        ticked(bilevel(Words(sparse=True), Implicit(Identity(), "forward")))
