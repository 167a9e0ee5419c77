"""Language models in programs: texts weighted by what they do for others."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import Graph, Implicit, Neumann, Problem, Program, Schedule, Stream, Unrolled
from mlotool.models import Decoder, SequenceWeigher

RATE = 0.3


def _texts(seed: int) -> Tensor:
    return torch.randint(0, 11, (12, 9), generator=torch.Generator().manual_seed(seed))


def _decoder(seed: int, **settings: Any) -> Decoder:
    torch.manual_seed(seed)
    given = {"width": 8, "hidden": 12, "num_heads": 2, **settings}
    return Decoder(11, **given).double()


def _weigher() -> SequenceWeigher:
    weigher = SequenceWeigher(_decoder(1)).double()
    torch.manual_seed(2)
    torch.nn.init.normal_(weigher.output.weight)  # else the decoder would have no gradient
    return weigher


def _lower(batch: Tensor, *, model: Any, weigher: Any, chunk: int | None = None) -> Tensor:
    losses = model.method("losses", batch[:, :-1], batch[:, 1:], chunk=chunk)
    return (weigher(batch) * losses.mean(dim=1)).mean()


def _upper(batch: Tensor, *, model: Any, chunk: int | None = None) -> Tensor:
    return model.method("losses", batch[:, :-1], batch[:, 1:], chunk=chunk).mean()


def _program(hypergradient: Any, chunk: int | None, dropout: float = 0.0) -> Program:
    sgd = partial(torch.optim.SGD, lr=RATE)
    model = Problem(
        "model",
        _decoder(0, dropout=dropout),
        partial(_lower, chunk=chunk),
        roles={"model": "model", "weigher": "weigher"},
        stream=Stream(_texts(1), 4, seed=1),
        optimizer=sgd,
        hypergradient=hypergradient,
    )
    weigher = Problem(
        "weigher",
        _weigher(),
        partial(_upper, chunk=chunk),
        roles={"model": {"problem": "model", "mode": "eval"}},
        stream=Stream(_texts(2), 4, seed=2),
        optimizer=sgd,
    )
    torch.manual_seed(0)
    return Program([model, weigher], Graph({"weigher": ["model"]}, {"model": ["weigher"]}))


def _after(program: Program) -> list[Tensor]:
    schedule = Schedule(program)
    for _ in range(2):
        schedule.tick()
    return [each.detach() for problem in program.problems.values() for each in problem.module.parameters()]


def test_a_tick_is_that_of_autograd_by_hand() -> None:
    model, weigher = _decoder(0), _weigher()
    first, second = (Stream(_texts(seed), 4, seed=seed).next() for seed in (1, 2))

    def losses(at: dict[str, Tensor], batch: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, at, (batch[:, :-1],))
        return nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none")

    theta = dict(model.named_parameters())
    lower = (weigher(first) * losses(theta, first).mean(dim=1)).mean()
    slopes = torch.autograd.grad(lower, list(theta.values()), create_graph=True)
    stepped = {name: each - RATE * slope for (name, each), slope in zip(theta.items(), slopes, strict=True)}
    meta = torch.autograd.grad(losses(stepped, second).mean(), list(weigher.parameters()))
    expected = [
        *stepped.values(),
        *(each - RATE * slope for each, slope in zip(weigher.parameters(), meta, strict=True)),
    ]

    program = _program(Unrolled(), chunk=5)
    Schedule(program).tick()
    found = [each.detach() for problem in program.problems.values() for each in problem.module.parameters()]
    assert all(bool(slope.any()) for slope in meta)
    torch.testing.assert_close(found, [each.detach() for each in expected], rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The Neumann solve")  # a young model has negative curvature
@pytest.mark.parametrize("hypergradient", [Unrolled(), Implicit(Neumann(3, 0.1))], ids=["unrolled", "neumann"])
def test_chunks_change_nothing_with_dropout_either(hypergradient: Any) -> None:
    whole, chunks = (_after(_program(hypergradient, chunk, dropout=0.3)) for chunk in (None, 5))
    torch.testing.assert_close(chunks, whole, rtol=1e-10, atol=1e-12)
