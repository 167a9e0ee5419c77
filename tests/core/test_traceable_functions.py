"""What stands for functions of torch in a trace has their values and gradients."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from mlotool.core.tracing import TraceableFunctions

LOGITS = torch.randn(5, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGET = torch.tensor([[0, 1, 2, 2], [1, 1, 0, 2], [0, 0, 0, 0], [2, 1, 2, 1], [0, 2, 1, 1]])
IGNORED = TARGET.masked_fill(TARGET == 2, -100)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("target", [TARGET, IGNORED])
def test_smoothing_by_a_tensor(target: Tensor, reduction: str) -> None:
    logits, others = (LOGITS.clone().requires_grad_() for _ in range(2))
    expected = functional.cross_entropy(logits, target, label_smoothing=0.2, reduction=reduction)
    with TraceableFunctions():
        found = functional.cross_entropy(
            others, target, label_smoothing=torch.tensor(0.2, dtype=torch.float64), reduction=reduction
        )
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(others.grad, logits.grad)


def test_what_else_a_function_takes_is_its_own() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    for settings in ({"weight": weight}, {"label_smoothing": 0.1}, {}):
        with TraceableFunctions():
            found = functional.cross_entropy(LOGITS, TARGET, **settings)  # type: ignore[arg-type]
        assert torch.equal(found, functional.cross_entropy(LOGITS, TARGET, **settings))  # type: ignore[arg-type]
    with TraceableFunctions():
        assert torch.equal(functional.one_hot(TARGET), functional.one_hot(TARGET))


def test_one_hot_is_traced() -> None:
    def traced(target: Tensor) -> Tensor:
        with TraceableFunctions():
            return functional.one_hot(target, 4)

    found = make_fx(traced)(TARGET)(IGNORED.clamp_min(0))
    assert torch.equal(found, functional.one_hot(IGNORED.clamp_min(0), 4))
    assert found.dtype == torch.int64
