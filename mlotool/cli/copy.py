"""`mlotool copy`: a recipe as the start of one of yours; also one from the web."""

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote, urlsplit

from mlotool import __version__
from mlotool.cli.arguments import VerbParser, add_trust
from mlotool.cli.fetch import is_url
from mlotool.config.names import is_plain_name
from mlotool.core.errors import ConfigError
from mlotool.core.files import at_home, cannot_write
from mlotool.core.messages import escape

DESCRIPTION = """Copy a recipe to ./recipes, where `mlotool run NAME` finds it before the built-in one, or elsewhere.

  mlotool copy mwn                              to recipes/mwn.yaml
  mlotool copy mwn recipes/mine.yaml            under another name
  mlotool copy https://example.org/mine.yaml    from the web, after every check of `validate`
"""


def main(words: Sequence[str]) -> int:
    """Copy; 2 where the file exists already."""
    parser = VerbParser("copy", DESCRIPTION)
    parser.add_argument("recipe", metavar="RECIPE", help="its name, +recipe=NAME, a path or a URL")
    parser.add_argument("target", metavar="TARGET", nargs="?", default="recipes", help="a folder or a .yaml file")
    parser.add_argument("--force", action="store_true", help="overwrite")
    add_trust(parser)
    arguments = parser.parse(words)
    if is_url(arguments.recipe):
        found = _from_web(arguments.recipe, arguments.target, arguments.trust)
    else:
        found = _from_here(arguments.recipe, parser)
    target = _target_file(arguments.target, found.file_name)
    if target.exists() and not arguments.force:
        raise ConfigError(
            f"{target} exists already; expected a new file. Name another one, "
            f"mlotool copy {arguments.recipe} recipes/mine.yaml, or add --force to overwrite it."
        )
    write_new(target, with_origin(found.text, found.origin), is_forced=arguments.force)
    print(escape(f"copied {arguments.recipe} to {target}; run it: mlotool run {shlex.quote(str(target))}"))
    return 0


@dataclass(frozen=True)
class Found:
    """A recipe that may be copied: it was checked.

    Args:
        text: of its file.
        file_name: that a copy gets.
        origin: where it came from, for its header.
    """

    text: str
    file_name: str
    origin: str


def _from_here(recipe: str, parser: VerbParser) -> Found:
    from mlotool import config
    from mlotool.cli.request import read_request
    from mlotool.config.paths import recipe_file
    from mlotool.config.reading import read_text

    request = read_request([recipe])
    if request.recipe is None:
        parser.error(f"'{recipe}' is an override, not a recipe")
    # The built-in one, also where a copy of it in ./recipes hides it already.
    built_in = recipe_file(config.package_dir("recipes"), request.recipe) if request.file is None else None
    source = request.file or built_in or config.find_recipe(request.recipe)
    config.check_recipe_file(source)
    origin = f"mlotool {__version__}" if source == built_in else f"{source.name} by mlotool {__version__}"
    return Found(read_text(source), source.name, origin)


def _from_web(url: str, target: str, trusted: Sequence[str]) -> Found:
    """Fetch a recipe, and check all of it where nothing else lies: what it inherits has to be here already."""
    from mlotool import config
    from mlotool.cli.fetch import check_url, fetch, without_query

    check_url(url)
    file_name = unquote(urlsplit(url).path).rpartition("/")[2]
    if not file_name.endswith(".yaml") or not is_plain_name(file_name):
        if not target.endswith(".yaml"):
            raise ConfigError(
                f"'{url}': found '{file_name}' as the file's name; expected letters, digits, '-', '_', then .yaml. "
                f"Name the copy: mlotool copy {url} recipes/mine.yaml."
            )
        file_name = Path(target).name
    text = fetch(url)
    for package in trusted:
        config.trust(package)
    with TemporaryDirectory() as folder:
        file = Path(folder) / file_name
        file.write_text(text, encoding="utf-8")
        try:
            config.check_recipe_file(file)
            warnings = config.check(config.compose(str(file)))
        except ConfigError as error:
            # The file's folder is gone when the message is read.
            raise ConfigError(str(error).replace(str(file), url)) from None
    for warning in warnings:
        print(f"mlotool: warning: {escape(warning)}", file=sys.stderr)
    return Found(text, file_name, f"{without_query(url)} by mlotool {__version__}")


def write_new(target: Path, text: str, *, is_forced: bool) -> None:
    """Write a file that did not exist, whole or not at all; no link is followed, neither by overwriting one.

    Raises:
        ConfigError: something of that name is there already.
        WriteError: the disk does not take it.
    """
    part = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        with part.open("x", encoding="utf-8") as file:
            file.write(text)
        if is_forced:
            part.replace(target)
        else:
            # Unlike a rename it fails where something, be it a link to nowhere, has the name.
            target.hardlink_to(part)
            part.unlink()
    except FileExistsError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise ConfigError(
            f"{target}: cannot be written ({error.strerror}); expected a place for a new file. Name another one, or "
            "add --force to replace it."
        ) from error
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise cannot_write(target, error) from error


def with_origin(text: str, origin: str) -> str:
    """Return a recipe's text with a line that tells its origin.

    It stands behind the `# @package` line, which must come first, and the header's first line, which `list` shows.
    """
    lines = text.splitlines(keepends=True)
    place = 1 if lines and lines[0].startswith("# @package") else 0
    if lines[place:] and lines[place].startswith("#"):
        place += 1
    return "".join([*lines[:place], f"# copied from {' '.join(escape(origin).split())}\n", *lines[place:]])


def _target_file(target: str, file_name: str) -> Path:
    if "=" in target:
        raise ConfigError(
            f"'{target}': found an override; expected a folder or a .yaml file, as a copy is the recipe's own text. "
            "Leave it out, and write it behind mlotool run, or into the copy."
        )
    path = at_home(target)
    if path.suffix not in ("", ".yaml") and not path.is_dir():
        raise ConfigError(
            f"'{target}': found the ending '{path.suffix}'; expected a .yaml file, or a folder. Write "
            f"{path.with_suffix('.yaml')}."
        )
    return path if path.suffix == ".yaml" and not path.is_dir() else path / file_name
