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


def infeasible_pair() -> None:
    if (choose("a", [1, 2, 3]), choose("b", ["x", "y"])) == (2, "y"):
        raise InfeasibleModelError("no model")


def infeasible_half() -> None:
    kernels(10)
    if choose("last", [1, 2]) == 2:
        raise InfeasibleModelError("no model")


def inputs() -> None:
    kernels(8)
    choose("input", range(choose("num_inputs", [2, 3])))


INDEPENDENT = "decisions, none of which changes the others"


@pytest.mark.parametrize(
    ("ask", "number", "bound", "reason"),
    [
        (lambda: None, 1, "", "nothing is decided"),
        (lambda: kernels(2), 9, "", "each was built once, without values"),
        (lambda: kernels(choose("depth", [1, 2, 3])), 3 + 9 + 27, "", "each was built once, without values"),
        (infeasible_pair, 5, "", "1 other choices make no model"),
        (lambda: kernels(10), 3**10, "", f"10 {INDEPENDENT}"),
        (lambda: kernels(100), 3**100, "", f"100 {INDEPENDENT}"),
        (lambda: kernels(choose("depth", [1, 2, 9, 10])), 3 + 9 + 3**9 + 3**10, "", "all values of depth"),
        (inputs, 3**8 * (2 + 3), "", "all values of"),
        (infeasible_half, 2 * 3**10, "at most", "make no model"),
    ],
)
def test_models_are_counted(ask: Callable[[], object], number: int, bound: str, reason: str) -> None:
    found = size(ask)
    assert (found.number, found.bound) == (number, bound)
    assert reason in found.reason


def test_a_number_is_readable() -> None:
    begins = {1: "1 model: ", 3**10: "59,049 models: ", 3**100: "about 5.1e47 models: "}
    assert all(str(SpaceSize(number, "", "")) == text for number, text in begins.items())


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
