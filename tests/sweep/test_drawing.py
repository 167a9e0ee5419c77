"""Which sweeps draw decisions, and which draws make no model."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlotool.config import register_sources
from mlotool.config.security.trusted import trust
from mlotool.config.sweeps.sweep_plan import Dimension
from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.sweep.drawing import Drawer
from tests.sweep.plans import make_plan

RECIPE = """# @package _global_
# A search.
defaults: [/optimizer@problems.classifier.optimizer: sgd, _self_, {override /data: digits}, {override /sweep: optuna}]
name: drawn
problems:
  classifier:
    module: MODULE
    loss: {_target_: mlotool.losses.cross_entropy, roles: {model: classifier}}
    stream: {split: train, batch_size: 20}
evaluate: {problem: classifier, metrics: [accuracy], splits: {val: 3}}
objective: val/accuracy
"""
SPACE = """
      _target_: mlotool.spaces.Space
      base: {_target_: mlotool.models.MLP, image_shape: "${data.image_shape}", num_classes: 10, hidden: [8]}
      inputs: ${data.image_shape}
      mutators: [{_target_: mlotool.spaces.Insert, name: norm, at: layers.1, candidates: {CANDIDATES}}]"""
REFUSED = "{_target_: torch.nn.GroupNorm, num_groups: 3}"
CODE = """
from torch import nn
from mlotool.spaces import InfeasibleModelError, choose

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        for layer in range(choose("depth", [1, 2, 3])):
            choose(f"width_{layer}", [8, 16])

class Net(nn.Module):
    def __init__(self, first=8):
        super().__init__()
        width, heads = choose("width", [first, 16]), choose("heads", [1, 3, 5, 7])
        if heads == 3 and width % heads:
            raise ValueError(f"width {width} is no multiple of 3 heads")
        if heads == 5:
            raise InfeasibleModelError("five heads are too many")
        if heads == 7:
            raise TypeError("a mistake")
        if float(nn.Linear(2, 2).weight.sum()) > 1e9 or width < 8:
            raise ValueError("too narrow")
"""

Draws = Callable[..., Drawer]


@pytest.fixture
def drawer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Draws]:
    """Makes what draws from a recipe with a module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    name = f"drawn_{abs(hash(str(tmp_path)))}"
    Path(f"{name}.py").write_text(CODE)
    trust(name)
    register_sources([tmp_path])

    def make(module: str, *dimensions: Dimension, more: str = "") -> Drawer:
        (tmp_path / "drawn.yaml").write_text(RECIPE.replace("MODULE", module.replace("OWN", name)) + more)
        return Drawer(replace(make_plan(tmp_path, *dimensions), fixed=("+recipe=drawn",)))

    yield make
    sys.modules.pop(name, None)


def by(**values: Any) -> Callable[[str, tuple[Any, ...]], Any]:
    return lambda name, candidates: values.get(name, candidates[0])


def space(candidates: str) -> str:
    return SPACE.replace("CANDIDATES", candidates)


def test_a_first_choice_that_is_wrong_refuses_no_sweep(tmp_path: Path) -> None:
    wrong = Dimension("problems.classifier.stream.batch_size", ("-1", "10"))
    assert not Drawer(make_plan(tmp_path, wrong)).is_needed


def test_a_candidate_that_refuses_its_place_makes_no_model(drawer: Draws) -> None:
    found = drawer(space(f"none: null, odd: {REFUSED}"))
    assert found.draw([], by()) == {"norm_0": "none"}
    with pytest.raises(InfeasibleModelError) as caught:
        found.draw([], by(norm_0="odd"))
    assert "mutators[0].candidates.odd" in str(caught.value)


def test_first_candidates_that_refuse_their_place_refuse_the_sweep(drawer: Draws) -> None:
    with pytest.raises(ConfigError, match="the first candidates of all decisions") as caught:
        drawer(space(f"odd: {REFUSED}, none: null"))
    assert not isinstance(caught.value, InfeasibleModelError)


def test_a_mistake_in_a_candidate_refuses_the_sweep(drawer: Draws) -> None:
    for candidate, text in (
        ("{_target_: torch.nn.GroupNorm, num_groops: 2}", "candidates.other.num_groops: unknown keyword"),
        ("{_target_: torch.nn.GroupNormal}", "found 'torch.nn.GroupNormal', which is not trusted"),
        ("{_target_: OWN.Missing}", "Missing"),
    ):
        with pytest.raises(ConfigError, match=text) as caught:
            drawer(space(f"none: null, other: {candidate}"), Dimension("seed", ("0", "1")))
        assert not isinstance(caught.value, InfeasibleModelError)


def test_code_that_chooses_may_refuse_what_it_has_chosen(drawer: Draws) -> None:
    found = drawer("{_target_: OWN.Net}")
    assert found.draw([], by(heads=1, width=16)) == {"width": 16, "heads": 1}
    with pytest.raises(InfeasibleModelError, match="width 16 is no multiple of 3 heads"):
        found.draw([], by(heads=3, width=16))
    with pytest.raises(InfeasibleModelError, match="five heads are too many"):
        found.draw([], by(heads=5))
    with pytest.raises(ConfigError, match="a mistake") as caught:
        found.draw([], by(heads=7))
    assert not isinstance(caught.value, InfeasibleModelError)
    with pytest.raises(ConfigError, match="too narrow") as caught:
        drawer("{_target_: OWN.Net, first: 7}")
    assert not isinstance(caught.value, InfeasibleModelError)


def test_a_fixed_decision_is_left_out_where_a_model_does_not_ask_for_it(drawer: Draws) -> None:
    found = drawer("{_target_: OWN.Deep}", more="decisions: {width_1: 16}\n")
    assert found.draw([], by(depth=1)) == {"depth": 1, "width_0": 8, "width_1": None}
    assert found.draw([], by(depth=2)) == {"depth": 2, "width_0": 8}

    with pytest.raises(ConfigError, match=r"decisions.widht_1: found 16, but none of 50 .* Did you mean 'width_1'\?"):
        drawer("{_target_: OWN.Deep}", more="decisions: {widht_1: 16}\n")
