"""One truth a setting: the annotation of an argument says its type, its range and its choices, for every reader.

Python's own checks (`@target`), the checks of a config, the reference and the JSON schema for editors all read
annotations such as `Annotated[int, Ge(1)]`. No torch.
"""

import inspect
import math
import operator
import pkgutil
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, wraps
from importlib import import_module
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen

from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean, shown

Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]
# Things that are made or done one after the other: a number with zeros too many would never end.
Layers = Annotated[int, Ge(1), Le(10_000)]
Rounds = Annotated[int, Ge(1), Le(1_000_000)]
Finite = Annotated[float, Ge(-math.inf)]
NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Threads = Annotated[int, Ge(1), Le(1_024)]
Share = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
Between0And1 = Annotated[float, Gt(0), Lt(1)]
Shape = Annotated[Sequence[Count], MinLen(1)]
Precision = Literal["fp32", "bf16", "fp16"]

_COMPARISONS = {Ge: operator.ge, Gt: operator.gt, Le: operator.le, Lt: operator.lt}
_BOUND_WORDS = {Ge: "of at least", Gt: "greater than", Le: "of at most", Lt: "less than"}
_JSON_BOUNDS = {Ge: "minimum", Gt: "exclusiveMinimum", Le: "maximum", Lt: "exclusiveMaximum", MinLen: "minItems"}
_PLAIN = (NoneType, bool, int, float, str, list, dict)
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "null"}
_PLURALS = {"a whole number": "whole numbers", "a number": "numbers", "a text": "texts", "true or false": "booleans"}
_JSON = {int: "integer", float: "number", bool: "boolean", str: "string", NoneType: "null"}
_REFERENCE = {"type": "string", "pattern": r"^\$\{.*\}$"}
# In a JSON schema, what no text can be: a mapping that says what to build.
NODE: dict[str, Any] = {"type": "object"}
C = TypeVar("C", bound=Callable[..., Any])


def fits(value: Any, annotation: Any, *, nodes: bool = False) -> bool:
    """Say whether a value is what an annotation asks for; what cannot be told fits.

    Args:
        value: any.
        annotation: a type, with its range: `Annotated[float, Gt(0)] | None`. Numbers with a range are finite, unless it
            ends with `Le(inf)`.
        nodes: whether the value stands in a config, where a mapping with a `_target_` fits anything: it is built before
            it is used.

    Example:
        >>> fits(3, Count), fits(0, Count), fits(True, Count), fits([1, "x"], Sequence[int]), fits(None, Share | None)
        (True, False, False, False, True)
    """
    if nodes and (not isinstance(value, _PLAIN) or (isinstance(value, dict) and "_target_" in value)):
        return True
    kind, bounds = _parts(annotation)
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is inspect.Parameter.empty:
        return True
    if origin in (typing.Union, UnionType):
        return any(fits(value, member, nodes=nodes) for member in arguments)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if typing.is_typeddict(kind):
        return _fits_keys(value, kind, nodes=nodes)
    if kind in (int, float):
        is_number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
        is_number = is_number and (not bounds or Le(math.inf) in bounds or math.isfinite(value))
        return is_number and all(_holds(value, bound) for bound in bounds)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(item, arguments[1], nodes=nodes) for item in value.values())
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return _fits_items(value, origin, arguments, nodes=nodes) and all(_holds(value, bound) for bound in bounds)
    if kind is NoneType or kind is None:
        return value is None
    if origin is None and isinstance(kind, type):
        try:
            return isinstance(value, kind) and all(_holds(value, bound) for bound in bounds)
        except TypeError:  # a protocol
            return True
    return True


def _fits_keys(value: Any, kind: Any, *, nodes: bool) -> bool:
    hints = get_type_hints(kind, include_extras=True)
    has_keys = isinstance(value, Mapping) and kind.__required_keys__ <= set(value) <= set(hints)
    return has_keys and all(fits(item, hints[key], nodes=nodes) for key, item in value.items())


def _fits_items(value: Any, origin: type, arguments: tuple[Any, ...], *, nodes: bool) -> bool:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        return False
    if not isinstance(value, list | tuple):
        return not nodes
    if origin is tuple and Ellipsis not in arguments:
        pairs = zip(value, arguments, strict=False)
        return len(value) == len(arguments) and all(fits(item, kind, nodes=nodes) for item, kind in pairs)
    return not arguments or all(fits(item, arguments[0], nodes=nodes) for item in value)


