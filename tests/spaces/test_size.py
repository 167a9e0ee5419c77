"""How many models a space has: each built where there are few, else by what depends on what."""

from collections.abc import Callable

import pytest

from mlotool.core.errors import InfeasibleModelError
from mlotool.spaces.decisions import Decide, Decisions, choose, deciding
from mlotool.spaces.summary import SpaceSize, space_size


def size(ask: Callable[[], object], **limits: float) -> SpaceSize:
    def build(decide: Decide) -> Decisions:
        with deciding(decide) as decisions:
            ask()
        return decisions

    with deciding() as taken:
        ask()
    return space_size(build, taken.made, **limits)  # type: ignore[arg-type]


def kernels(count: int) -> None:
    for number in range(count):
        choose(f"kernel_{number}", [1, 3, 5])


def test_nothing_to_decide() -> None:
    assert str(size(lambda: None)) == "1 model: nothing is decided"


def test_few_are_built() -> None:
    assert size(lambda: kernels(2)) == SpaceSize(9, "", "each was built once, without values")
    assert size(lambda: kernels(choose("depth", [1, 2, 3]))).number == 3 + 9 + 27


def test_few_of_which_some_are_none() -> None:
    def ask() -> None:
        first, second = choose("a", [1, 2, 3]), choose("b", ["x", "y"])
        if first == 2 and second == "y":
            raise InfeasibleModelError("no model")

    found = size(ask)
    assert (found.number, found.bound) == (5, "")
    assert "1 other choices make no model" in found.reason


@pytest.mark.parametrize("count", [10, 100])
def test_many_that_do_not_depend_on_each_other(count: int) -> None:
    found = size(lambda: kernels(count))
    assert (found.number, found.bound) == (3**count, "")
    assert f"{count} decisions, none of which changes the others" in found.reason
    assert str(found).startswith("59,049 models" if count == 10 else "about 5.1e47 models")


def test_many_that_depend_on_one() -> None:
    found = size(lambda: kernels(choose("depth", [1, 2, 9, 10])))
    assert (found.number, found.bound) == (3 + 9 + 3**9 + 3**10, "")
    assert "all values of depth" in found.reason


def test_many_of_which_some_are_none_are_a_bound() -> None:
    def ask() -> None:
        kernels(10)
        if choose("last", [1, 2]) == 2:
            raise InfeasibleModelError("no model")

    found = size(ask)
    assert (found.number, found.bound) == (2 * 3**10, "at most")


def test_decisions_that_change_others_only_together() -> None:
    # A cell's operations are more places for what grows, once something grows.
    def ask() -> None:
        places = 2 + sum(choose(f"operation_{number}", ["skip", "pool", "conv"]) == "conv" for number in range(3))
        if choose("grow", ["none", "branch"]) == "branch":
            choose("place", range(places))
            choose("kind", ["a", "b"])

    found = size(ask, most=2_000)
    cells = dict(enumerate((8, 12, 6, 1)))
    assert (found.number, found.bound) == (27 + sum(2 * (2 + number) * count for number, count in cells.items()), "")


@pytest.mark.parametrize("limits", [{"most": 30}, {"seconds": 0.0}])
def test_a_count_that_ends_early_is_a_lower_bound(limits: dict[str, float]) -> None:
    def ask() -> None:
        for number in range(20):
            if choose(f"has_{number}", [0, 1]):
                choose(f"kernel_{number}", [1, 3, 5])

    found = size(ask, **limits)
    assert found.bound == "at least"
    assert 0 < found.number < 4**20
    assert "the count ended after" in found.reason
