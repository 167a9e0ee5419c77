from typing import Any

import pytest
import torch

from mlotool.core.errors import ConfigError
from mlotool.models import Decoder, SequenceWeigher
from tests.models.derivatives import direction, finite_differences, forward_over_reverse, reverse_over_reverse


def _weigher(**settings: Any) -> SequenceWeigher:
    torch.manual_seed(0)
    return SequenceWeigher(Decoder(11, width=8, hidden=12, num_heads=2), **settings).double()


def _tokens() -> torch.Tensor:
    return torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("per", "shape"), [("sequence", (3,)), ("token", (3, 6))])
def test_all_weights_begin_as_said_and_then_differ(per: str, shape: tuple[int, ...]) -> None:
    weigher, tokens = _weigher(per=per, initial=0.3), _tokens()
    weights = weigher(tokens)
    torch.testing.assert_close(weights, torch.full(shape, 0.3, dtype=torch.float64))
    (weights * torch.arange(weights.numel()).reshape(shape)).sum().backward()
    assert bool(weigher.output.weight.grad.any())
    with torch.no_grad():
        weigher.output.weight.sub_(0.01 * weigher.output.weight.grad)
    weights = weigher(tokens)
    assert len({round(float(each), 9) for each in weights.detach().flatten()}) == weights.numel()


def test_no_weight_falls_below_the_smallest() -> None:
    weigher, tokens = _weigher(initial=0.3, smallest=0.1), _tokens()
    torch.testing.assert_close(weigher(tokens), torch.full((3,), 0.3, dtype=torch.float64))
    with torch.no_grad():
        weigher.output.bias.fill_(-50.0)
        torch.testing.assert_close(weigher(tokens), torch.full((3,), 0.1, dtype=torch.float64))
        weigher.output.bias.fill_(50.0)
        torch.testing.assert_close(weigher(tokens), torch.ones(3, dtype=torch.float64))


def test_the_weight_of_a_token_knows_what_comes_before_it_alone() -> None:
    weigher, tokens = _weigher(per="token"), _tokens()
    torch.nn.init.normal_(weigher.output.weight)
    changed = torch.cat([tokens[:, :5], (tokens[:, 5:] + 1) % 11], dim=1)
    found, expected = weigher(changed), weigher(tokens)
    assert torch.equal(found[:, :5], expected[:, :5])
    assert not torch.isclose(found[:, 5], expected[:, 5]).any()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch's own, in its forward mode
def test_second_derivatives_agree_in_every_mode() -> None:
    weigher, tokens = _weigher(), _tokens()
    torch.nn.init.normal_(weigher.output.weight)
    vector = direction(weigher)

    def loss(module: torch.nn.Module) -> torch.Tensor:
        return module(tokens).square().sum()

    reverse = reverse_over_reverse(weigher, loss, vector)
    torch.testing.assert_close(forward_over_reverse(weigher, loss, vector), reverse, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(finite_differences(weigher, loss, vector, 1e-6), reverse, rtol=1e-5, atol=1e-7)


def test_what_it_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"initial=1\.0; expected 0 < initial < 1"):
        _weigher(initial=1.0)
    with pytest.raises(ConfigError, match=r"per=word; expected sequence or token"):
        _weigher(per="word")
    with pytest.raises(ConfigError, match=r"initial=0\.1; expected 0\.2 < initial < 1"):
        _weigher(initial=0.1, smallest=0.2)
    with pytest.raises(ConfigError, match=r"smallest=-0\.1; expected 0 <= smallest < 1"):
        _weigher(smallest=-0.1)
