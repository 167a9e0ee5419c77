"""Whether a value of a config fits an annotation, as far as a literal tells."""

import ast
from collections.abc import Callable
from typing import Any

_SCALARS: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "None": lambda value: value is None,
    # No literal is a tensor.
    "Tensor": lambda value: False,
}
_LISTS = ("Sequence", "list", "List", "tuple", "Tuple", "Iterable", "Collection", "set", "frozenset")
_TUPLES = ("tuple", "Tuple")
_MAPPINGS = ("Mapping", "dict", "Dict", "MutableMapping")
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "None": "null",
}


_PLURALS = {"a whole number": "whole numbers", "a number": "numbers", "a text": "texts", "true or false": "booleans"}


def fits(value: Any, annotation: str | None) -> bool:
    """Say whether `value` may stand for `annotation`; what cannot be told fits.

    Example:
        >>> fits("x", "int"), fits(1, "float | None"), fits([1, "x"], "Sequence[int]"), fits("x", "_SomeAlias")
        (False, True, False, True)
    """
    if annotation is None or not (value is None or isinstance(value, bool | int | float | str | list | dict)):
        return True
    try:
        return _fits(value, ast.parse(annotation, mode="eval").body)
    except SyntaxError:
        return True


def describe(annotation: str) -> str:
    """Return an annotation in words.

    Example:
        >>> describe("float | None"), describe("Sequence[int]"), describe("Literal['a', 'b']")
        ('a number or null', 'a list of whole numbers', 'one of a, b')
    """
    if choices(annotation):
        return f"one of {', '.join(choices(annotation))}"
    if annotation.startswith("Abstract"):
        return "a node with a _target_"
    try:
        return _described(ast.parse(annotation, mode="eval").body) or annotation
    except SyntaxError:
        return annotation


def choices(annotation: str | None) -> tuple[str, ...]:
    """Return the values of a `Literal`; none for any other annotation."""
    try:
        node = ast.parse(annotation or "", mode="eval").body
    except SyntaxError:
        return ()
    if not isinstance(node, ast.Subscript) or _name(node.value) != "Literal":
        return ()
    values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return tuple(str(each.value) for each in values if isinstance(each, ast.Constant))


def _described(node: ast.expr) -> str:
    """Return an annotation in words; nothing where there are none for a part of it, but of tensors, which no YAML has.

    Example:
        >>> _described(ast.parse("tuple[float | Tensor, float]", mode="eval").body)
        'a list of 2: a number, a number'
    """
    if isinstance(node, ast.BinOp):
        found = [_described(each) for each in (node.left, node.right)]
        return " or ".join(dict.fromkeys(filter(None, found)))
    if not isinstance(node, ast.Subscript):
        name = _name(node)
        return _WORDS.get(name, "a list" if name in _LISTS else "a mapping" if name in _MAPPINGS else "")
    name, arguments = _name(node.value), node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    kinds = [each for each in arguments if not (isinstance(each, ast.Constant) and each.value is Ellipsis)]
    words = [_described(each) for each in kinds]
    if name in _TUPLES and len(kinds) == len(arguments) and all(words):
        return f"a list of {len(words)}: {', '.join(words)}"
    if name in _LISTS or name in _MAPPINGS:
        kind = "a list" if name in _LISTS else "a mapping"
        return f"{kind} of {_PLURALS[words[-1]]}" if words[-1] in _PLURALS else kind
    return ""


def _fits(value: Any, node: ast.expr) -> bool:
    # What is built from a target is no literal.
    if isinstance(value, dict) and "_target_" in value:
        return True
    if isinstance(node, ast.BinOp):
        return _fits(value, node.left) or _fits(value, node.right)
    if isinstance(node, ast.Subscript):
        return _fits_generic(value, _name(node.value), node.slice)
    name = _name(node)
    if name in _SCALARS:
        return _SCALARS[name](value)
    if name in _LISTS:
        return isinstance(value, list)
    if name.startswith("Abstract"):
        return False
    return isinstance(value, dict) if name in _MAPPINGS else True


def _fits_generic(value: Any, name: str, argument: ast.expr) -> bool:
    arguments = argument.elts if isinstance(argument, ast.Tuple) else [argument]
    if name == "Optional":
        return value is None or _fits(value, argument)
    if name == "Union":
        return any(_fits(value, each) for each in arguments)
    if name == "Literal":
        return any(isinstance(each, ast.Constant) and each.value == value for each in arguments)
    if name in _LISTS:
        kinds = [each for each in arguments if not (isinstance(each, ast.Constant) and each.value is Ellipsis)]
        if not isinstance(value, list):
            return False
        if name in _TUPLES and len(kinds) == len(arguments):
            return len(value) == len(kinds) and all(map(_fits, value, kinds))
        return all(any(_fits(each, kind) for kind in kinds) for each in value)
    if name in _MAPPINGS:
        return isinstance(value, dict) and all(_fits(each, arguments[-1]) for each in value.values())
    return True


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
