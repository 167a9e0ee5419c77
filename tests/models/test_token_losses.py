import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mlotool.core.errors import ConfigError
from mlotool.models.token_losses import token_losses
from tests.live_storage import LiveStorage
from tests.models.derivatives import direction, finite_differences, forward_over_reverse, reverse_over_reverse

TARGETS = torch.randint(0, 13, (3, 7), generator=torch.Generator().manual_seed(0))


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Parameter(torch.randn(3, 7, 5, dtype=torch.float64))
        self.weight = nn.Parameter(torch.randn(13, 5, dtype=torch.float64))

    def losses(self, chunk: int | None) -> torch.Tensor:
        return token_losses(self.features, self.weight, TARGETS, chunk)


@pytest.mark.parametrize("chunk", [None, 1, 4, 7, 21, 100])
def test_losses_are_the_plain_ones(chunk: int | None) -> None:
    head = _Head()
    expected = F.cross_entropy((head.features @ head.weight.T).transpose(1, 2), TARGETS, reduction="none")
    torch.testing.assert_close(head.losses(chunk), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch's own, in its forward mode
@pytest.mark.parametrize("chunk", [4, 7])
def test_derivatives_are_the_plain_ones(chunk: int) -> None:
    head = _Head()
    theta, vector = list(head.parameters()), direction(head)
    slopes, plain = (torch.autograd.grad(head.losses(each).square().sum(), theta) for each in (chunk, 21))
    torch.testing.assert_close(slopes, plain, rtol=1e-12, atol=1e-12)

    def loss(module: nn.Module) -> torch.Tensor:
        return module.losses(chunk).square().sum()  # type: ignore[operator]

    plainly = reverse_over_reverse(head, lambda module: module.losses(21).square().sum(), vector)  # type: ignore[operator]
    for product in (reverse_over_reverse, forward_over_reverse):
        torch.testing.assert_close(product(head, loss, vector), plainly, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(finite_differences(head, loss, vector, 1e-5), plainly, rtol=1e-6, atol=1e-6)


def test_coarse_logits_have_precise_losses() -> None:
    features, weight = torch.randn(9, 4).bfloat16(), torch.randn(13, 4).bfloat16()
    targets = torch.arange(9)
    expected = F.cross_entropy((features @ weight.T).double(), targets, reduction="none")
    found = token_losses(features, weight, targets, chunk=2)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def _peak(chunk: int) -> int:
    """Return the bytes that live at once in a Hessian-vector product of 64 tokens and 1,000 words."""
    features, weight = torch.randn(64, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    targets, vector = torch.arange(64), [torch.randn(64, 4), torch.randn(1000, 4)]
    with LiveStorage() as live:
        slopes = torch.autograd.grad(
            token_losses(features, weight, targets, chunk).sum(), [features, weight], create_graph=True
        )
        torch.autograd.grad(slopes, [features, weight], vector)
    return live.peak


def test_the_logits_of_all_tokens_never_live_at_once() -> None:
    logits = 64 * 1000 * 4
    assert _peak(64) > 3 * logits
    assert _peak(4) < logits


@pytest.mark.parametrize("chunk", [0, -3])
def test_a_chunk_without_tokens_is_refused(chunk: int) -> None:
    with pytest.raises(ConfigError, match=rf"chunk={chunk}; expected at least 1, .* Set problems.*chunk=256"):
        token_losses(torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.int64), chunk)
