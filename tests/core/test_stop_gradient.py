"""`stop_gradient` and the replay of random numbers and constants."""

from functools import partial

import pytest
import torch
from torch import Tensor

from mlotool.core import stop_gradient
from mlotool.core.errors import ConfigError
from mlotool.core.replay import Replay


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_under_autograd_it_is_a_detach() -> None:
    x = values(2.0).requires_grad_()
    (found,) = torch.autograd.grad((stop_gradient(x**2) * x).sum(), x)
    assert float(found) == 4.0
    assert stop_gradient(x).data_ptr() == x.data_ptr()


def test_in_a_replay_it_is_the_value_of_the_unperturbed_evaluation() -> None:
    def evaluate(x: float) -> list[Tensor]:
        return [stop_gradient(values(10 * x)) + stop_gradient(values(100 * x)) + x]

    replay = Replay(lambda: evaluate(1.0))
    assert [float(replay(partial(evaluate, x))[0]) for x in (2.0, 3.0)] == [112.0, 113.0]
    assert float(evaluate(2.0)[0]) == 222.0  # outside of it, a detach again


def test_the_unperturbed_evaluation_is_run_once_and_only_where_it_is_needed() -> None:
    calls = []

    def base() -> list[Tensor]:
        calls.append(torch.is_grad_enabled())
        return [stop_gradient(values(1.0))]

    plain = Replay(base)
    plain(lambda: [values(1.0)])
    assert calls == []
    replay = Replay(base)
    for _ in range(3):
        replay(lambda: [stop_gradient(values(5.0))])
    assert calls == [False]


@pytest.mark.parametrize(("num_base", "num_perturbed"), [(0, 1), (1, 2), (3, 2)])
def test_a_number_of_calls_that_depends_on_the_parameters_is_an_error(num_base: int, num_perturbed: int) -> None:
    def evaluate(count: int) -> list[Tensor]:
        return [stop_gradient(values(1.0)) for _ in range(count)]

    replay = Replay(partial(evaluate, num_base))
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"calls stop_gradient a different number of times.*expected .*Make the calls"
        ):
            replay(partial(evaluate, num_perturbed))
    assert len(evaluate(num_perturbed)) == num_perturbed  # outside of it, a detach again


def test_every_evaluation_sees_the_same_random_numbers_also_after_a_recording() -> None:
    def evaluate() -> list[Tensor]:
        first = torch.rand(2)
        return [first, stop_gradient(torch.rand(2)), torch.rand(2)]

    torch.manual_seed(1)
    expected = [torch.rand(2) for _ in range(3)]
    torch.manual_seed(1)
    replay = Replay(evaluate)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(replay(evaluate), expected, strict=True))
