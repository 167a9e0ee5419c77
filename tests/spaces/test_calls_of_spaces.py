"""How a space is called, what it takes out of its base, and what it leaves in the process."""

import gc
import linecache
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.spaces import Operator, Space


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, input: Tensor, scale: Tensor) -> Tensor:
        return self.layer(input) * scale  # type: ignore[no-any-return]


def test_arguments_have_the_names_of_the_base() -> None:
    space = Space(Scaled, inputs=[[4], [4]])
    x, scale = torch.randn(3, 4), torch.randn(3, 4)
    expected = space.layer(x) * scale
    assert torch.equal(space(x, scale=scale), expected)
    assert torch.equal(space(scale=scale, input=x), expected)
    for given, named in (((x,), {"factor": x}), ((x,), {"input": x}), ((x,), {}), ((x, x, x), {})):
        with pytest.raises(TypeError, match="argument"):
            space(*given, **named)


def test_lines_of_a_graph_go_with_it() -> None:
    def count() -> int:
        gc.collect()
        return sum(name.startswith("<graph of") for name in linecache.cache)

    before = count()
    space = Space(partial(nn.Linear, 4, 4), inputs=[4])
    assert count() == before + 1
    del space
    assert count() == before


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layer(x), self.layer.weight)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Tied()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)  # type: ignore[no-any-return]


def remove_all() -> None:
    for _ in range(2):
        space = Space(Outer, [Operator("kind", "block", {"identity": nn.Identity})], inputs=[4])
        assert not dict(space.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1"])
def test_what_is_removed_depends_on_no_hash(seed: str) -> None:
    code = "from tests.spaces.test_calls_of_spaces import remove_all; remove_all()"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
