"""A recipe's text from the web: http and https only, small, soon, and no detour into a private network."""

import ipaddress
import re
import socket
from http.client import HTTPException, HTTPMessage
from threading import Thread
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit, urlunsplit
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

from mlotool.config.reading import MAX_BYTES
from mlotool.core.errors import ConfigError

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
