"""The options in conf/hypergradient/ that are implicit: a swap of them leaves no key over."""

import math
import re
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from mlotool import EvolutionStrategies, Implicit, Neumann, Penalty, Unrolled, hypergradient
from mlotool.config.security.trusted import trusted_names
from mlotool.core.errors import ConfigError
from mlotool.core.messages import shown

CONF = Path(__file__).parents[2] / "conf" / "hypergradient"
OPTIONS: dict[str, Any] = {path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in CONF.glob("*.yaml")}
IMPLICIT = sorted(name for name, option in OPTIONS.items() if option["_target_"].endswith(".Implicit"))


def test_they_have_the_same_keys() -> None:
    assert {"soba", "sama", "kfac", "nystrom", "normal_cg", "fixed_point", "cg", "exact"} <= set(IMPLICIT)
    layouts = {tuple(OPTIONS[name]) for name in IMPLICIT}
    assert layouts == {("_target_", *signature(hypergradient.Implicit).parameters)}


@pytest.mark.parametrize("name", IMPLICIT)
def test_they_write_out_every_argument_and_build(name: str) -> None:
    option = dict(OPTIONS[name])
    option.pop("_target_")
    solver = dict(option.pop("solver"))
    target = solver.pop("_target_")
    assert target in trusted_names("solver")
    make = getattr(hypergradient, target.rpartition(".")[2])
    assert list(solver) == list(signature(make).parameters)
    hypergradient.Implicit(make(**solver), **option)


Make = Callable[..., Any]
# A kind, a range, and the rules that two settings make together.
WRONG: list[tuple[Make, dict[str, Any]]] = [
    (Neumann, {"step_size": 0.1, "num_terms": True}),
    (Neumann, {"num_terms": 1, "step_size": math.nan}),
    (Implicit, {"solver": "cg"}),
    (Penalty, {"rule": "barrier", "barrier": 1.0, "growth": 1.0}),
    (Penalty, {"multiplier": None}),
    (EvolutionStrategies, {"restart_every": 2}),
    (Unrolled, {"product": "forward", "remat": False}),
]


@pytest.mark.parametrize(("make", "given"), WRONG)
def test_an_argument_is_refused(make: Make, given: dict[str, Any]) -> None:
    key, value = list(given.items())[-1]
    found = re.escape(shown(value))
    with pytest.raises(
        ConfigError, match=rf"({make.__name__}|hypergradient)\.{key}: found {found}; expected .* Correct"
    ):
        make(**given)


def test_states_of_an_older_version_are_refused_where_they_are_others() -> None:
    tables = {"readers": {}, "gradients": {"last": [], "sum": []}, "is_used": []}
    with pytest.raises(ConfigError, match=r"state of SABA: found 'tables of an older version'.* Begin the run anew"):
        hypergradient.SABA(0.1).load_state(tables)
    algorithm = EvolutionStrategies(persistent=True)
    state = algorithm.initial_state()
    with pytest.raises(ConfigError, match=r"found 'particles of an older version'.* Begin the run anew"):
        algorithm.load_state({**state, "ends": []})
    assert algorithm.load_state({"generator": state["generator"], "last": {}}).keys() == state.keys()
