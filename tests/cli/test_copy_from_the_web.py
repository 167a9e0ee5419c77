"""`mlotool copy URL`, against a server on the loopback: the user names the URL, so a local one is theirs to name."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlotool import __version__
from mlotool.cli import copy
from mlotool.config.reading import MAX_BYTES
from mlotool.core.errors import ConfigError
from tests.cli.conftest import Result

Call = Callable[..., Result]
RECIPE = "# @package _global_\n# A shared one.\ndefaults: [plain, _self_]\nseed: 3\n"


class _Handler(BaseHTTPRequestHandler):
    requests: list[tuple[str, dict[str, str]]] = []  # noqa: RUF012 - of all instances

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.requests.append((self.path, dict(self.headers)))
        port = self.server.server_address[1]
        moves = {
            "/moved.yaml": "/mine.yaml",
            "/circle.yaml": "/circle.yaml",
            "/to_file.yaml": f"file://{__file__}",
            "/inside.yaml": f"http://localhost:{port}/mine.yaml",
        }
        texts = {
            "/mine.yaml": RECIPE.encode(),
            "/hostile.yaml": RECIPE.encode() + b"hydra: {run: {dir: x}}\n",
            "/wrong.yaml": RECIPE.encode() + b"problems: {classifier: {loss: {_target_: os.system}}}\n",
            "/large.yaml": b"#" * (MAX_BYTES + 1),
            "/binary.yaml": b"\xff\xfe",
            "/slow.yaml": RECIPE.encode(),
        }
        if path in moves or path not in texts:
            self.send_response(302 if path in moves else 404)
            self.send_header("Location", moves.get(path, "/"))
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        try:
            for start in range(0, len(texts[path]), 8 if path == "/slow.yaml" else MAX_BYTES):
                self.wfile.write(texts[path][start : start + (8 if path == "/slow.yaml" else MAX_BYTES)])
                self.wfile.flush()
                time.sleep(0.2 if path == "/slow.yaml" else 0.0)
        except OSError:
            pass  # the reader has had enough

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["mine", "moved"])
def test_it_is_copied_with_its_origin(call: Call, server: str, tmp_path: Path, name: str) -> None:
    code, out, err = call("copy", f"{server}/{name}.yaml?token=secret#part")
    assert code == 0, err
    text = (tmp_path / "recipes" / f"{name}.yaml").read_text()
    assert f"# copied from {server}/{name}.yaml by mlotool {__version__}\n" in text
    assert "secret" not in text
    assert text.replace(f"# copied from {server}/{name}.yaml by mlotool {__version__}\n", "") == RECIPE
    assert f"mlotool run recipes/{name}.yaml" in out
    assert call("show", name, "--all")[1].startswith("name: plain\nseed: 3\n")


def test_it_sends_nothing_of_the_user(call: Call, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-key")
    _Handler.requests.clear()
    call("copy", f"{server}/mine.yaml")
    [(path, headers)] = _Handler.requests
    assert path == "/mine.yaml"
    assert set(headers) <= {"Host", "User-Agent", "Accept", "Accept-Encoding", "Connection"}
    assert headers["User-Agent"] == "mlotool"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hostile.yaml", ["hydra.run", "/hostile.yaml"]),
        ("wrong.yaml", ["problems.classifier.loss._target_", "os.system"]),
        ("large.yaml", [f"more than {MAX_BYTES} bytes"]),
        ("binary.yaml", ["no text"]),
        ("missing.yaml", ["404"]),
        ("circle.yaml", ["cannot be fetched"]),
        ("to_file.yaml", ["file://", "http://"]),
        ("inside.yaml", ["redirects to", "localhost", "private network"]),
        ("page", ["'page'", "recipes/mine.yaml"]),
        ("..%2F..%2Fx.yaml", ["404"]),
        (".hidden.yaml", ["'.hidden.yaml'"]),
    ],
)
def test_refused_and_nothing_written(call: Call, server: str, tmp_path: Path, name: str, words: list[str]) -> None:
    before = set(tmp_path.rglob("*"))
    code, _, err = call("copy", f"{server}/{name}")
    assert code == 2
    for word in words:
        assert word in err
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "url",
    ["file:///etc/hostname", "ftp://127.0.0.1/x.yaml", "gopher://x/y.yaml", "data://x/y.yaml", "http:///x.yaml",
     "http://user:password@127.0.0.1/x.yaml", "http://127.0.0.1:1/x.yaml", "http://127.0.0.1/\n.yaml",
     "http://[::1", "http://user@[::1/x.yaml", "http://[1::2::3]/x.yaml", "http://[127.0.0.1]/x.yaml",
     "http://\u2100.com/x.yaml", "http://]/x.yaml", "://"],
)  # fmt: skip
def test_other_urls(call: Call, url: str) -> None:
    code, _, err = call("copy", url, "mine.yaml")
    assert code == 2
    assert "password" not in err.replace("user or password", "")
    assert "expected" in err


def test_a_slow_server_is_left(server: str) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"not there after 0\.5 s"):
        copy.fetch(f"{server}/slow.yaml", seconds=0.5)
    assert time.monotonic() - started < 30


@contextmanager
def raw_server(answer: bytes, part: int | None = None) -> Iterator[str]:
    """Serve these bytes to every connection: at once, or `part` of them every 20 ms, over and over from the last."""
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.recv(10_000)
                if part is None:
                    connection.sendall(answer)
                    continue
                for start in range(0, len(answer), part):
                    connection.sendall(answer[start : start + part])
                    time.sleep(0.02)
                while not done.is_set():
                    connection.sendall(answer[-part:])
                    time.sleep(0.02)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mine.yaml"
        done.set()
        with suppress(OSError), socket.create_connection(listener.getsockname(), timeout=1):
            pass  # it waits for one
        thread.join()


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (OK + b"X: " + b"y" * 100, 1),
        (OK + b"X: y\r\n", 6),
        (b"HTTP/1.1 100 Continue\r\n\r\n", 25),
        (CHUNKED + b"1;" + b"x" * 100, 1),
        (CHUNKED + b"1\r\n#\r\n", 6),
        (CHUNKED + b"0\r\n" + b"Trailer: y\r\n", 12),
        (OK + b"Content-Length: 90000\r\n\r\n#", 1),
        (b"H", 1),
    ],
    ids=["header", "headers", "continue", "chunk extension", "chunks", "trailers", "body", "status"],
)
def test_whatever_is_slow_is_left_in_time(answer: bytes, part: int) -> None:
    with raw_server(answer, part) as url:
        started = time.monotonic()
        # Some are refused before, for too long a line.
        with pytest.raises(ConfigError, match=r"not there after 0\.5 s|cannot be fetched"):
            copy.fetch(url, seconds=0.5)
        assert time.monotonic() - started < 5


def test_a_slow_look_up_of_the_name_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: is_over.wait(20) or [])
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"not there after 0\.3 s"):
        copy.fetch("http://example.org/mine.yaml", seconds=0.3)
    assert time.monotonic() - started < 5
    is_over.set()


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (OK + b"Content-Length: 100\r\n\r\n# short", "found 7 bytes, and then the end, though 100 were announced"),
        (CHUNKED + b"20\r\n# short", "cannot be fetched"),
        (CHUNKED + b"3\r\n# s\r\n", "cannot be fetched"),
        (OK + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\n# s", "in the encoding 'gzip'"),
        (OK + b"X: y\r\n" * 200 + b"\r\n# s", "cannot be fetched"),
        (b"\x00\x01\x02\r\n\r\n", "cannot be fetched"),
    ],
    ids=["length", "chunk", "no last chunk", "gzip", "many headers", "no HTTP"],
)
def test_an_answer_that_is_not_whole_is_refused(answer: bytes, match: str) -> None:
    with raw_server(answer) as url, pytest.raises(ConfigError, match=match):
        copy.fetch(url, seconds=5)


@pytest.mark.parametrize("forced", [[], ["--force"]])
def test_no_link_is_followed(call: Call, server: str, tmp_path: Path, forced: list[str]) -> None:
    outside = tmp_path / "outside.yaml"
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").symlink_to(outside)
    code = call("copy", f"{server}/mine.yaml", *forced)[0]
    assert code == (0 if forced else 2)
    assert not outside.exists()
    assert (tmp_path / "recipes" / "mine.yaml").is_symlink() == (not forced)


def test_never_over_another_file(call: Call, server: str, tmp_path: Path) -> None:
    (tmp_path / "kept.yaml").write_text("mine")
    code, _, err = call("copy", f"{server}/mine.yaml", "kept.yaml")
    assert (code, (tmp_path / "kept.yaml").read_text()) == (2, "mine")
    assert "--force" in err
    assert call("copy", f"{server}/mine.yaml", "kept.yaml", "--force")[0] == 0
    assert "seed: 3" in (tmp_path / "kept.yaml").read_text()
