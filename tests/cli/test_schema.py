"""The schema for editors takes every recipe, and refuses what a check refuses."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from mlotool.cli.schema import recipe_schema
from mlotool.config.schema import SweepConfig
from mlotool.hypergradient import Neumann

RECIPES = Path(__file__).parents[2] / "recipes"


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


def test_what_is_wrong_is_found_where_it_stands(validator: Any) -> None:
    recipe = yaml.safe_load((RECIPES / "mwn.yaml").read_text())
    recipe["runner"] = {"log_every": 0, "max_tick": 1}
    recipe["problems"]["classifier"]["module"] = {"_target_": "mlotool.models.MLP", "hiden": [3]}
    found = {".".join(map(str, error.absolute_path)) for error in validator.iter_errors(recipe)}
    assert found == {"runner", "runner.log_every", "problems.classifier.module"}


def test_defaults_are_those_of_the_classes_and_fit(validator: Any) -> None:
    properties, solvers = validator.schema["properties"], str(validator.schema["definitions"]["solver"])
    keys = [key for group in ("runner", "logger", "debug") for key in properties[group]["properties"].items()]
    assert [name for name, key in keys if "default" not in key] == ["trainer"]
    assert all(validator.evolve(schema=key).is_valid(key.get("default", {})) for _, key in keys)
    assert properties["sweep"]["properties"]["sampler"]["default"] == SweepConfig().sampler
    assert f"'default': {Neumann().num_terms}}}" in solvers


def test_keys_and_arguments_are_described(validator: Any) -> None:
    properties = validator.schema["properties"]
    assert properties["runner"]["properties"]["log_every"]["description"].startswith("Ticks between two rows")
    text = str(validator.schema["definitions"]["solver"])
    assert "terms of the series" in text
