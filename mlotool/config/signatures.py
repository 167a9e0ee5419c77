"""Whether a node's keys fit the signature of its target."""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlotool.core.messages import did_you_mean

MAX_JUMPS = 10


@dataclass(frozen=True)
class Parameter:
    """One parameter of a target.

    Args:
        name: as in the source.
        annotation: its text; None where there is none.
        is_required: it has no default.
        is_keyword_only: it stands behind a `*`.
    """

    name: str
    annotation: str | None
    is_required: bool
    is_keyword_only: bool

    @property
    def is_role(self) -> bool:
        """Whether it is annotated as a BoundModule."""
        return self.annotation is not None and "BoundModule" in self.annotation


@dataclass(frozen=True)
class Signature:
    """What a target accepts.

    Args:
        parameters: in their order, `self` left out.
        is_open: it takes any keyword, or its source does not say.
    """

    parameters: tuple[Parameter, ...]
    is_open: bool = False

    def get(self, name: str) -> Parameter | None:
        """Return the parameter `name`."""
        return next((each for each in self.parameters if each.name == name), None)


@dataclass(frozen=True)
class Definition:
    """A class or function in a source file; None as node: the file ends before the name is found."""

    path: Path
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def package_file(package: str) -> Path | None:
    """Return the `__init__.py` of a top-level package, or a top-level module's file."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None or not spec.origin.endswith(".py") else Path(spec.origin)


def public_names(module: str) -> tuple[str, ...]:
    """Return `__all__` of a module, from its source."""
    path = _module_file(module)
    for node in () if path is None else _parse(path).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return tuple(ast.literal_eval(node.value))
    return ()


def find_definition(name: str) -> Definition | None:
    """Return the class or function that a dotted name means; None where the source does not lead to one."""
    module, _, attribute = name.rpartition(".")
    for _ in range(MAX_JUMPS):
        path = _module_file(module)
        if path is None:
            return None
        step = _lookup(path, module, attribute)
        if step is None or isinstance(step, Definition):
            return step
        if step[0].partition(".")[0] != name.partition(".")[0]:
            return None
        module, attribute = step
    return None


def read_signature(name: str) -> Signature | None:
    """Return the signature of a class or function, from its source; None where it is not found.

    Example:
        >>> [each.name for each in read_signature("mlotool.models.WeightNet").parameters]
        ['hidden']
    """
    definition = find_definition(name)
    return None if definition is None else _signature(definition, name.rpartition(".")[0])


def _module_file(module: str) -> Path | None:
    first, *rest = module.split(".")
    path = package_file(first)
    if path is None or not rest:
        return path
    if path.name != "__init__.py":
        return None
    base = path.parent.joinpath(*rest)
    return next((file for file in (base / "__init__.py", base.with_suffix(".py")) if file.is_file()), None)


def _parse(path: Path) -> ast.Module:
    return _parse_at(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=256)
def _parse_at(path: Path, changed: int) -> ast.Module:
    try:
        return _tree(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


# A file that was copied or saved without a change is not parsed again.
@lru_cache(maxsize=256)
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


def _lookup(path: Path, module: str, attribute: str) -> Definition | tuple[str, str] | None:
    """Return the definition of a name in a file, or where the file imports it from."""
    for node in _statements(_parse(path).body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == attribute:
            return Definition(path, node)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == attribute:
                    return _absolute(node, module, path), alias.name
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _absolute(node: ast.ImportFrom, module: str, path: Path) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (path.name == "__init__.py")]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _signature(definition: Definition, module: str) -> Signature:
    node = definition.node
    if not isinstance(node, ast.ClassDef):
        return _of_function(node, skip_self=False)
    init = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if init is not None:
        return _of_function(init, skip_self=True)
    inherited = [_base(base, definition, module) for base in node.bases]
    decorators = [ast.unparse(each) for each in node.decorator_list]
    if any("dataclass" in each for each in decorators):
        is_keyword_only = any("kw_only=True" in each for each in decorators)
        found = [each for base in inherited if base for each in base.parameters]
        found += _fields(node, is_keyword_only=is_keyword_only)
        return Signature(
            # As in the constructor that the decorator makes: keyword-only ones come last.
            tuple(sorted(found, key=lambda each: each.is_keyword_only)),
            # A base whose source is not found may have fields of its own.
            is_open=any(base is None for base in inherited),
        )
    return next((base for base in inherited if base is not None), Signature((), is_open=bool(node.bases)))


def _base(base: ast.expr, definition: Definition, module: str) -> Signature | None:
    name = ast.unparse(base).partition("[")[0]
    if name in ("ABC", "object", "Protocol", "Generic"):
        return Signature(())
    step = _lookup(definition.path, module, name)
    if isinstance(step, Definition):
        return _signature(step, module)
    return None if step is None else read_signature(f"{step[0]}.{step[1]}")


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef, *, skip_self: bool) -> Signature:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    found = [
        _parameter(each, is_required=index < num_required, is_keyword_only=False)
        for index, each in enumerate(positional)
    ]
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(_parameter(each, is_required=default is None, is_keyword_only=True))
    return Signature(tuple(found[1:] if skip_self else found), is_open=arguments.kwarg is not None)


def _parameter(node: ast.arg, *, is_required: bool, is_keyword_only: bool) -> Parameter:
    annotation = None if node.annotation is None else ast.unparse(node.annotation).strip("'\"")
    return Parameter(node.arg, annotation, is_required, is_keyword_only)


def _fields(node: ast.ClassDef, *, is_keyword_only: bool) -> Iterator[Parameter]:
    for each in node.body:
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
            continue
        annotation, default = ast.unparse(each.annotation), each.value
        if "ClassVar" in annotation or (default is not None and "init=False" in ast.unparse(default)):
            continue
        value = "" if default is None else ast.unparse(default)
        is_named = "kw_only=False" not in value if is_keyword_only else "kw_only=True" in value
        yield Parameter(each.target.id, annotation, default is None, is_keyword_only=is_named)


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


SPECIAL = ("_target_", "_args_")


def keyword_faults(
    key: str,
    node: Mapping[str, Any],
    signature: Signature,
    *,
    given: Sequence[str] = (),
    takes_roles: bool = False,
    is_filled: bool = False,
    leftover: Callable[[str], str] = lambda name: "",
) -> Iterator[str]:
    """Yield what is wrong with the keywords of a node.

    Args:
        key: where the node stands.
        node: its keys and values.
        signature: of its target.
        given: parameters that mlotool fills in: the batch, the parameters, the roles.
        takes_roles: whether its keywords may be roles.
        is_filled: whether what is missing comes from elsewhere.
        leftover: says where an unknown keyword comes from.
    """
    name = node["_target_"]
    settings = {each: value for each, value in node.items() if each not in SPECIAL}
    positional = [each.name for each in signature.parameters if not each.is_keyword_only][: len(node.get("_args_", ()))]
    filled = {*given, *positional}
    known = [each.name for each in signature.parameters if each.name not in filled]
    for keyword, value in settings.items():
        parameter = signature.get(keyword)
        if keyword in positional:
            yield f"{key}.{keyword}: found {value!r}, and one in _args_; expected one of them. Remove it from _args_."
        elif keyword in given:
            yield f"{key}.{keyword}: found {value!r}; mlotool fills '{keyword}' in itself. Remove it."
        elif parameter is not None:
            yield from _value_faults(key, parameter, value)
        elif not signature.is_open:
            yield (
                f"{key}.{keyword}: unknown keyword '{keyword}' of {name}; expected one of {', '.join(known) or 'none'}."
                f"{did_you_mean(keyword, known)} {leftover(keyword) or 'Correct it, or remove it.'}"
            )
    for parameter in () if is_filled else signature.parameters:
        if parameter.is_required and parameter.name not in (*settings, *filled):
            wanted = f" ({describe(parameter.annotation)})" if parameter.annotation else ""
            yield (
                f"{key}.{parameter.name}: missing; {name} expects it{wanted}. "
                + _where_to_write(key, parameter, takes_roles=takes_roles)
            )


def _where_to_write(key: str, parameter: Parameter, *, takes_roles: bool) -> str:
    name = parameter.name
    if parameter.is_role:
        return f"Write {key}.roles.{name}."
    if takes_roles and parameter.is_keyword_only and parameter.annotation is None:
        return f"Write {key}.roles.{name}: <problem> if it is a module, or {key}.{name} if it is a setting."
    return f"Write {key}.{name}."


def _value_faults(key: str, parameter: Parameter, value: Any) -> Iterator[str]:
    place = f"{key}.{parameter.name}"
    if parameter.is_role:
        yield f"{place}: found {value!r}; expected this role under roles. Write {key}.roles: {{{parameter.name}: ..}}."
    elif not fits(value, parameter.annotation):
        assert parameter.annotation is not None
        hint = did_you_mean(str(value), choices(parameter.annotation))
        yield f"{place}: found {value!r}; expected {describe(parameter.annotation)}.{hint} Correct it."
