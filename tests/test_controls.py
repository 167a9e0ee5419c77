"""Every recipe that learns something above has a control, `baseline=fixed`."""

from pathlib import Path

import pytest
import torch

import mlotool
from mlotool.config import build
from mlotool.program import Schedule
from mlotool.runner.evaluation import rehearse_losses
from tests.small_recipes import RECIPES, small

# The last ones first: those of a sample take seconds.
LEARN_ABOVE = [name for name in reversed(RECIPES) if mlotool.compose(name).graph.upper_to_lower]


# Another version of Python has other text.
@pytest.mark.filterwarnings("ignore:data.sha256")
@pytest.mark.one_in(8)
@pytest.mark.parametrize("recipe", LEARN_ABOVE)
def test_every_recipe_has_a_control(recipe: str, image_folder: Path) -> None:
    program = build(small(recipe, image_folder, ["baseline=fixed"])).program
    assert program.internals.held == {name for name, lowers in program.graph.upper_to_lower.items() if lowers}
    rehearse_losses(program)
    before = {name: [x.clone() for x in program.problems[name].current()] for name in program.internals.held}
    Schedule(program).tick()
    for name, tensors in before.items():
        assert all(map(torch.equal, tensors, program.problems[name].current())), name
    assert all(program.problems[name].num_steps == 1 for name in program.graph.leaves(program.problems))
