"""What a recipe may refer to: other values of the config, by `${data.num_classes}` alone.

A reference stands for a whole value. Parts of texts, references inside references and most resolvers are refused:
`oc.env` reads the environment, `oc.create` and `oc.decode` make config out of text, and two references in each of forty
texts make a text of 2^40 characters.
"""

import re
from collections.abc import Iterator

from mlotool.config.schema import ROOT_KEYS, is_container

_REFERENCE = re.compile(
    r"\$\{(?:oc\.(?P<resolver>select|dict\.keys|dict\.values):)?(?P<dots>\.*)(?P<root>[A-Za-z_]\w*)(?:\.\w+|\[\d+\])*"
    r"(?P<default>, ?[\w.+\-]+)?\}",
    re.ASCII,
)
_OUTSIDE = re.compile(r"[/\\~]|[A-Za-z][A-Za-z0-9+.\-]*:[/\\]")


def reference_faults(key: str, value: str) -> Iterator[str]:
    """Yield what is wrong with a text that refers to other values.

    Args:
        key: where it stands.
        value: the text.
    """
    if "${" not in value:
        return
    match = _REFERENCE.fullmatch(value)
    if match is None or (match["default"] and match["resolver"] != "select"):
        yield (
            f"{key}: found {value!r}; expected a reference alone, such as ${{data.num_classes}}, without a resolver or "
            "other text. Write the value, or give it on the command line."
        )
    elif not match["dots"] and match["root"] not in ROOT_KEYS:
        yield f"{key}: found {value!r}; expected a reference to one of {', '.join(ROOT_KEYS)}. Correct it."
    elif "." not in key and is_container(key):
        yield f"{key}: found {value!r}; expected its keys written out, which are checked here. Write them out."


def place_faults(key: str, value: str) -> Iterator[str]:
    """Yield what is wrong with a text that may be the path of a file: it has to lie below the working folder.

    Args:
        key: where it stands.
        value: the text.
    """
    # `${..seed}` climbs in the config, not on the disk.
    parts = re.split(r"[/\\]", value)
    if _OUTSIDE.match(value) or "://" in value or ".." in parts:
        yield (
            f"{key}: found {value!r}; expected a path below the working folder, such as datasets/mine, as a recipe may "
            f"not choose other places. Write one, or give it on the command line: {key}=.."
        )
