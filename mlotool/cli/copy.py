"""`mlotool copy`: a recipe as the start of one of yours."""

from collections.abc import Sequence
from pathlib import Path

from mlotool import __version__
from mlotool.cli.arguments import VerbParser
from mlotool.core.errors import ConfigError

DESCRIPTION = """Copy a recipe to ./recipes, where `mlotool run NAME` finds it before the built-in one, or elsewhere.

  mlotool copy mwn                              to recipes/mwn.yaml
  mlotool copy mwn recipes/mine.yaml            under another name
"""


def main(words: Sequence[str]) -> int:
    """Copy; 2 where the file exists already."""
    parser = VerbParser("copy", DESCRIPTION)
    parser.add_argument("recipe", metavar="RECIPE", help="its name, +recipe=NAME or a path")
    parser.add_argument("target", metavar="TARGET", nargs="?", default="recipes", help="a folder or a .yaml file")
    parser.add_argument("--force", action="store_true", help="overwrite")
    arguments = parser.parse(words)
    from mlotool import config
    from mlotool.cli.request import read_request
    from mlotool.config.paths import recipe_file

    request = read_request([arguments.recipe])
    if request.recipe is None:
        parser.error(f"'{arguments.recipe}' is an override, not a recipe")
    # The built-in one, also where a copy of it in ./recipes hides it already.
    source = request.file or recipe_file(config.package_dir("recipes"), request.recipe)
    source = source or config.find_recipe(request.recipe)
    config.check_recipe_file(source)
    target = _target_file(arguments.target, source)
    if target.exists() and not arguments.force:
        raise ConfigError(
            f"{target} exists already; expected a new file. Name another one, "
            f"mlotool copy {arguments.recipe} recipes/mine.yaml, or add --force to overwrite it."
        )
    text = with_origin(source.read_text(encoding="utf-8"))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    print(f"copied {arguments.recipe} to {target}; run it: mlotool run {target}")
    return 0


def with_origin(text: str) -> str:
    """Return a recipe's text with a line that tells its origin.

    It stands behind the `# @package` line, which must come first, and the header's first line, which `list` shows.
    """
    lines = text.splitlines(keepends=True)
    place = 1 if lines and lines[0].startswith("# @package") else 0
    if lines[place:] and lines[place].startswith("#"):
        place += 1
    return "".join([*lines[:place], f"# copied from mlotool {__version__}\n", *lines[place:]])


def _target_file(target: str, source: Path) -> Path:
    path = Path(target).expanduser()
    return path if path.suffix == ".yaml" and not path.is_dir() else path / source.name
