"""Traces of batches that are parts of larger tensors: what a trace views, it views at the batch's own strides."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from mlotool import Graph, Problem, Program, Stream
from mlotool.data import TextWindows
from mlotool.losses import next_token
from mlotool.models import Decoder
from mlotool.program.traced_function import copied
from tests.program.small import samples
from tests.program.test_trace import assert_close, is_traced, ticked, traced, tracers

PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda x: x[:, 1:4],
    "expanded": lambda x: x[:, :1].expand(-1, 7),
    "a part transposed": lambda x: x[1:, 2:].T,
    "nothing": lambda x: x[:0],
    "whole": lambda x: x,
}


@pytest.mark.parametrize("name", PARTS)
def test_a_copy_has_the_strides(name: str) -> None:
    whole = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    tensor = PARTS[name](whole)
    copy = copied(tensor)
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride() or not tensor.numel()
    whole.zero_()
    assert not copy.numel() or bool(copy.any())


def test_a_language_model_is_traced() -> None:
    """Its targets are windows without their first token: `flatten` copies them, and views what has no gaps."""

    def make() -> Program:
        tokens = torch.randint(11, (200,), generator=torch.Generator().manual_seed(0))
        windows = TextWindows(tokens, torch.arange(0, 190, 7), torch.zeros(28, dtype=torch.int64), length=6)
        torch.manual_seed(0)
        model = Decoder(11, width=8, hidden=8, num_heads=2, num_layers=1).double()
        optimizer = partial(torch.optim.SGD, lr=0.1)
        stream = Stream(windows, 4, seed=1)
        return Program(
            [Problem("w", model, next_token, roles={"model": "w"}, stream=stream, optimizer=optimizer)], Graph()
        )

    found = traced(make())
    assert_close(ticked(found), ticked(make()))
    assert is_traced(found, "w")


class Alternating(Dataset[Tensor]):
    """Batches (b, 3) by turns as they are and as a part of wider ones."""

    def __init__(self) -> None:
        self._num_batches = 0

    def __len__(self) -> int:
        return 12

    def __getitems__(self, indices: Sequence[int]) -> Tensor:
        self._num_batches += 1
        batch = samples(12)[torch.as_tensor(indices)]
        return batch if self._num_batches % 2 else torch.cat([batch, batch], 1)[:, :3]


def test_batches_of_other_strides_have_a_trace_of_their_own() -> None:
    def flat(batch: Tensor, *, model: Any) -> Tensor:
        return (model(batch.flatten().view(-1, 3)) - 1).square().mean()

    def make() -> Program:
        torch.manual_seed(0)
        optimizer = partial(torch.optim.SGD, lr=0.1)
        stream = Stream(Alternating(), 4, seed=1)
        model = nn.Linear(3, 2).double()
        return Program([Problem("w", model, flat, roles={"model": "w"}, stream=stream, optimizer=optimizer)], Graph())

    found = traced(make())
    assert_close(ticked(found), ticked(make()))
    assert len(tracers(found, "w")[0]._traces) == 2
