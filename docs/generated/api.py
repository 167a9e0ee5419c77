"""Pages of every public name, a package each; a name that several packages offer stands where it comes first."""

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import mlotool


def packages() -> list[str]:
    """Return the packages that say what is public (`__all__`), `mlotool` first."""
    names = [f"mlotool.{each.name}" for each in pkgutil.iter_modules(mlotool.__path__) if each.ispkg]
    return ["mlotool", *(name for name in names if getattr(import_module(name), "__all__", ()))]


def homes() -> dict[str, list[str]]:
    """Return, by package, the public names that its page documents; each object stands once."""
    seen: set[Any] = set()
    found: dict[str, list[str]] = {}
    for package in packages():
        module = import_module(package)
        found[package] = []
        for name in sorted(module.__all__, key=str.lower):
            key = _key(package, name)
            if key not in seen:
                seen.add(key)
                found[package].append(name)
    return {package: names for package, names in found.items() if names}


def pages() -> Iterator[tuple[str, str]]:
    """Yield the address of each page, and the page in Markdown."""
    documented = homes()
    home_of = {_key(package, name): package for package, names in documented.items() for name in names}
    lines = ["# Names of the API", ""]
    for package, names in documented.items():
        summary = (import_module(package).__doc__ or "").strip().splitlines()[0]
        lines += [f"## [`{package}`]({_file(package)})", "", summary, "", ", ".join(_links(package, names)), ""]
        body = [f"# `{package}`", "", summary, ""]
        for name in names:
            # What a package finds or loads late is no name of its source, which is all that the reference reads.
            value = getattr(import_module(package), name)
            home = getattr(value, "__module__", package)
            is_found = home.startswith("mlotool.") and hasattr(value, "__qualname__")
            place = f"{home}.{value.__qualname__}" if is_found else f"{package}.{name}"
            body += [*([f'<a id="{package}.{name}"></a>', ""] if is_found else []), f"::: {place}", ""]
        again = sorted(set(import_module(package).__all__) - set(names), key=str.lower)
        if again:
            links = [link for name in again for link in _links(home_of[_key(package, name)], [name])]
            body += ["The package also offers, documented elsewhere: " + ", ".join(links) + "."]
        yield f"reference/api/{_file(package)}", "\n".join(body) + "\n"
    yield "reference/api/index.md", "\n".join(lines) + "\n"


def _links(package: str, names: list[str]) -> list[str]:
    return [f"[`{name}`]({_file(package)}#{package}.{name})" for name in names]


def _key(package: str, name: str) -> Any:
    """Return what tells one object from others, under whatever names."""
    value = getattr(import_module(package), name)
    return id(value) if _is_defined(value) else (package, name)


def _file(package: str) -> str:
    return f"{package.replace('.', '_')}.md"


def _is_defined(value: Any) -> bool:
    return callable(value) or hasattr(value, "__module__")
