"""`mlotool copy URL`, against a server on the loopback: the user names the URL, so a local one is theirs to name."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlotool import __version__
from mlotool.config.reading import MAX_BYTES
from tests.cli.conftest import Result

Call = Callable[..., Result]
RECIPE = "# @package _global_\n# A shared one.\ndefaults: [plain, _self_]\nseed: 3\n"
MOVES = {"/moved.yaml": "/mine.yaml", "/circle.yaml": "/circle.yaml", "/to_file.yaml": f"file://{__file__}"}
TEXTS = {
    "/mine.yaml": RECIPE.encode(),
    "/hostile.yaml": RECIPE.encode() + b"hydra: {run: {dir: x}}\n",
    "/wrong.yaml": RECIPE.encode() + b"problems: {classifier: {loss: {_target_: os.system}}}\n",
    "/large.yaml": b"#" * (MAX_BYTES + 1),
    "/binary.yaml": b"\xff\xfe",
    "/short.yaml": RECIPE.encode(),
}


class _Handler(BaseHTTPRequestHandler):
    requests: list[tuple[str, dict[str, str]]] = []  # noqa: RUF012 - of all instances

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.requests.append((self.path, dict(self.headers)))
        if path in TEXTS:
            self.send_response(200)
            self.send_header("Content-Length", str(len(TEXTS[path]) + 100 * (path == "/short.yaml")))
            self.end_headers()
            self.wfile.write(TEXTS[path])
            return
        self.send_response(302 if path in MOVES else 404)
        self.send_header("Location", MOVES.get(path, "/"))
        self.end_headers()

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
    assert "secret" not in text
    assert text.replace(f"# copied from {server}/{name}.yaml by mlotool {__version__}\n", "") == RECIPE
    assert f"mlotool run recipes/{name}.yaml" in out
    assert call("show", name, "--all")[1].startswith("name: plain\nseed: 3\n")


def test_it_sends_nothing_of_the_user(call: Call, server: str) -> None:
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
        ("binary.yaml", ["cannot be fetched"]),
        ("short.yaml", ["cannot be fetched", "100 bytes are missing"]),
        ("missing.yaml", ["404"]),
        ("circle.yaml", ["cannot be fetched"]),
        ("to_file.yaml", ["cannot be fetched"]),
        ("page", ["'page'", "recipes/mine.yaml"]),
        (".hidden.yaml", ["'.hidden.yaml'"]),
    ],
)
def test_refused_and_nothing_written(call: Call, server: str, tmp_path: Path, name: str, words: list[str]) -> None:
    code, _, err = call("copy", f"{server}/{name}")
    assert code == 2
    assert [word for word in words if word not in err] == [], err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "url",
    ["file:///etc/hostname", "ftp://127.0.0.1/x.yaml", "http:///x.yaml", "http://user:password@127.0.0.1/x.yaml",
     "http://127.0.0.1:1/x.yaml", "http://127.0.0.1/\n.yaml", "http://user@[::1/x.yaml", "://"],
)  # fmt: skip
def test_other_urls(call: Call, url: str) -> None:
    code, _, err = call("copy", url, "mine.yaml")
    assert code == 2
    assert "password" not in err.replace("user or password", "")
    assert "expected" in err


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
