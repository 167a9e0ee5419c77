"""`mlotool copy`: a recipe as the start of one of yours; also one from the web."""

import re
import shlex
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    UnknownHandler,
)

from mlotool import __version__
from mlotool.cli.arguments import VerbParser, add_trust
from mlotool.cli.terminal import warn
from mlotool.config.reading import MAX_BYTES
from mlotool.config.schema import is_plain_name
from mlotool.core.errors import ConfigError
from mlotool.core.files import at_home, replacing, writing
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
    if not arguments.force and (target.exists() or target.is_symlink()):
        raise ConfigError(
            f"{target} exists already; expected a new file. Name another one, "
            f"mlotool copy {arguments.recipe} recipes/mine.yaml, or add --force to overwrite it."
        )
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        temporary.write_text(with_origin(found.text, found.origin), encoding="utf-8")
    print(escape(f"copied {arguments.recipe} to {target}; run it: mlotool run {shlex.quote(str(target))}"))
    return 0


class Found(NamedTuple):
    """A recipe that was checked: the text of its file, the name that a copy gets, and where it came from."""

    text: str
    file_name: str
    origin: str


def _from_here(recipe: str, parser: VerbParser) -> Found:
    from mlotool import config
    from mlotool.cli.arguments import read_request
    from mlotool.config.reading import read_text
    from mlotool.config.recipes import recipe_file

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
    warn(*warnings)
    parts = urlsplit(url)
    # Without its query, which often holds a token.
    origin = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    return Found(text, file_name, f"{origin} by mlotool {__version__}")


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


SCHEMES = ("http", "https")
SECONDS_TO_ANSWER = 10.0
_URL = re.compile(r"[!-~]+")


def is_url(text: str) -> bool:
    """Say whether a word is meant as a URL, of whatever scheme."""
    return "://" in text


def fetch(url: str) -> str:
    """Return the text at a URL, over http or https alone, also where a server sends us on.

    Raises:
        ConfigError: another scheme, too large, too slow, no text.
    """
    check_url(url)
    opener = OpenerDirector()
    # Not build_opener, which knows file:, ftp: and data: as well.
    for handler in (ProxyHandler, HTTPHandler, HTTPSHandler, HTTPErrorProcessor, HTTPDefaultErrorHandler,
                    HTTPRedirectHandler, UnknownHandler):  # fmt: skip
        opener.add_handler(handler())
    request = Request(url, headers={"User-Agent": "mlotool", "Accept": "text/plain, */*"})
    try:
        with opener.open(request, timeout=SECONDS_TO_ANSWER) as response:
            content = response.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
            # Not chunked: what is left of the length that was announced.
            if response.length:
                raise ValueError(f"{response.length} bytes are missing")
            return str(content, "utf-8")
    # UnicodeDecodeError is a ValueError, and the errors of urllib are OSErrors.
    except (HTTPException, OSError, ValueError) as error:
        if isinstance(error, HTTPError):
            error.close()
        raise ConfigError(
            f"'{url}': cannot be fetched ({error}); expected a recipe's text. Correct the URL, or save the file and "
            "give its path."
        ) from error


def check_url(url: str) -> None:
    """Refuse what is no URL of http or https, and one with a password in it.

    Raises:
        ConfigError: with what was found.
    """
    try:
        parts = urlsplit(url) if _URL.fullmatch(url) else None
    except ValueError:
        # A bracket without its other half, an address that is none.
        parts = None
    if parts is None or parts.scheme.lower() not in SCHEMES or not parts.hostname:
        raise ConfigError(
            f"found the URL '{url}'; expected http:// or https://, in ASCII. Give one, or the path of a file."
        )
    if parts.username is not None:
        raise ConfigError(
            "found a URL with a user or password in it; expected none, as it would be written into the copy. Save the "
            "file and give its path."
        )
