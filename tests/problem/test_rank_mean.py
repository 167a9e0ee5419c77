"""Gradients of ranks whose losses read other parameters, as experts and skipped layers do."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import Graph, Problem, Program, Unrolled
from mlotool.problem.rank_mean import RankMean, Reduce
from tests.program.small import numbers, run_ticks
from tests.program.test_reduce import Ranks
from tests.programs import Point


class Experts(nn.Module):
    """Of three numbers, a sample reads the one that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(numbers(1.0 + place)) for place in range(3)])

    def forward(self, place: int) -> Tensor:
        value: Tensor = self.values[place]
        return value


def test_what_is_unused_on_this_rank_alone_has_a_mean() -> None:
    def exchange(vector: Any) -> list[Tensor]:
        other = [numbers(1.0), numbers(4.0), numbers(0.0), numbers(1.0, 1.0, 0.0)]
        return [(mine + its) / 2 for mine, its in zip(vector, other, strict=True)]

    theta = [numbers(0.0)] * 3
    found = RankMean(exchange).gradient([numbers(3.0), None, None], theta)
    assert [None if each is None else float(each) for each in found] == [2.0, 2.0, None]


def test_complex_parameters_have_flags_too() -> None:
    theta = [torch.zeros(2, dtype=torch.complex64)] * 2
    gradient = torch.tensor([1 + 2j, 3j])
    found = RankMean(lambda vector: [1 * each for each in vector]).gradient([gradient, None], theta)
    assert found[0] is not None
    assert torch.equal(found[0], gradient)
    assert found[1] is None


def test_where_all_are_used_no_values_are_copied_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a copy makes the host wait for the device, in every gradient."""
    theta = [numbers(1.0), numbers(2.0)]
    monkeypatch.setattr(torch, "tensor", pytest.fail)
    found = RankMean(lambda vector: [2 * each for each in vector]).gradient(theta, theta)
    assert [None if each is None else float(each) for each in found] == [2.0, 4.0]


def test_ranks_that_read_other_parameters_keep_the_same_ones() -> None:
    """The third is read by none: weight decay leaves it alone."""

    def program(places: list[int], reduce: Reduce | None) -> Program:
        def fit(batch: Any, *, w: Any, u: Any) -> Tensor:
            return torch.stack([(w(place) * u().sum() - 3).square().sum() for place in places]).mean()

        def score(batch: Any, *, w: Any) -> Tensor:
            return torch.stack([w(place).square().sum() for place in (0, 1)]).sum()

        step = partial(torch.optim.SGD, lr=0.02)
        settings: Any = {"unroll_steps": 3, "hypergradient": Unrolled(), "roles": {"w": "w", "u": "u"}}
        lower = Problem("w", Experts(), fit, optimizer=partial(step, weight_decay=0.1), **settings)
        upper = Problem("u", Point(numbers(0.2, 0.5)), score, roles={"w": "w"}, optimizer=step)
        return Program([lower, upper], Graph({"u": ["w"]}, {"w": ["u"]}), reduce)

    def trained(places: list[int], reduce: Reduce | None) -> list[Tensor]:
        made = run_ticks(program(places, reduce), 6).program
        return [each.clone() for problem in made.problems.values() for each in problem.current()]

    whole = trained([0, 1], None)
    for found in Ranks().run(lambda rank, reduce: trained([rank], reduce)):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, whole, strict=True))
    assert float(whole[2]) == 3.0
