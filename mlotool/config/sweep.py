"""What a recipe says of sweeps: `sweep`, and `hydra.sweeper.params`, whose entries become overrides."""

import re
from collections.abc import Iterator
from typing import Any

from mlotool.config.defaults import key_faults
from mlotool.config.references import place_faults
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
# A recipe may not send a run anywhere.
OFFLINE_MODES = ("offline", "disabled")
_WORDS = re.compile(r"[\s,\[\]()'\"=]+")
# Where files and jobs go is the command line's: a launcher's options are commands to a cluster.
NOT_IN_RECIPES = ("devices", "launcher", "launcher_options", "storage")
_KEY = re.compile(r"(?P<prefix>\+{0,2}|~)(?P<path>[A-Za-z_][\w.]*)(?:@(?P<package>[\w.]+))?", re.ASCII)


def node_faults(node: Any) -> Iterator[str]:
    """Yield what is wrong with a recipe's `sweep`."""
    if node is None:
        return
    if not isinstance(node, dict):
        yield f"sweep: found {node!r}; expected keys such as params and num_trials. Write them out."
        return
    for key, value in node.items():
        if key in NOT_IN_RECIPES:
            yield f"sweep.{key}: found {value!r}; expected it on the command line alone: sweep.{key}=... Remove it."
    yield from sweep_faults(node.get("params"), "sweep.params")


def sweep_faults(params: Any, place: str = "hydra.sweeper.params") -> Iterator[str]:
    """Yield what is wrong with the choices that a recipe's sweep lists."""
    if params is None:
        return
    if not isinstance(params, dict):
        yield f"{place}: found {params!r}; expected keys with choices. Write `seed: 0,1,2`."
        return
    for key, value in params.items():
        where = f"{place}, '{key}'"
        match = _KEY.fullmatch(str(key))
        root = match["path"].split(".")[0] if match else ""
        if match is None or root not in (*ROOT_KEYS, *GROUPS) or root in ("name", "sweep", "resume"):
            yield (
                f"{where}: expected a key of the recipe, such as problems.<name>.unroll_steps, not name, sweep or "
                "resume. Correct it."
            )
        elif match["path"].rpartition(".")[2] in DANGEROUS:
            yield f"{where}: expected no key that downloads, unpickles or chooses where files go. Remove it."
        elif root == "logger" and "." in match["path"]:
            yield f"{where}: expected no setting of the logger, which may send a run away. Remove it."
        elif match["package"]:
            yield from key_faults(where, match["path"], match["package"])
        if not isinstance(value, str | int | float):
            yield f"{where}: found {value!r}; expected choices in one text. Write `seed: 0,1,2`."
        elif isinstance(value, str) and "{" in value.replace("${", ""):
            # A mapping could hold what no key here may name.
            yield f"{where}: found {value!r}; expected values or options of a group, no mappings. Sweep each key."
        elif isinstance(value, str) and "${" in value:
            yield f"{where}: found {value!r}; expected no reference. Write the choices out."
        elif isinstance(value, str):
            faults = (fault for word in _WORDS.split(value) for fault in place_faults(where, word))
            yield from list(faults)[:1]
