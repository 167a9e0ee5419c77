"""The `decisions` of a config: names, and names or whole numbers."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mlotool.config.resolve import is_known
from mlotool.core.messages import shown

# As in mlotool/spaces/decisions.py, which knows torch.
_NAME = re.compile(r"[a-z0-9_]{1,100}")


def decision_faults(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with `decisions`; whether a model asks for them shows when it is built."""
    for name, value in values["decisions"].items():
        if not _NAME.fullmatch(str(name)) or name == "seed":
            yield (
                f"decisions: found the name {shown(name)}; expected a-z, 0-9 and '_', at most 100 of them, but not "
                "seed. `mlotool show RECIPE --nodes PROBLEM` lists the names."
            )
        elif is_known(value) and type(value) is not int and not (isinstance(value, str) and _NAME.fullmatch(value)):
            quotes = " YAML reads yes, no, on and off so: write quotes around them." if isinstance(value, bool) else ""
            yield (
                f"decisions.{name}: found {shown(value)}; expected the name of a candidate, of a-z, 0-9 and '_', or a "
                f"whole number.{quotes} `mlotool show RECIPE --nodes PROBLEM` lists the candidates."
            )
