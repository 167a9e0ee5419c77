"""Copy a recipe to ./recipes, where `mlotool run NAME` finds it before the built-in one, or elsewhere.

  mlotool copy mwn                              to recipes/mwn.yaml
  mlotool copy mwn recipes/mine.yaml            under another name
  mlotool copy https://example.org/mine.yaml    from the web, after every check of `validate`

An existing file is not overwritten, unless --force is given.
"""

import shlex
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

from mlotool import __version__, config
from mlotool.cli.arguments import VerbParser, add_trust, read_request, take_trust, trust_words
from mlotool.cli.terminal import warn
from mlotool.config import recipes, schema
from mlotool.core import errors, messages
from mlotool.folders import documents, files


def main(words: list[str]) -> int:
    """Copy; 2 where the file exists already."""
    parser = VerbParser("copy", __doc__)
    parser.add_argument("recipe", metavar="RECIPE", help="its name, +recipe=NAME, a path or a URL")
    parser.add_argument("target", metavar="TARGET", nargs="?", default="recipes", help="a folder or a .yaml file")
    parser.add_argument("--force", action="store_true", help="overwrite")
    add_trust(parser)
    arguments = parser.parse(words)
    recipe, is_url = arguments.recipe, "://" in arguments.recipe
    source = _from_web(recipe, arguments.target, arguments.trust) if is_url else _from_here(recipe)
    text, file_name, origin = source
    target = _target_file(arguments.target, file_name)
    if not arguments.force and (target.exists() or target.is_symlink()):
        raise errors.ConfigError(f"{target} exists already; expected a new file. Name another one, or add --force.")
    with files.writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(target) as temporary:
        temporary.write_text(with_origin(text, f"{origin} by mlotool {__version__}"), encoding="utf-8")
    command = shlex.join(["mlotool", "run", str(target), *trust_words(arguments.trust)])
    print(messages.escape(f"copied {arguments.recipe} to {target}; run it: {command}"))
    return 0


def _from_here(recipe: str) -> tuple[str, str, str]:
    """Return the text of a recipe's file, its name, and where it is from."""
    request = read_request([recipe])
    if request.recipe is None:
        raise errors.ConfigError(f"copy: found the override '{recipe}'; expected a recipe. Write: mlotool copy RECIPE")
    # The built-in one, also where a copy of it in ./recipes hides it already.
    built_in = recipes.recipe_file(config.package_dir("recipes"), request.recipe) if request.file is None else None
    source = request.file or built_in or config.find_recipe(request.recipe)
    config.check_recipe_file(source)
    return documents.read_text(source), source.name, source.name


def _from_web(url: str, target: str, trusted: list[str]) -> tuple[str, str, str]:
    """Fetch a recipe, and check all of it where nothing else lies: what it inherits has to be here already."""
    text, parts = fetch(url), urlsplit(url)
    file_name = Path(target).name if target.endswith(".yaml") else parts.path.rpartition("/")[2]
    if not file_name.endswith(".yaml") or not schema.is_plain_name(file_name):
        raise errors.ConfigError(
            f"'{url}': found '{file_name}' as the file's name; expected letters, digits, '-', '_', then .yaml. "
            f"Name the copy: mlotool copy {url} recipes/mine.yaml."
        )
    take_trust(trusted)
    with TemporaryDirectory() as folder:
        file = Path(folder) / file_name
        file.write_text(text, encoding="utf-8")
        try:
            config.check_recipe_file(file)
            warnings = config.check(config.compose(str(file)))
        except errors.ConfigError as error:
            # The file's folder is gone when the message is read.
            raise errors.ConfigError(str(error).replace(str(file), url)) from None
    warn(*warnings)
    # Without its query, which often holds a token.
    return text, file_name, urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))


def with_origin(text: str, origin: str) -> str:
    """Return a recipe's text with a line that tells its origin.

    It stands behind the `# @package` line, which must come first, and the header's first line, which `list` shows.
    """
    lines = text.splitlines(keepends=True)
    place = 1 if lines and lines[0].startswith("# @package") else 0
    if lines[place:] and lines[place].startswith("#"):
        place += 1
    return "".join([*lines[:place], f"# copied from {' '.join(messages.escape(origin).split())}\n", *lines[place:]])


def _target_file(target: str, file_name: str) -> Path:
    if "=" in target:
        raise errors.ConfigError(f"'{target}': found an override; expected a folder or a .yaml file. Leave it out.")
    path = files.at_home(target)
    if path.suffix not in ("", ".yaml") and not path.is_dir():
        raise errors.ConfigError(
            f"'{target}': found the ending '{path.suffix}'; expected {path.with_suffix('.yaml')}, or a folder."
        )
    return path if path.suffix == ".yaml" and not path.is_dir() else path / file_name


SECONDS_TO_ANSWER = 10.0


def fetch(url: str) -> str:
    """Return the text at a URL of http or https without a password in it, of at most 100 kB.

    Raises:
        ConfigError: another URL, too large, too slow, no text.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.username is not None or not url.isascii():
            raise ValueError("it is not an http:// or https:// URL in ASCII, or it contains a user name")
        request = Request(url, headers={"User-Agent": "mlotool", "Accept": "text/plain, */*"})
        with urlopen(request, timeout=SECONDS_TO_ANSWER) as response:
            content = response.read(documents.MAX_BYTES + 1)
            if len(content) > documents.MAX_BYTES or response.length:
                raise ValueError(f"it has more than {documents.MAX_BYTES} bytes, or fewer than were announced")
            return str(content, "utf-8")
    # UnicodeDecodeError is a ValueError, and the errors of urllib are OSErrors.
    except (HTTPException, OSError, ValueError) as error:
        shown = "a URL with a user name" if "@" in url.partition("://")[2].partition("/")[0] else f"'{url}'"
        raise errors.ConfigError(
            f"{shown}: cannot be fetched ({error}); expected a recipe's text. Correct the URL, or save the file and "
            "give its path."
        ) from error
