"""The options in conf/hypergradient/ that are implicit: a swap of them leaves no key over."""

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from mlotool import hypergradient
from mlotool.config.trusted import trusted_names

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


def test_every_solver_may_be_named() -> None:
    solvers = {name for name in hypergradient.solvers.__all__ if isinstance(getattr(hypergradient, name), type)}
    expected = {f"mlotool.hypergradient.{name}" for name in solvers - {"AbstractSolver", "SolveResult", "Status"}}
    assert set(trusted_names("solver")) == expected
