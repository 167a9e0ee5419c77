"""Programs with code of a user's around them are trained as by plain torch, or say what does not count."""

from collections.abc import Iterator

import pytest
import torch

from mlotool.config import building
from mlotool.fusion import stacked_gradients
from tests.user_code.actions import ACTIONS, MODES
from tests.user_code.fuzz import Fuzzed, untimed
from tests.user_code.programs import State, by_hand

NUM_PROGRAMS, NUM_QUICK, TICKS = 200, 4, 60
"""Programs, those of them that normal tests take, and ticks, of which the first twelve are not traced by default."""

ACTED_TICKS = 10
REFUSED = ("frozen", "parameter_replaced", "unfrozen_with_a_group")
"""Actions after which no step is taken."""


@pytest.fixture(autouse=True)
def _like_a_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stacked_gradients, "_fastest", untimed)
    monkeypatch.setattr(building, "TRACE_FROM", 12)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.slow] if n >= NUM_QUICK else []) for n in range(NUM_PROGRAMS)]
)
def test_random_programs(number: int) -> None:
    fuzzed = Fuzzed(number, TICKS)
    assert not [str(each) for each in fuzzed.results() if not each.is_right], str(fuzzed.case())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", [22, pytest.param(7, marks=pytest.mark.slow)])
def test_programs_without_user_code_run(number: int, mode: str) -> None:
    """A refusal counts as right, and must not be all that there is."""
    for result in Fuzzed(number, 20, (), mode).results():
        assert result.error is None and result.difference < 1e-12, str(result)


@pytest.fixture(scope="module")
def idle() -> State:
    return by_hand(Fuzzed(22, ACTED_TICKS, (), "python").case())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ACTIONS)
def test_every_action_acts_and_counts_in_the_next_step(name: str, idle: State) -> None:
    """What changes nothing would show nothing; no warning excuses that a step does not see it."""
    fuzzed = Fuzzed(22, ACTED_TICKS, (name,), "python")
    [acted] = fuzzed.expected
    is_same = acted.keys() == idle.keys() and all(torch.equal(acted[key], idle[key]) for key in idle)
    assert is_same == (name == "state_restrided")
    for result in fuzzed.results():
        assert result.is_right and (result.error is not None) == (name in REFUSED), str(result)
        assert result.error is not None or result.difference < 1e-9, str(result)
