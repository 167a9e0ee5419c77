"""`hydra.sweeper.params` of a recipe: each entry becomes an override of the command line, so it may be no other."""

import re
from collections.abc import Iterator
from typing import Any

from mlotool.config.defaults import key_faults
from mlotool.config.schema import GROUPS, ROOT_KEYS

_KEY = re.compile(r"(?P<prefix>\+{0,2}|~)(?P<path>[A-Za-z_][\w.]*)(?:@(?P<package>[\w.]+))?", re.ASCII)


def sweep_faults(params: Any) -> Iterator[str]:
    """Yield what is wrong with a recipe's sweep."""
    if params is None:
        return
    if not isinstance(params, dict):
        yield f"hydra.sweeper.params: found {params!r}; expected keys with choices. Write `seed: 0,1,2`."
        return
    for key, value in params.items():
        where = f"hydra.sweeper.params, '{key}'"
        match = _KEY.fullmatch(str(key))
        root = match["path"].split(".")[0] if match else ""
        if match is None or root not in (*ROOT_KEYS, *GROUPS) or root == "name":
            yield f"{where}: expected a key of the recipe other than name, such as problems.<name>.optimizer.lr. Correct it."
        elif match["package"]:
            yield from key_faults(where, match["path"], match["package"])
        if not isinstance(value, str | int | float):
            yield f"{where}: found {value!r}; expected choices in one text. Write `seed: 0,1,2`."
        elif isinstance(value, str) and "${" in value:
            yield f"{where}: found {value!r}; expected no reference. Write the choices out."
