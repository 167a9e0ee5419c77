"""The schema for editors takes every recipe, and refuses what a check refuses."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from mlotool.cli.verbs.schema import recipe_schema
from mlotool.config import check, compose
from mlotool.config.recipes import _summary_and_task
from mlotool.config.schema import SweepConfig
from mlotool.core.errors import ConfigError
from mlotool.hypergradient import Neumann

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture(scope="module")
def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    schema = recipe_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def test_every_recipe_is_valid(validator: Any) -> None:
    recipes = {file.stem: yaml.safe_load(file.read_text()) for file in RECIPES.glob("*.yaml")}
    assert len(recipes) > 50
    assert {name: error.message for name, recipe in recipes.items() for error in validator.iter_errors(recipe)} == {}


CG = "mwn", "hypergradient=cg"
UNROLLED = "mwn", "hypergradient=unrolled"
WRONG: list[tuple[tuple[str, ...], str, Any]] = [
    # Of the config's own schema: types, ranges, choices, keys, what mappings and lists hold.
    (("mwn",), "seed", -1),
    (("mwn",), "objective_mode", "smallest"),
    (("mwn",), "problem", {}),
    (("mwn",), "runner.max_ticks", 1.5),
    (("mwn",), "runner.log_every", 0),
    (("mwn",), "runner.accelerator", "tpu"),
    (("mwn",), "runner.devices", "both"),
    (("mwn",), "runner.max_tick", 5),
    (("mwn",), "runner.trainer.max_epochs", 3),
    (("mwn",), "evaluate.splits.val", "never"),
    (("mwn",), "evaluate.metrics", "accuracy"),
    (("mwn",), "sweep.num_trials", 0),
    # Settings of problems and streams.
    (("maml",), "problems.learner.tasks", -4),
    (("mwn",), "problems.classifier.unroll_step", 2),
    (("mwn",), "problems.classifier.precision", "fp64"),
    (("mwn",), "problems.classifier.gradient_clip_norm", 0),
    (("mwn",), "problems.classifier.shard", 2),
    (("mwn",), "problems.classifier.stream.batch_size", 0),
    (("mwn",), "problems.classifier.stream.batchsize", 5),
    # Arguments of targets: data, models, losses, roles, analyses, optimizers, hypergradients and what is in them.
    (("mwn",), "data.sizes.train", -3),
    (("mwn",), "data.label_noise.rate", 1.5),
    (("mwn",), "data.label_noise", {"kind": "flip", "rate": 0.1, "rates": [0.1]}),
    (("mwn",), "problems.classifier.module.hidden", "wide"),
    (("mwn",), "problems.classifier.module.hiden", [3]),
    (("mwn",), "problems.reweight.module._target_", "mlotool.models.WeightNets"),
    (("mwn",), "problems.reweight.loss.label_smoothing", 2.0),
    (("mwn",), "problems.reweight.loss.batch", 3),
    (("mwn",), "problems.reweight.loss.roles.net", "classifier"),
    (("mwn",), "problems.reweight.loss.roles.model", {"problem": "classifier", "mode": "evaluation"}),
    (("mwn",), "analyses.weights.batch_size", 0),
    (("maml",), "analyses.val.kind", "hinge"),
    (("mwn",), "problems.classifier.optimizer.lr", "fast"),
    (("mwn",), "problems.classifier.optimizer.momentum", 1.5),
    (("mwn",), "problems.classifier.optimizer.rate", 0.1),
    (CG, "hypergradient.product", "backwards"),
    (CG, "hypergradient.solver.max_iterations", "many"),
    (CG, "hypergradient.solver.terms", 3),
    (CG, "hypergradient.solver._target_", "mlotool.hypergradient.Neuman"),
    (UNROLLED, "hypergradient.horizon", 0),
    (UNROLLED, "hypergradient.trajectory", {"_target_": "mlotool.hypergradient.KeepEvery", "steps": 0}),
]


@pytest.fixture(scope="module")
def composed() -> Callable[..., Any]:
    """Return what composes a recipe, once, as plain values."""
    return cache(lambda recipe, *words: OmegaConf.to_container(compose(recipe, words)))


@pytest.mark.parametrize(("words", "key", "value"), WRONG, ids=[f"{key}={value}" for _, key, value in WRONG])
def test_what_a_check_refuses_is_marked_where_it_stands(
    validator: Any, composed: Callable[..., Any], words: tuple[str, ...], key: str, value: Any
) -> None:
    """The whole config is composed: an editor sees a part of it, by the same schema."""
    config = OmegaConf.create(composed(*words))
    assert validator.is_valid(composed(*words))
    OmegaConf.update(config, key, value, force_add=True, merge=False)
    [found] = validator.iter_errors(OmegaConf.to_container(config))
    assert f"{key}.".startswith(".".join([*map(str, found.absolute_path), ""]).lstrip("."))
    with pytest.raises(ConfigError, match=re.escape(key.removesuffix("._target_"))):
        check(config)


def test_defaults_are_those_of_the_classes_and_fit(validator: Any) -> None:
    properties, solvers = validator.schema["properties"], str(validator.schema["definitions"]["solver"])
    keys = [key for group in ("runner", "logger", "debug") for key in properties[group]["properties"].items()]
    assert [name for name, key in keys if "default" not in key] == ["trainer"]
    assert all(validator.evolve(schema=key).is_valid(key.get("default", {})) for _, key in keys)
    assert properties["sweep"]["properties"]["sampler"]["default"] == SweepConfig().sampler
    assert f"'default': {Neumann().num_terms}}}" in solvers


def test_keys_and_arguments_are_described(validator: Any) -> None:
    properties = validator.schema["properties"]
    assert properties["runner"]["properties"]["log_every"]["description"].startswith("Number of ticks between two rows")
    text = str(validator.schema["definitions"]["solver"])
    assert "terms of the series" in text


def test_the_line_for_editors_is_no_summary(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# yaml-language-server: $schema=recipe.schema.json\n# A recipe.\nname: mine\n")
    assert _summary_and_task(tmp_path / "mine.yaml") == ("A recipe.", "")
