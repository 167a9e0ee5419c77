"""Which problem is named when a number is not finite: never one alone without ground."""

import math
import warnings
from typing import Any

import pytest
import torch

import mlotool
from mlotool.core.errors import NonFiniteLossError, NonFiniteParametersError
from mlotool.program import Graph, Problem, Program, StepResult
from mlotool.runner.finiteness import check_parameters, explain
from mlotool.runner.values import Window


class Point(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.ones(2))

    def forward(self) -> torch.Tensor:
        return self.x


def program() -> Program:
    def make(name: str, lr: float, **roles: str) -> Problem:
        module = Point()
        optimizer = torch.optim.SGD(module.parameters(), lr=lr)
        return Problem(name, module, lambda batch, **_: torch.zeros(()), roles=roles, optimizer=optimizer)

    problems = [make("w", 1e6, w="w", lam="lam"), make("lam", 1e-3, w="w"), make("apart", 7.0, apart="apart")]
    for problem in problems[:1]:
        problem.hypergradient = mlotool.FirstOrder()
    return Program(problems, Graph({"lam": ["w"]}, {"w": ["lam"]}))


def fails(*ticks: dict[str, float]) -> str:
    """Return the message for the losses of some ticks."""
    problems = program().problems
    window = Window(explain=lambda name, stepped: explain(name, problems, stepped))
    for losses in ticks:
        window.append({name: StepResult(torch.tensor(value), {}) for name, value in losses.items()})
        if not any(map(math.isnan, losses.values())):
            window.flush()
    with pytest.raises(NonFiniteLossError) as caught:
        window.check()
    return str(caught.value)


def test_the_only_one_that_had_stepped_is_to_blame() -> None:
    text = fails({"w": 2.0, "lam": math.nan})
    assert "The loss of problem 'lam' became nan at tick 1" in text
    assert "Lower problems.w.optimizer.lr (1e+06 now), or set that problem's gradient_clip_norm=1.0." in text
    assert "problems.lam.optimizer.lr" not in text


def test_of_several_that_had_stepped_none_is_blamed_alone() -> None:
    text = fails({"w": 2.0, "lam": 1.0}, {"w": math.nan})
    assert "the one that is too large of problems.w.optimizer.lr (1e+06 now) and problems.lam.optimizer.lr" in text
    assert "apart" not in text


def test_a_first_loss_is_the_fault_of_no_learning_rate() -> None:
    text = fails({"w": math.nan})
    assert "look for NaN in the data of 'w'" in text
    assert "optimizer.lr" not in text


def test_all_problems_with_bad_parameters_are_named() -> None:
    made = program()
    with torch.no_grad():
        made.problems["w"].module.x.fill_(math.nan)
        with pytest.raises(NonFiniteParametersError, match="The parameters of problem 'w' were found") as caught:
            check_parameters(made, 5)
        assert "problems.w.optimizer.lr (1e+06 now) and problems.lam.optimizer.lr (0.001 now)" in str(caught.value)
        made.problems["lam"].module.x.fill_(math.inf)
    with pytest.raises(NonFiniteParametersError, match=r"the problems 'w', 'lam' were found .* after tick 5"):
        check_parameters(made, 5)


def run_fails(recipe: str, folder: Any, *overrides: str) -> str:
    plain = ["logger=csv", "runner.progress_bar=false", "runner.report=false", *overrides]
    with warnings.catch_warnings(), pytest.raises(NonFiniteLossError) as caught:
        # A rate that is wrong may have a solver say so first.
        warnings.simplefilter("ignore")
        mlotool.run(mlotool.compose(recipe, plain), output_dir=folder)
    return str(caught.value)


def test_a_run_with_a_wrong_rate_below_names_it(tmp_path: Any) -> None:
    rates = ["problems.classifier.optimizer.lr=1e6", "runner.max_ticks=20"]
    text = run_fails("mwn", tmp_path / "run", *rates)
    # During the warm-up nothing else had stepped.
    assert "Lower problems.classifier.optimizer.lr (1e+06 now)" in text
    assert "problems.reweight.optimizer.lr" not in text


def test_a_run_with_a_wrong_rate_above_names_it_though_it_shows_below(tmp_path: Any) -> None:
    text = run_fails("learned_lr", tmp_path / "rate", "problems.rate.optimizer.lr=1e3", "runner.max_ticks=60")
    assert "problems.rate.optimizer.lr (1000 now)" in text
    assert "problems.classifier.optimizer.lr" not in text
    rates = ["problems.decay.optimizer.lr=8", "runner.max_ticks=100"]
    text = run_fails("logistic_hpo", tmp_path / "decay", *rates)
    assert text.startswith("The loss of problem 'classifier' became")
    assert "problems.decay.optimizer.lr (8 now)" in text
