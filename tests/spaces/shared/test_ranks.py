"""Two ranks that run different paths, against steps that are averaged by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runner.processes import run_ranks
from tests.spaces.shared import two_ranks as two

TOLERANCE = 1e-12
SHARES = ((0, 2), (2, 5))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return what each of two ranks has found."""
    return run_ranks(two.main, 2, tmp_path_factory.mktemp("ranks"), meanwhile=lambda: None)[1]


def by_hand(optimizer: str, paths: list[Any]) -> list[dict[str, Tensor]]:
    """Return parameters by tick: each one's gradient is the mean over the samples of the ranks that used it."""
    model, seen = two.space(None), []
    names, theta = zip(*model.named_parameters(), strict=True)
    step = two.OPTIMIZERS[optimizer](theta)
    for tick, chosen in enumerate(paths):
        totals: list[Any] = [None] * len(theta)
        sizes = [0] * len(theta)
        for (begin, end), choice in zip(SHARES, chosen, strict=True):
            part = slice(tick * two.BATCH + begin, tick * two.BATCH + end)
            batch = {"input": two.ROWS[0, part], "target": two.ROWS[1, part]}
            path = dict(zip([each.name for each in model.table], choice, strict=True))
            value = two.loss(batch, w=lambda x, path=path: model(x, path=path))
            for place, each in enumerate(torch.autograd.grad(value, theta, allow_unused=True)):
                if each is not None:
                    totals[place] = each * (end - begin) + (0 if totals[place] is None else totals[place])
                    sizes[place] += end - begin
        for x, total, size in zip(theta, totals, sizes, strict=True):
            x.grad = None if total is None else total / size
        step.step()
        seen.append({name: x.detach().clone() for name, x in zip(names, theta, strict=True)})
    return seen


@pytest.mark.parametrize("kind", ["", " apart", " in shards", " in shards apart"])
@pytest.mark.parametrize("optimizer", two.OPTIMIZERS)
def test_two_ranks_equal_the_hand_averaged_steps(found: list[Any], optimizer: str, kind: str) -> None:
    expected = by_hand(optimizer, two.APART if kind.endswith("apart") else two.PATHS)
    for rank in found:
        for tick, values in zip(rank[optimizer + kind]["theta"], expected, strict=True):
            assert tick.keys() == values.keys()
            assert all(torch.allclose(tick[name], values[name], rtol=0, atol=TOLERANCE) for name in values)


@pytest.mark.parametrize("optimizer", two.OPTIMIZERS)
def test_of_a_candidate_in_shards_each_rank_holds_its_rows(found: list[Any], optimizer: str) -> None:
    layer = two.WIDTH * two.WIDTH + two.WIDTH
    copies = 2 if optimizer == "adam" else 1
    for rank, rows in zip(found, (2, 1), strict=True):
        whole, some = (rank[f"{optimizer}{kind}"] for kind in ("", " in shards"))
        # Two places, of which each has one candidate whole and one in shards.
        expected = 2 * layer + 2 * rows * (two.WIDTH + 1)
        assert some["held"] == {"parameters": expected, "state": copies * expected}
        assert whole["held"]["parameters"] == 4 * layer
        assert torch.allclose(some["read"], whole["read"], rtol=0, atol=TOLERANCE)
        assert torch.equal(some["counts"], whole["counts"])


def test_a_run_counts_the_paths_of_all_ranks(found: list[Any]) -> None:
    first, second = (rank["adam"] for rank in found)
    assert first["counts"].tolist() != second["counts"].tolist()
    for each in (first, second):
        assert each["total"]["w"].tolist() == (first["counts"] + second["counts"]).tolist()
    assert sum(first["total"]["w"].tolist()) == 2 * 2 * two.NUM_TICKS


@pytest.mark.parametrize("optimizer", two.OPTIMIZERS)
def test_what_no_rank_used_stays_with_its_momentum(found: list[Any], optimizer: str) -> None:
    before, after = (found[0][optimizer]["theta"][tick] for tick in (2, 5))
    same = {name for name in before if torch.equal(before[name], after[name])}
    # A weight and a bias of `a` at the first place, which ticks 3 to 5 leave out.
    assert len(same) == 2


def test_what_is_left_of_fair_paths_is_each_ranks_own(found: list[Any]) -> None:
    for rank in found:
        # After three paths of two candidates one has its turn next.
        assert rank["left"].dtype == torch.bool
        assert rank["left"].sum(1).tolist() == [1, 1]


@pytest.mark.parametrize("name", two.IMPLICIT)
def test_implicit_hypergradients_are_those_of_the_mean_over_paths(found: list[Any], name: str) -> None:
    """As of one rank whose loss is the mean over both paths, each on its rows."""
    expected = two.hypergradient(two.levels(two.IMPLICIT[name](), None, two.joined_upper_loss, two.joined_lower_loss))
    assert all(each.norm() > 1e-3 for each in expected.values())
    for rank in found:
        for key, value in rank[f"{name} hypergradient"].items():
            assert torch.allclose(value, expected[key], rtol=0, atol=TOLERANCE), (value, expected[key])


def test_a_hypergradient_that_follows_the_steps_of_a_shared_space_is_refused(found: list[Any]) -> None:
    for rank in found:
        for refused in rank["refused"]:
            assert refused.startswith("problems.w.hypergradient: found ")
            assert "expected an implicit one, or first_order" in refused
            assert "since ranks that used a parameter average its gradient" in refused
