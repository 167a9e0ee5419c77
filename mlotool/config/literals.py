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
_MAPPINGS = ("Mapping", "dict", "Dict", "MutableMapping")
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "None": "null",
}


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
        ('a number or null', 'Sequence[int]', 'one of a, b')
    """
    if choices(annotation):
        return f"one of {', '.join(choices(annotation))}"
    if annotation.startswith("Abstract"):
        return "a node with a _target_"
    parts = [part.strip() for part in annotation.split("|")]
    known = [_WORDS[part] for part in parts if part in _WORDS]
    return " or ".join(known) if known and "[" not in annotation else annotation


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
        return isinstance(value, list) and all(any(_fits(each, kind) for kind in kinds) for each in value)
    if name in _MAPPINGS:
        return isinstance(value, dict) and all(_fits(each, arguments[-1]) for each in value.values())
    return True


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
