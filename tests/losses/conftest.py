import pytest
import torch
from torch import nn


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Six samples of four features and one of three classes; the labels of two are wrong."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, 3, (6,), generator=generator)
    return {
        "input": torch.randn(6, 4, generator=generator, dtype=torch.float64),
        "target": target,
        "index": torch.tensor([8, 3, 0, 9, 1, 2]),
        "clean_target": (target + torch.tensor([0, 0, 0, 1, 1, 0])) % 3,
    }


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()
