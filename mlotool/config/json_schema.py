"""The JSON schema of a recipe file, by which editors complete and check it."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from inspect import Parameter
from typing import Any

from mlotool.config.check_targets import kind_inside
from mlotool.config.schema import annotation_at, dataclass_at, is_container
from mlotool.config.trusted import KINDS, resolve, trusted_names
from mlotool.core.settings import documentation, json_schema, parameters
from mlotool.problem.settings import ProblemSettings

NAME = "name"
"""Stands for the name of a problem in a path."""
# By path, what a node is, and whether the key holds one, a list of them or some by name.
_NODES = {
    "data": "data",
    "hypergradient": "hypergradient",
    **{
        f"problems.{NAME}.{key}": key
        for key in ("module", "loss", "optimizer", "scheduler", "hypergradient", "parallel")
    },
}
_LISTS = {"runner.callbacks": "callback", "logger.loggers": "logger", "evaluate.metrics": "metric"}
# What mlotool itself reads of a node, beside the arguments of its target.
_OURS = {
    "loss": {"roles": {"type": "object"}},
    "analysis": {"roles": {"type": "object"}, "split": {"type": "string"}, "batch_size": {"type": "integer"}},
    "optimizer": {"groups": {"type": "array"}},
}


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 7) of a recipe file: keys, types, ranges, targets and their arguments.

    Example:
        >>> recipe_schema()["properties"]["runner"]["properties"]["log_every"]["anyOf"][0]
        {'type': 'integer', 'minimum': 1}
    """
    own = _class_schema("")
    own["properties"] |= {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A recipe of mlotool",
        **own,
        "definitions": {kind: _node_schema(kind) for kind in KINDS},
    }


def _class_schema(path: str) -> dict[str, Any]:
    """Return the schema of the keys below a path."""
    kind = dataclass_at(path)
    meanings = documentation(ProblemSettings) | documentation(kind)
    properties = {}
    for key in fields(kind):
        place = f"{path}.{key.name}".lstrip(".")
        properties[key.name] = {"description": meanings.get(key.name, ""), **_value_schema(place)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _value_schema(path: str) -> dict[str, Any]:
    if path in _NODES:
        return {"anyOf": [{"$ref": f"#/definitions/{_NODES[path]}"}, {"type": "null"}, {"type": "string"}]}
    if path in _LISTS:
        return {"type": "array", "items": {"anyOf": [{"type": "string"}, {"$ref": f"#/definitions/{_LISTS[path]}"}]}}
    if path == "analyses":
        return {"type": "object", "additionalProperties": {"$ref": "#/definitions/analysis"}}
    if path == "problems":
        return {"type": "object", "additionalProperties": _class_schema(f"problems.{NAME}")}
    if is_container(path) and is_dataclass(dataclass_at(path)):
        return {"anyOf": [_class_schema(path), {"type": "null"}]} if path != "runner" else _class_schema(path)
    return json_schema(annotation_at(path))


def _node_schema(kind: str) -> dict[str, Any]:
    """Return the schema of a node: its `_target_`, and by target the arguments."""
    names = trusted_names(kind)
    arguments = [
        {"if": {"properties": {"_target_": {"const": name}}, "required": ["_target_"]}, "then": properties}
        for name in names
        if (properties := _arguments(name, kind)) is not None
    ]
    # One of a package of the user's is any other name.
    own = {"type": "string", "pattern": r"^(?!(mlotool|torch|pytorch_lightning)\.)"}
    return {"type": "object", "properties": {"_target_": {"anyOf": [{"enum": list(names)}, own]}}, "allOf": arguments}


def _arguments(name: str, kind: str) -> dict[str, Any] | None:
    target: Callable[..., Any] = resolve("schema", name)
    try:
        found = parameters(target)
    except (TypeError, ValueError):  # compiled code has no signature
        return None
    meanings = documentation(target)
    properties = {
        key: {**({"description": meanings[key]} if key in meanings else {}), **_argument(kind, parameter)}
        for key, parameter in found.items()
    }
    is_open = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in found.values())
    ours = {"_target_": {}, "_args_": {}, **_OURS.get(kind, {})}
    return {"properties": {**ours, **properties}, "additionalProperties": is_open}


def _argument(kind: str, parameter: Parameter) -> dict[str, Any]:
    found = {} if parameter.annotation is Parameter.empty else json_schema(parameter.annotation)
    if {} not in found.get("anyOf", [{}]):
        return found
    # What no text can be is built from a node of its own.
    node = {"$ref": f"#/definitions/{inside}"} if (inside := kind_inside(kind, parameter.name)) in KINDS else {}
    plain = {"type": ["string", "number", "boolean", "null"]}
    return {"anyOf": [node, plain, {"type": "array", "items": {"anyOf": [node, plain]}}]}
