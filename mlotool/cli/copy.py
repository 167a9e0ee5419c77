"""`mlotool copy`: a recipe as the start of one of yours; also one from the web."""

import ipaddress
import re
import shlex
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import IO, Any
from urllib.error import HTTPError, URLError
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
)

from mlotool import __version__
from mlotool.cli.arguments import VerbParser, add_trust
from mlotool.config.reading import MAX_BYTES
from mlotool.config.schema import is_plain_name
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


SCHEMES = ("http", "https")
MAX_REDIRECTS = 3
SECONDS_TO_ANSWER = 10.0
SECONDS_IN_ALL = 30.0
_URL = re.compile(r"[!-~]+")
_CHUNK = 16_384


def is_url(text: str) -> bool:
    """Say whether a word is meant as a URL, of whatever scheme."""
    return "://" in text


def without_query(url: str) -> str:
    """Return a URL without what often holds a token."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))


def fetch(url: str, *, seconds: float = SECONDS_IN_ALL) -> str:
    """Return the text at a URL.

    The user named the URL, so it may be one of their own network. Where a server sends us on, it may not.

    Args:
        url: http or https.
        seconds: for all of it.

    Raises:
        ConfigError: another scheme, an address that a redirect may not lead to, too large, too slow, no text.
    """
    check_url(url)
    found: list[bytes | Exception] = []

    def work() -> None:
        try:
            found.append(_content(url, seconds))
        except Exception as error:
            # Its frames would hold the list, and with it the connection.
            found.append(error.with_traceback(None))

    # A thread that can be left alone: no timeout of a socket bounds the look-up of a name, a header a byte a second,
    # or an answer of a hundred parts that are each in time. It keeps no process alive.
    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise ConfigError(
            f"'{url}': not there after {seconds:g} s; expected a faster answer. Try again, or save the file and give "
            "its path."
        )
    [content] = found
    if isinstance(content, Exception):
        raise content
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"'{url}': found no text ({error}); expected UTF-8. Give the URL of a recipe.") from error


def _content(url: str, seconds: float) -> bytes:
    opener = OpenerDirector()
    # Not build_opener, which knows file:, ftp: and data: as well.
    for handler in (ProxyHandler(), HTTPHandler(), HTTPSHandler(), HTTPErrorProcessor(), HTTPDefaultErrorHandler()):
        opener.add_handler(handler)
    opener.add_handler(_Redirects(url))
    request = Request(url, headers={"User-Agent": "mlotool", "Accept": "text/plain, */*"})
    try:
        with opener.open(request, timeout=min(SECONDS_TO_ANSWER, seconds)) as response:
            return _read(url, response)
    except (HTTPError, URLError, HTTPException, OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "reason", None) or error
        code = ""
        if isinstance(error, HTTPError):
            code = f"{error.code} "
            error.close()
        raise ConfigError(
            f"'{url}': cannot be fetched ({code}{reason}); expected a recipe's text. Correct the URL, or save the file "
            "and give its path."
        ) from error


def _read(url: str, response: Any) -> bytes:
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise ConfigError(
            f"'{url}': found the text in the encoding '{encoding}', which was not asked for; expected plain text. Save "
            "the file and give its path."
        )
    content = b""
    while chunk := response.read1(_CHUNK):
        content += chunk
        if len(content) > MAX_BYTES:
            raise ConfigError(
                f"'{url}': found more than {MAX_BYTES} bytes; expected a recipe, which has fewer. Give a recipe's URL."
            )
    # Not chunked: what is left of the length that was announced.
    if response.length:
        raise ConfigError(
            f"'{url}': found {len(content)} bytes, and then the end, though {len(content) + response.length} were "
            "announced; expected all of it. Try again, or save the file and give its path."
        )
    return content


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
            f"found the URL '{url}'; expected one of {' or '.join(f'{each}://' for each in SCHEMES)}, in ASCII. Give "
            "one, or the path of a file."
        )
    if parts.username is not None:
        raise ConfigError(
            "found a URL with a user or password in it; expected none, as it would be written into the copy. Save the "
            "file and give its path."
        )


class _Redirects(HTTPRedirectHandler):
    """Follows a few redirects, from http to https but not back, and never from elsewhere into a private network."""

    max_redirections = MAX_REDIRECTS

    def __init__(self, url: str) -> None:
        self.host = urlsplit(url).hostname

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        """Return the next request, or raise ConfigError."""
        try:
            self._check(req, newurl)
        except ConfigError:
            fp.close()
            raise
        return super().redirect_request(req, fp, code, msg, headers, newurl)

    def _check(self, req: Request, newurl: str) -> None:
        check_url(newurl)
        host = urlsplit(newurl).hostname or ""
        if req.type == "https" and not newurl.lower().startswith("https:"):
            raise ConfigError(f"'{req.full_url}': redirects to '{newurl}'; expected https. Give the URL behind it.")
        if host != self.host and not _is_public(host):
            raise ConfigError(
                f"'{req.full_url}': redirects to '{newurl}', in a private network; expected a public place. If that "
                "is what you want, give that URL."
            )


def _is_public(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_global for *_, address in found)
