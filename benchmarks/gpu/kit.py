"""The packages that a machine without a network lacks, as wheels in a folder that `make gpu-kit` fills."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

NEEDED = {
    "hydra": "hydra_core",
    "omegaconf": "omegaconf",
    "antlr4": "antlr4_python3_runtime",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic_core",
    "annotated_types": "annotated_types",
    "typing_inspection": "typing_inspection",
    "greenlet": "greenlet",
    "rich": "rich",
}
"""By the name that is imported, what its wheel's name begins with: what a machine with PyTorch and Lightning may lack.
W&B is not among them, as no check logs to it."""


def install(wheels: Path, target: Path) -> list[str]:
    """Install what cannot be imported, for this process and those that it starts.

    Args:
        wheels: the folder of the wheels.
        target: takes the packages.

    Returns:
        The wheels that were taken.

    Raises:
        SystemExit: a package can neither be imported nor installed from the folder.
    """
    taken = []
    for name in [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        files = sorted(wheels.glob(f"{NEEDED[name]}-*.whl"))
        if not files:
            raise SystemExit(
                f"--wheels: found no wheel of {NEEDED[name]} in {wheels}, and '{name}' cannot be imported; expected "
                "one of them. Run `make gpu-kit` where there is a network, and bring its folder along."
            )
        taken.append(files[-1])
    if taken:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target]
        done = subprocess.run([*command, *taken], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(
                f"--wheels: found wheels in {wheels} that pip does not install here:\n{done.stderr.strip()}\n"
                f"Expected wheels for Python {sys.version_info.major}.{sys.version_info.minor} on this machine: "
                f"`make gpu-kit KIT_PYTHON={sys.version_info.major}.{sys.version_info.minor}`."
            )
        # Behind what is installed: it is there for what is missing.
        sys.path.append(str(target))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(target)]))
    return [path.name for path in taken]