def _parts(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return an annotation's type and its bounds."""
    if get_origin(annotation) in (typing.Required, typing.NotRequired):
        return _parts(get_args(annotation)[0])
    if get_origin(annotation) is Annotated:
        kind, *extras = get_args(annotation)
        return kind, tuple(extra for extra in extras if isinstance(extra, (*_COMPARISONS, MinLen)))
    return annotation, ()


def _holds(value: Any, bound: Any) -> bool:
    if isinstance(bound, MinLen):
        return len(value) >= bound.min_length
    return bool(_COMPARISONS[type(bound)](value, _limit(bound)))


def _limit(bound: Any) -> Any:
    return bound.min_length if isinstance(bound, MinLen) else getattr(bound, type(bound).__name__.lower())


def words(annotation: Any) -> str:
    """Return in words what an annotation asks for; a type that no text can be is left out of a choice of several.

    Example:
        >>> words(Count | None), words(Sequence[Positive]), words(Literal["a", "b"])
        ('a whole number of at least 1 or null', 'a list of numbers greater than 0', 'one of a, b')
    """
    kind, bounds = _parts(annotation)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (typing.Union, UnionType):
        plain = [words(type_) for type_ in arguments if getattr(type_, "__name__", "") not in ("Tensor", "Parameter")]
        return " or ".join(dict.fromkeys(plain)) or str(annotation)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else str(arguments[0])
    if isinstance(origin, type) and issubclass(origin, Iterable):
        if origin is tuple and Ellipsis not in arguments:
            return f"a list of {len(arguments)}: {', '.join(map(words, arguments))}"
        noun = "a mapping" if issubclass(origin, Mapping) else "a list"
        item = words(arguments[-1 if noun == "a mapping" else 0]) if arguments else ""
        single = next((word for word in _PLURALS if item.startswith(word)), None)
        noun = noun if single is None else f"{noun} of {_PLURALS[single]}{item.removeprefix(single)}"
        return noun + _bound_words(bounds)
    if typing.is_typeddict(kind):
        return f"{{{', '.join(f'{key}: ..' for key in kind.__annotations__)}}}"
    return (_WORDS.get(kind) or _class_words(kind)) + _bound_words(bounds)


def _class_words(kind: Any) -> str:
    name = getattr(kind, "__name__", str(kind))
    if kind in (Mapping, dict):
        return "a mapping"
    if kind in (list, tuple, Sequence):
        return "a list"
    return f"a {name.removeprefix('Abstract')} (in a recipe a node with a _target_)"


def _bound_words(bounds: Iterable[Any]) -> str:
    said = []
    for bound in bounds:
        if isinstance(bound, MinLen) or _limit(bound) == -math.inf:
            said.append("that is not empty" if isinstance(bound, MinLen) else "that is finite")
        elif _limit(bound) < math.inf:
            said.append(f"{_BOUND_WORDS[type(bound)]} {_limit(bound):,}")
    return "".join(f" {word}" if index == 0 else f" and {word.removeprefix('of ')}" for index, word in enumerate(said))


def choices(annotation: Any) -> tuple[str, ...]:
    """Return the texts that an annotation offers, of all its literals."""
    kind, _ = _parts(annotation)
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    return () if len(_members(kind)) == 1 else tuple(choice for member in _members(kind) for choice in choices(member))


def setting_fault(key: str, value: Any, annotation: Any, *, nodes: bool = False) -> str | None:
    """Return what is wrong with a setting, in a sentence of what was found and one of what to do; None if nothing is.

    Example:
        >>> setting_fault("runner.log_every", 0, Count)
        'runner.log_every: found 0; expected a whole number of at least 1. Correct runner.log_every.'
    """
    if fits(value, annotation, nodes=nodes):
        return None
    for name, annotation_of_item in _item_hints(value, annotation).items():
        if fault := setting_fault(f"{key}.{name}", value[name], annotation_of_item, nodes=nodes):
            return fault
    hint = did_you_mean(value, choices(annotation)) if isinstance(value, str) else ""
    return f"{key}: found {shown(value)}; expected {words(annotation)}.{hint or f' Correct {key}.'}"


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (typing.Union, UnionType) else (annotation,)


def _item_hints(value: Any, annotation: Any) -> dict[str, Any]:
    """Return what a mapping's annotation asks for its values, by key; nothing where its keys are wrong already."""
    for member in _members(annotation) if isinstance(value, Mapping) else ():
        if typing.is_typeddict(member):
            hints = get_type_hints(member, include_extras=True)
            return {name: hints[name] for name in value} if member.__required_keys__ <= set(value) <= set(hints) else {}
        if isinstance(origin := get_origin(member), type) and issubclass(origin, Mapping):
            return dict.fromkeys(value, get_args(member)[1])
    return {}


def json_schema(annotation: Any) -> dict[str, Any]:
    """Return the JSON schema of an annotation; a reference `${..}` fits everywhere.

    Example:
        >>> json_schema(Count)["anyOf"][0]
        {'type': 'integer', 'minimum': 1}
    """
    return {"anyOf": [*_json_members(annotation), _REFERENCE]}


def _json_members(annotation: Any) -> Iterator[dict[str, Any]]:
    kind, bounds = _parts(annotation)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (typing.Union, UnionType):
        for member in arguments:
            yield from _json_members(member)
    elif origin is Literal:
        yield {"enum": list(arguments)}
    elif typing.is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        properties = {key: json_schema(hint) for key, hint in hints.items()}
        yield {"type": "object", "properties": properties, "additionalProperties": False}
    elif kind in _JSON:
        yield {"type": _JSON[kind], **_json_bounds(bounds)}
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        yield {"type": "object", "additionalProperties": json_schema(arguments[1])}
    elif isinstance(origin, type) and issubclass(origin, Iterable):
        yield {"type": "array", **_json_items(origin, arguments), **_json_bounds(bounds)}
    elif kind in (list, tuple):
        yield {"type": "array"}
    elif isinstance(kind, type) and kind not in (Any, object, dict) and not getattr(kind, "_is_protocol", False):
        yield NODE
    else:
        yield {}


def _json_items(origin: type, arguments: tuple[Any, ...]) -> dict[str, Any]:
    if origin is tuple and Ellipsis not in arguments:
        kinds = [json_schema(kind) for kind in arguments]
        return {"items": kinds, "minItems": len(kinds), "maxItems": len(kinds)}
    return {"items": json_schema(arguments[0])} if arguments else {}


def _json_bounds(bounds: Iterable[Any]) -> dict[str, Any]:
    limits = {_JSON_BOUNDS[type(bound)]: _limit(bound) for bound in bounds if type(bound) in _JSON_BOUNDS}
    return {name: limit for name, limit in limits.items() if math.isfinite(limit)}


@cache
def parameters(callable_: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class or function by name, with annotations that are resolved, without `self`.

    An annotation that cannot be resolved, such as one that is imported for type checkers alone, is left empty.

    Raises:
        ValueError, TypeError: compiled code has no signature.
    """
    hints = _hints(callable_.__init__ if isinstance(callable_, type) else callable_)  # type: ignore[misc]
    written = inspect.signature(callable_).parameters.items()
    return {name: parameter.replace(annotation=hints.get(name, inspect.Parameter.empty)) for name, parameter in written}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's annotations; those that no module of its can resolve are left out."""
    try:
        return get_type_hints(function, include_extras=True)
    except Exception:  # a name that only type checkers know
        hints: dict[str, Any] = {}
        namespace = getattr(inspect.unwrap(function), "__globals__", {})
        for name, annotation in getattr(function, "__annotations__", {}).items():
            one = type("Holder", (), {"__annotations__": {name: annotation}})
            with suppress(Exception):
                hints |= get_type_hints(one, namespace, include_extras=True)
        return hints


def documentation(made: Any) -> dict[str, str]:
    """Return what the docstring of a class or function says of its arguments, by name.

    Example:
        >>> documentation(check_arguments)["given"]
        'arguments by name.'
    """
    section = (inspect.getdoc(made) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def check_arguments(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse arguments that are not what the annotations of a class or function ask for.

    Args:
        name: of the class or function, for messages.
        function: it.
        given: arguments by name.

    Raises:
        ConfigError: with the first of them.
    """
    for key, parameter in parameters(function).items():
        if key in given and parameter.annotation is not parameter.empty:
            fault = setting_fault(f"{name}.{key}", given[key], parameter.annotation)
            if fault is not None:
                raise ConfigError(fault)


_targets: dict[str, dict[str, Any]] = {}


def target(*kinds: str, home: str | None = None) -> Callable[[C], C]:
    """Let recipes name a class or function as `_target_`, and check a class's arguments by their annotations.

    Args:
        kinds: of node in which it may stand: "data", "module", "loss", "solver", ...
        home: the package whose public name it is; None is the first folder in `mlotool` that it lies in.

    Example::

        @target("module")
        class WeightNet(nn.Module):
            def __init__(self, hidden: Count = 100) -> None: ...
    """

    def register(made: C) -> C:
        package = home or ".".join(made.__module__.split(".")[:2])
        for kind in kinds:
            _targets.setdefault(kind, {})[f"{package}.{made.__name__}"] = made
        return checked(made) if isinstance(made, type) else made

    return register


def checked(made: C) -> C:
    """Let a function, or the constructor of a class, check its arguments by their annotations."""
    function: Any = made.__init__ if isinstance(made, type) else made  # type: ignore[misc]
    names = list(inspect.signature(function).parameters)

    @wraps(function)
    def checking(*arguments: Any, **settings: Any) -> Any:
        name = type(arguments[0]).__name__ if function is not made else function.__name__
        check_arguments(name, function, {**dict(zip(names, arguments, strict=False)), **settings})
        return function(*arguments, **settings)

    if not isinstance(made, type):
        return checking  # type: ignore[return-value]
    made.__init__ = checking  # type: ignore[misc]
    return made


def targets(kind: str) -> Mapping[str, Any]:
    """Return what may stand as `_target_` in a node of a kind, by its public name, in the packages imported so far."""
    return dict(sorted(_targets.get(kind, {}).items()))


def discover(package: str, *folders: str) -> dict[str, Any]:
    """Import every module of a package, and return the targets that are public names of it, by their last name.

    So a new file is all that a new data set, model, loss or solver takes.

    Args:
        package: dotted; it may be half imported.
        folders: of it, whose modules are imported as well.
    """
    for folder in (package, *(f"{package}.{name}" for name in folders)):
        for module in pkgutil.iter_modules(import_module(folder).__path__, f"{folder}."):
            if not module.ispkg:
                import_module(module.name)
    everything = {name: made for kind in reversed(_targets.values()) for name, made in kind.items()}
    names = sorted(name for name in everything if name.rpartition(".")[0] == package)
    return {name.rpartition(".")[2]: everything[name] for name in names}
