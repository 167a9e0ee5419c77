"""When two results are the same but for rounding."""

import pytest
import torch

from mlotool.core.unchanged import ANY_KERNELS

LARGE = torch.full((4096,), 6e4, dtype=torch.float16)
INFINITE, NEGATIVE, NAN = (torch.tensor([1.0, value]) for value in (torch.inf, -torch.inf, torch.nan))


@pytest.mark.parametrize(("a", "b"), [(LARGE, -LARGE), (INFINITE, NEGATIVE), (INFINITE, NAN), (NAN, LARGE[:2].float())])
def test_large_and_not_finite_values_count(a: torch.Tensor, b: torch.Tensor) -> None:
    assert ANY_KERNELS.covers(a, a.clone()) and not ANY_KERNELS.covers(a, b)
