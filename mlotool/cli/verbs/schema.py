"""Print the JSON schema of a recipe file, with which editors complete keys and check values.

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
from mlotool.config.check_targets import OURS, given_names, is_role, kind_inside, role_names, setting_annotations
from mlotool.config.schema import MISSING, Config, annotations_of, members, node_kind
from mlotool.config.security.trusted import CONTAINERS, KINDS, resolve, trusted_names
from mlotool.core.settings import NODE, documentation, json_schema, parameters
from mlotool.problem.settings import ProblemSettings

_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_NAME: dict[str, Any] = {"type": "string"}
_MODE = {"enum": ["train", "eval", None]}
_ROLE = {
    "anyOf": [
        _NAME,
        {
            "type": "object",
            "properties": {"problem": _NAME, "mode": _MODE},
            "required": ["problem"],
            "additionalProperties": False,
        },
    ]
}
# The value of an optimizer's setting that another problem learns.
_LEARNED = {
    "type": "object",
    "properties": {"problem": _NAME},
    "required": ["problem"],
    "additionalProperties": False,
}


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
    meanings, given = documentation(target), given_names(kind, signature)
    properties = {
        key: _entry(meanings.get(key), _argument(kind, name, parameter), parameter.default)
        for key, parameter in signature.items()
        if key not in given and not is_role(parameter) and parameter.kind not in _VARIADIC
    }
    is_open = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature.values())
    ours = {key: json_schema(annotation) for key, annotation in OURS.get(kind, {}).items()}
    if "roles" in ours:
        roles = dict.fromkeys(role_names(signature), _ROLE)
        ours["roles"] = {"type": "object", "properties": roles, "additionalProperties": _ROLE if is_open else False}
    special = {"_target_": {}, **({"_args_": {"type": "array"}} if name in CONTAINERS else {})}
    return {"properties": {**special, **ours, **properties}, "additionalProperties": is_open}


def _argument(kind: str, target: str, parameter: Parameter) -> dict[str, Any]:
    """Return the schema of an argument; what no text can be is built from a node of its own."""
    inside = kind_inside(kind, parameter.name)
    node = {"$ref": f"#/definitions/{inside}"} if inside in KINDS else {}
    schemas = [_with_node(json_schema(annotation), node) for annotation in setting_annotations(target, parameter)]
    schema = schemas[0] if len(schemas) == 1 else {"allOf": schemas} if schemas else _anything(node)
    return {"anyOf": [schema, _LEARNED]} if kind == "optimizer" else schema


def _anything(node: dict[str, Any]) -> dict[str, Any]:
    plain = {"type": ["string", "number", "boolean", "null"]}
    return {"anyOf": [node, plain, {"type": "array", "items": {"anyOf": [node, plain]}}]}


def _with_node(schema: Any, node: dict[str, Any]) -> Any:
    """Return a schema in which a node is one of a kind."""
    if isinstance(schema, dict):
        members = schema.get("anyOf", ())
        if {} in members:
            return _anything(node)
        return node or dict(NODE) if schema == NODE else {key: _with_node(part, node) for key, part in schema.items()}
    return [_with_node(part, node) for part in schema] if isinstance(schema, list) else schema
