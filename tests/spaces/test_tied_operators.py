"""One decision for the places of several blocks that are equal behind the block."""

from functools import partial

import pytest
from torch import nn

from mlotool.core.errors import ConfigError
from mlotool.spaces import Operator, Space


def base() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Tanh()) for _ in range(3)))


MANY = partial(Operator, "act", candidates={"same": None, "gelu": nn.GELU})


def kinds(space: nn.Module, name: int) -> list[str]:
    return [type(block[name]).__name__ for block in space.children()]  # type: ignore[index]


@pytest.mark.parametrize("shared", [False, True])
def test_equal_places_of_blocks_have_one_decision(shared: bool) -> None:
    space = Space(base, [MANY(at="*.[12]", tied="*")], inputs=[2], shared=shared)
    names = [each.name for each in space.table] if shared else list(space.decisions)  # type: ignore[union-attr]
    assert names == ["act_0", "act_1"]


def test_a_decision_changes_all_of_its_places_and_no_other() -> None:
    space = Space(base, [MANY(at="*.[12]", tied="*")], inputs=[2], decisions={"act_1": "gelu"})
    assert (kinds(space, 1), kinds(space, 2)) == (["ReLU"] * 3, ["GELU"] * 3)


def test_a_path_with_which_a_place_does_not_begin_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"found the place '0\.1', which does not begin with 'blocks\.\*'"):
        Space(base, [MANY(at="*.1", tied="blocks.*")], inputs=[2])
    with pytest.raises(ConfigError, match="tied: found 3; expected true or false or a text"):
        MANY(at="*.1", tied=3)
