"""Attention in several runs at once computes what it computes in each alone, as one program or one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fusion.members import bilevel, compared, network, plain

pytestmark = pytest.mark.usefixtures("no_clock")


class Attending(nn.Module):
    """Attends among two tokens, into which it divides its eight features.

    Args:
        needs_weights: torch then takes plain operations, not its kernels.
        hides: the second token is none for even samples.
        options: of `nn.MultiheadAttention`.
    """

    def __init__(self, *, needs_weights: bool = False, hides: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)
        self.needs_weights, self.hides = needs_weights, hides

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unflatten(1, (2, 4))
        hidden = torch.tensor([[False, True], [False, False]]).repeat(len(x) // 2, 1) if self.hides else None
        found, _ = self.attention(tokens, tokens, tokens, key_padding_mask=hidden, need_weights=self.needs_weights)
        return found.flatten(1)


class Encoding(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unflatten(1, (2, 4))).flatten(1)


LAYERS = {
    "kernels": lambda: Attending(),
    "weights": lambda: Attending(needs_weights=True),
    "dropout": lambda: Attending(dropout=0.3),
    "a mask": lambda: Attending(hides=True),
    "biases of keys and values": lambda: Attending(add_bias_kv=True),
    "evaluation": lambda: Attending(dropout=0.3).eval(),
    "an encoder": lambda: Encoding(dropout=0.0),
    "an encoder with dropout": lambda: Encoding(dropout=0.2, norm_first=True),
}


@pytest.mark.parametrize(
    ("program", "name"),
    [*((plain, name) for name in LAYERS), *((bilevel, name) for name in ("kernels", "a mask", "dropout"))],
)
def test_attention_is_that_of_each_run_alone(program: Any, name: str) -> None:
    found = compared(lambda number: program(number, lambda: network(LAYERS[name]())))
    assert not any(any(each) for each in found.failures.values())
    # Finite differences amplify rounding.
    assert found.error < (1e-12 if program is plain else 1e-9)
    draws = "dropout" in name
    assert {*found.reasons} == ({"the losses draw random numbers"} if draws else set())
