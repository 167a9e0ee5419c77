"""Print the JSON schema of a recipe file, by which editors complete keys and check values.

  mlotool schema > recipe.schema.json

In VS Code with the YAML extension, put this line at the top of a recipe:

  # yaml-language-server: $schema=../recipe.schema.json
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from inspect import Parameter
from types import NoneType
from typing import Any, get_args, get_origin

from mlotool.cli.arguments import VerbParser
from mlotool.config.check_targets import OURS, kind_inside
from mlotool.config.schema import MISSING, Config, annotations_of, members, node_kind
from mlotool.config.trusted import KINDS, resolve, trusted_names
from mlotool.core.settings import documentation, json_schema, parameters
from mlotool.problem.settings import ProblemSettings


def main(words: list[str]) -> int:
    """Print the schema."""
    VerbParser("schema", __doc__).parse(words)
    print(json.dumps(recipe_schema(), indent=1))
    return 0


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 7) of a recipe file: keys, types, ranges, defaults, targets and their arguments.

    Example:
        >>> recipe_schema()["properties"]["runner"]["properties"]["log_every"]["anyOf"][0]
        {'type': 'integer', 'minimum': 1}
    """
    root = _value_schema(Config)
    root["properties"] |= {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A recipe of mlotool",
        **root,
        "definitions": {kind: _node_schema(kind) for kind in KINDS},
    }


def _value_schema(annotation: Any) -> dict[str, Any]:
    """Return the schema of what the config's own schema asks for."""
    options = [_member_schema(member) for member in members(annotation)]
    return options[0] if len(options) == 1 else {"anyOf": options}


def _member_schema(member: Any) -> dict[str, Any]:
    origin, hints = get_origin(member), annotations_of(member)
    if kind := node_kind(member):
        return {"anyOf": [{"$ref": f"#/definitions/{kind}"}, {"type": "string", "pattern": r"^\$\{|^\?\?\?$"}]}
    if hints:
        meanings, defaults = documentation(ProblemSettings) | documentation(member), asdict(member())
        properties = {key: _entry(meanings.get(key), _value_schema(hint), defaults[key]) for key, hint in hints.items()}
        return {"type": "object", "properties": properties, "additionalProperties": False}
    if origin is dict:
        return {"type": "object", "additionalProperties": _value_schema(get_args(member)[1])}
    if origin is list:
        return {"type": "array", "items": _value_schema(get_args(member)[0])}
    return {"type": "null"} if member is NoneType else json_schema(member)


def _entry(meaning: str | None, values: dict[str, Any], default: Any) -> dict[str, Any]:
    """Return the schema of a key: what it means, which values it takes, and its default, where that is a plain value.

    Keys of a mapping have defaults of their own.
    """
    entry = {"description": meaning, **values} if meaning else values
    # JSON has no objects of Python's, no nan and no infinity.
    with suppress(TypeError, ValueError):
        json.dumps(default, allow_nan=False)
        return entry if isinstance(default, dict) or default == MISSING else {**entry, "default": default}
    return entry


def _node_schema(kind: str) -> dict[str, Any]:
    """Return the schema of a node: its `_target_`, and by target the arguments."""
    names = trusted_names(kind)
    arguments = [
        {"if": {"properties": {"_target_": {"const": name}}, "required": ["_target_"]}, "then": properties}
        for name in names
        if (properties := _arguments(name, kind)) is not None
    ]
    # One of a package of the user's is any other name.
    of_user = {"type": "string", "pattern": r"^(?!(mlotool|torch|pytorch_lightning)\.)"}
    targets = {"anyOf": [{"enum": list(names)}, of_user]}
    return {"type": "object", "properties": {"_target_": targets}, "allOf": arguments}


def _arguments(name: str, kind: str) -> dict[str, Any] | None:
    target: Callable[..., Any] = resolve("schema", name)
    try:
        signature = parameters(target)
    except (TypeError, ValueError):  # compiled code has no signature
        return None
    meanings = documentation(target)
    properties = {
        key: _entry(meanings.get(key), _argument(kind, parameter), parameter.default)
        for key, parameter in signature.items()
    }
    is_open = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature.values())
    ours = {key: json_schema(annotation) for key, annotation in OURS.get(kind, {}).items()}
    return {"properties": {"_target_": {}, "_args_": {}, **ours, **properties}, "additionalProperties": is_open}


def _argument(kind: str, parameter: Parameter) -> dict[str, Any]:
    schema = {} if parameter.annotation is Parameter.empty else json_schema(parameter.annotation)
    if {} not in schema.get("anyOf", [{}]):
        return schema
    # What no text can be is built from a node of its own.
    node = {"$ref": f"#/definitions/{inside}"} if (inside := kind_inside(kind, parameter.name)) in KINDS else {}
    plain = {"type": ["string", "number", "boolean", "null"]}
    return {"anyOf": [node, plain, {"type": "array", "items": {"anyOf": [node, plain]}}]}
