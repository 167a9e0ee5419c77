"""Which blocks the setting `remat` finds, and what it says where it finds none."""

import logging
from typing import Any

import pytest
from torch import nn

from mlotool import Problem
from mlotool.core.errors import ConfigError
from mlotool.models import ResNet, TextTransformer, WideResNet
from mlotool.problem.remat import blocks_of
from tests.program.test_remat import Block, Net


def made(remat: Any, module: nn.Module | None = None) -> Problem:
    return Problem("model", module or Net(3), lambda batch, *, model: None, roles={"model": "model"}, remat=remat)


@pytest.mark.parametrize(
    ("remat", "paths"),
    [
        (["blocks.*"], ["blocks.0", "blocks.1", "blocks.2"]),
        ("blocks.[02]", ["blocks.0", "blocks.2"]),
        (["blocks.[01].attention", "first"], ["blocks.0.attention", "blocks.1.attention", "first"]),
        (["last", "l*"], ["last"]),
        ("auto", ["blocks.0", "blocks.1", "blocks.2"]),
    ],
)
def test_paths_lead_to_blocks(remat: Any, paths: list[str]) -> None:
    assert list(blocks_of("model", Net(3), remat)) == paths


def test_a_block_with_two_paths_is_one() -> None:
    block = Block()
    assert list(blocks_of("model", nn.Sequential(block, nn.Tanh(), block), "auto")) == ["0"]


def found(module: nn.Module) -> list[str]:
    return list(blocks_of("model", module, "auto"))


def test_auto_finds_the_outermost_repeated_blocks() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    assert found(nn.Sequential(nn.Linear(4, 4), layer, nn.Dropout(), nn.TransformerEncoderLayer(4, 2, 8))) == ["1", "3"]
    assert found(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)) == ["layers.0", "layers.1", "layers.2"]
    # Sequences of blocks are no blocks; sequences of layers are.
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert found(stages) == ["0.0", "0.1", "1.0", "1.1"]
    assert found(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Sequential(nn.Linear(2, 2)))) == ["0", "1"]
    assert found(nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(2, 2))) == ["0.0", "0.1"]


def test_auto_finds_the_blocks_of_our_models() -> None:
    assert found(TextTransformer(10, 4, 2)) == ["blocks.0", "blocks.1"]
    assert found(TextTransformer(10, 4, 2, num_layers=1)) == ["blocks.0"]
    stages = [f"stages.{stage}.{block}" for stage in range(3) for block in range(2)]
    assert found(ResNet(14, 10, [1, 8, 8])) == stages
    assert found(WideResNet(16, 1, 10, [1, 8, 8])) == stages


def test_it_says_what_auto_has_found(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlotool")
    made("auto")
    assert caplog.messages == ["problems.model.remat: auto found 3 blocks, blocks.0 to blocks.2."]
    caplog.clear()
    made(["blocks.*"])
    assert not caplog.messages


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (["block.*"], "found 'block.*'; expected a path of submodules of Net, in which *"),
    "parameter": (["blocks.*.up.bias"], "found 'blocks.*.up.bias'; expected a path of submodules of Net"),
    "list": (["blocks"], "expected modules with a forward of their own, unlike 'blocks'. Write 'blocks.*' for those"),
    "true": (True, "found True; expected a text or a list of texts or null"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_block_is_refused(name: str) -> None:
    remat, part = WRONG[name]
    with pytest.raises(ConfigError) as refused:
        made(remat)
    assert str(refused.value).startswith("problems.model.remat: found ")
    assert part in str(refused.value)


def test_auto_that_finds_nothing_is_refused() -> None:
    assert made([]).rematerialized is None
    with pytest.raises(ConfigError, match=r"problems\.model\.remat: found 'auto'; expected auto with repeated blocks"):
        made("auto", nn.Sequential(Block(), nn.Linear(2, 2)))
