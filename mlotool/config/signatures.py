"""Whether a node's keys fit the signature of its target."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from mlotool.config.literals import choices, describe, fits
from mlotool.config.source import Parameter, Signature, read_signature
from mlotool.config.trusted import is_own, resolve
from mlotool.core.messages import did_you_mean

SPECIAL = ("_target_", "_args_")


def signature_of(key: str, name: str, *, targets: bool) -> Signature | None:
    """Return a trusted target's signature; None where it is not known.

    Args:
        key: where the target stands, for messages.
        name: the value of `_target_`.
        targets: import third-party targets; mlotool's own and trusted packages' are read from source.

    Raises:
        ConfigError: the target cannot be imported.
    """
    if is_own(name):
        return read_signature(name)
    return _inspected(resolve(key, name)) if targets else None


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


@lru_cache(maxsize=256)
def _inspected(target: Any) -> Signature | None:
    try:
        found = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = tuple(
        Parameter(
            each.name,
            None if each.annotation is each.empty else inspect.formatannotation(each.annotation).strip("'\""),
            each.default is each.empty,
            each.kind is each.KEYWORD_ONLY,
        )
        for each in found
        if each.kind not in variadic
    )
    return Signature(parameters, is_open=any(each.kind is each.VAR_KEYWORD for each in found))
