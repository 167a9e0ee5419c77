"""The packages that a machine without a network lacks, as wheels in a folder that `make gpu-kit` fills."""

import importlib.util
import os
import sys
import zipfile
from pathlib import Path

NEEDED = {"hydra": "hydra_core", "omegaconf": "omegaconf", "antlr4": "antlr4_python3_runtime"}
"""By the name that is imported, what its wheel's name begins with."""


def install(wheels: Path, target: Path) -> list[str]:
    """Unpack what cannot be imported, for this process and those that it starts.

    The wheels are of Python alone, so that any version of Python takes them.

    Args:
        wheels: the folder of the wheels.
        target: takes the unpacked packages.

    Returns:
        The wheels that were taken.

    Raises:
        SystemExit: a package can neither be imported nor is its wheel there.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    taken = []
    for name in missing:
        found = sorted(wheels.glob(f"{NEEDED[name]}-*-none-any.whl"))
        if not found:
            raise SystemExit(
                f"--wheels: found no wheel of {NEEDED[name]} in {wheels}, and '{name}' cannot be imported; expected "
                "one of them. Run `make gpu-kit` where there is a network, and bring its folder along."
            )
        with zipfile.ZipFile(found[-1]) as wheel:
            wheel.extractall(target)
        taken.append(found[-1].name)
    if taken:
        # Behind what is installed: it is there for what is missing.
        sys.path.append(str(target))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(target)]))
    return taken
