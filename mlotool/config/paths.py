"""Where the built-in conf/ and recipes/ lie."""

from pathlib import Path


def package_dir(name: str) -> Path:
    """Return the folder of the built-in `conf` or `recipes`.

    Args:
        name: "conf" or "recipes". In a wheel they lie inside the package, in a checkout beside it.
    """
    package = Path(__file__).resolve().parents[1]
    return next((home / name for home in (package, package.parent) if (home / name).is_dir()), package / name)
