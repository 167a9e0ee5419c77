"""What a checkpoint can hold is what its reader reads: each value that is let through comes back, others are told."""

import math
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mlotool.core.plain_state import MAX_DEPTH, find_fault
from mlotool.runner.checkpoint import read_checkpoint, write_checkpoint

SHARED = torch.arange(6.0)


def in_a_checkpoint(value: Any) -> dict[str, Any]:
    state: dict[str, Any] = {key: {} for key in ("schedule", "window", "metrics")}
    numbers = {"tick": 0, "metrics_position": 0, "training_s": 0.0, "is_pending": False, "random_states": []}
    return {"mlotool": {**state, **numbers, "program": {"held": value}}}


def deep(num_levels: int) -> Any:
    value: Any = 1
    for _ in range(num_levels):
        value = [value]
    return value


HELD = {
    "numbers": [0, -1, 2**62, -(2**511), 0.5, math.inf, True, None],
    "keys": {"": 1, "a.b": 2, "ü\ud800": 3, 7: 4, 2**62: 5, 0.5: 6, None: 7, True: 8},
    "depth": deep(MAX_DEPTH - 4),
    "containers": [OrderedDict(a=(1, 2)), Counter("aab"), (), [], {}, {"a": ({"b": []},)}],
    "words of torch": [torch.device("cpu"), torch.float16, torch.uint64],
    "kinds of tensors": [
        torch.ones(2).to(kind)
        for kind in (
            *(torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.uint8, torch.int64),
            *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2, torch.float8_e4m3fn),
        )
    ],
    "layouts": [
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        *(torch.ones(3, 4).t(), torch.ones(9)[::2], torch.ones(1).expand(4), torch.ones(6).as_strided((3, 3), (1, 1))),
        *(torch.zeros(2, 0, 3), torch.tensor(1.0), torch.ones(2, dtype=torch.cfloat).conj(), torch.ones(2)._neg_view()),
    ],
    "memory that is shared": [SHARED, SHARED[:3], SHARED.view(2, 3), *[SHARED.view(-1) for _ in range(200)]],
    "parameters": [nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)],
}


class Sub(torch.Tensor):
    pass


def named() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.tag = 1  # type: ignore[attr-defined]
    return tensor


STRANGE = {
    "key of a tuple": ({(0, 1): 1}, "the key"),
    "set": ({1}, "builtins.set"),
    "numpy's number": (np.float64(1.0), "numpy.float64"),
    "depth": (deep(200), "more than 50 levels"),
    "sparse": (torch.eye(2).to_sparse(), "torch.sparse_coo"),
    "meta": (torch.ones(2, device="meta"), "on meta"),
    "subclass": (torch.ones(2).as_subclass(Sub), "Sub"),
    "attribute": (named(), "attributes tag"),
    "few bits": (torch.zeros(2, dtype=torch.uint4), "torch.uint4"),
}


def assert_same(found: Any, value: Any) -> None:
    assert type(found) is type(value)
    if isinstance(value, torch.Tensor):
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert found.tolist() == value.tolist()
    elif isinstance(value, dict):
        assert list(found) == list(value)
        for key in value:
            assert_same(found[key], value[key])
    elif isinstance(value, list | tuple):
        assert len(found) == len(value)
        for mine, its in zip(found, value, strict=True):
            assert_same(mine, its)
    else:
        assert found == value


@pytest.mark.parametrize("name", HELD)
def test_what_is_let_through_is_read_again(name: str, tmp_path: Path) -> None:
    checkpoint = in_a_checkpoint(HELD[name])
    assert find_fault(checkpoint) is None
    write_checkpoint(checkpoint, tmp_path / "x.ckpt")
    assert_same(read_checkpoint(tmp_path / "x.ckpt")["program"]["held"], HELD[name])


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_not_is_told_with_its_place(name: str) -> None:
    value, words = STRANGE[name]
    fault = find_fault({"a": [1, value]})
    assert fault is not None
    assert words in fault.found
    assert fault.path.startswith("a.1")
