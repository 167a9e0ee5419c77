"""`hydra.sweeper.params` of a recipe: each entry becomes an override of the command line, so it may be no other."""

import re
from collections.abc import Iterator
from typing import Any

from mlotool.config.defaults import key_faults
from mlotool.config.schema import GROUPS, ROOT_KEYS

# Arguments that write, download or unpickle, and the values that do nothing.
DANGEROUS: dict[str, tuple[Any, ...]] = {
    "dirpath": (None,),
    "loader": (None,),
    "weights": (None,),
    "weights_only": (True,),
    "download": (False, None),
    "pickle_module": (None,),
}
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
        if match is None or root not in (*ROOT_KEYS, *GROUPS) or root in ("name", "resume"):
            yield f"{where}: expected a key of the recipe, such as problems.<name>.unroll_steps, not name or resume. Correct it."
        elif match["path"].rpartition(".")[2] in DANGEROUS:
            yield f"{where}: expected no key that downloads, unpickles or chooses where files go. Remove it."
        elif match["package"]:
            yield from key_faults(where, match["path"], match["package"])
        if not isinstance(value, str | int | float):
            yield f"{where}: found {value!r}; expected choices in one text. Write `seed: 0,1,2`."
        elif isinstance(value, str) and "{" in value.replace("${", ""):
            # A mapping could hold what no key here may name.
            yield f"{where}: found {value!r}; expected values or options of a group, no mappings. Sweep each key."
        elif isinstance(value, str) and "${" in value:
            yield f"{where}: found {value!r}; expected no reference. Write the choices out."
