"""Sharded problems: two real processes that talk by gloo, against one rank with the joined batches."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mlotool.core.errors import ConfigError
from mlotool.distributed.collectives import Ranks
from mlotool.hypergradient import ConjugateGradient, Implicit, Unrolled
from mlotool.problem.shards import check_rows
from mlotool.program import Program
from mlotool.runner.checkpoint import read_whole_checkpoint
from mlotool.runner.distributed import distribute
from mlotool.runner.loading import evaluate
from tests.program.small import assert_identical
from tests.runner.processes import run_ranks
from tests.runner.two_shards import IN_GROUPS, PROGRAMS, alone, compute, main, tensors, two_levels

Found = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the two ranks leave their files."""
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def found(folder: Path) -> tuple[Found, Found, Found]:
    """Return what one rank computes, and what each of two does."""

    def meanwhile() -> Found:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compute(Ranks())

    found, (first, second) = run_ranks(main, 2, folder, meanwhile=meanwhile)
    return found, first, second


@pytest.mark.parametrize(
    ("kind", "name"), [*(("one group", name) for name in PROGRAMS), *(("groups", name) for name in IN_GROUPS)]
)
def test_shards_equal_one_rank_with_the_joined_batches(found: tuple[Found, Found, Found], kind: str, name: str) -> None:
    """Gradients at the start, then parameters, optimizers' states and norms after ticks, with unequal shares."""
    expected = found[0][name]
    for each in found[1:]:
        assert each[kind][name].keys() == expected.keys()
        for key, value in each[kind][name].items():
            error = (value - expected[key]).abs().max() / expected[key].abs().max().clamp_min(1e-12)
            assert error < 1e-9, (key, float(error))


@pytest.mark.parametrize("name", ["shares", "shares of some"])
def test_each_rank_holds_about_half(found: tuple[Found, Found, Found], name: str) -> None:
    first, second = (each[name] for each in found[1:])
    for kind, (held, whole) in first.items():
        assert held + second[kind][0] == whole
        assert abs(held / whole - 0.5) < 0.02, kind


@pytest.mark.parametrize("name", ["both", "some_lower"])
def test_a_run_goes_on_from_whole_tensors_bit_by_bit(found: tuple[Found, Found, Found], name: str) -> None:
    for each in found[1:]:
        whole, resumed = each["resumed"][name]
        assert_identical(resumed, whole)


@pytest.mark.parametrize("name", ["lower", "some_lower"])
def test_the_first_rank_goes_on_with_the_whole_problem(found: tuple[Found, Found, Found], name: str) -> None:
    merged = found[1]["merged"][name]
    assert_identical(merged["after"], merged["before"])
    assert torch.equal(merged["call"], merged["read"])


def test_all_ranks_find_what_is_not_finite_in_one_shard(found: tuple[Found, Found, Found]) -> None:
    for each in found[1:]:
        assert "The parameters of problem 'model' were found to be NaN or infinite after tick 5" in each["unfinite"]


def test_a_run_evaluates_saves_and_goes_on(found: tuple[Found, Found, Found], folder: Path) -> None:
    """Its checkpoints hold whole tensors, which one process loads."""
    whole, resumed = found[1]["runs"]
    assert whole == resumed == found[2]["runs"][0]
    states = [read_whole_checkpoint(folder / name / "checkpoints/last.ckpt") for name in ("whole", "parts")]
    first, second = (tensors([state["state_dict"], state["mlotool"]["program"]]) for state in states)
    assert_identical(first, second)
    assert first["state/0/problem_classifier.layers.1.weight"].shape == (9, 64)
    assert evaluate(folder / "parts", "test") == {"test/accuracy": whole["test/accuracy"]}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sharded("model", Implicit(ConjugateGradient(3, 1e-8))), ["at 'model'", "by Implicit", "first_order"]),
        (lambda: sharded("weigher", Unrolled()), ["problems.weigher.shard: found shard", "by Unrolled"]),
        (lambda: alone(shard=["body.*", "tail.*"]), ["shard: found 'tail.*'", "body.0.weight"]),
        (lambda: alone(shard=[]), ["problems.model.shard: found []", "a list of texts that is not empty"]),
        (lambda: alone(compile=True), ["problems.model.shard: found shard", "torch.compile"]),
        (lambda: alone(reset_to="initial"), ["problems.model.shard: found shard", "reset_to copies"]),
        (lambda: alone(tasks=2), ["problems.model.shard: found tasks with shard"]),
        (lambda: two_levels(optimizer_roles={"lr": "weigher"}, shard=True), ["problems.model.shard: found shard"]),
        (lambda: two_levels("weigher", reset_to="weigher"), ["problems.weigher.shard", "problems.model.reset_to"]),
    ],
)
def test_what_shards_cannot_do_is_refused(make: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    message = str(caught.value)
    for word in words:
        assert word in message


def sharded(name: str, hypergradient: Any) -> Program:
    return two_levels(name, hypergradient=hypergradient)


def test_parameters_without_rows_are_refused() -> None:
    ordered = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
    single = nn.ParameterDict({"rate": nn.Parameter(torch.ones(()))})
    for module, words in (
        (ordered, "rows in the usual order, .* unlike those of 'weight'"),
        (single, "'rate'"),
    ):
        with pytest.raises(ConfigError, match=rf"^problems\.x\.shard: .* {words}"):
            check_rows("problems.x.shard", "true", module.named_parameters())


def test_one_rank_says_that_it_has_nothing_to_share_with() -> None:
    made = alone()
    with pytest.warns(UserWarning, match=r"problems\.model\.shard: found it set on one rank, where it has no effect"):
        distribute(made, Ranks(), seed=0)
    assert made.problems["model"].shards is None
