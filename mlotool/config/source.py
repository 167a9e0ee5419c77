"""Signatures read from source files, without importing them: a check must not pay for torch, nor run anything."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

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
