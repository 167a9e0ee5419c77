"""`mlotool copy URL`, against a server on the loopback: the user names the URL, so a local one is theirs to name."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlotool import __version__
from mlotool.folders.documents import MAX_BYTES
from tests.cli.conftest import Call

RECIPE = "# @package _global_\n# A shared one.\ndefaults: [plain, _self_]\nseed: 3\n"
# What a server answers that is no friend, with what is said of it.
ANSWERS = {
    "hostile": (f"{RECIPE}hydra: {{run: {{dir: /tmp/elsewhere}}}}\n".encode(), "hydra.run"),
    "wrong": (f"{RECIPE}problems: {{classifier: {{loss: {{_target_: os.system}}}}}}\n".encode(), "os.system"),
    "large": (RECIPE.encode() + b"#" * MAX_BYTES, f"more than {MAX_BYTES} bytes"),
    "binary": (b"\xff\xfe\x00", "cannot be fetched"),
    "circle": (b"", "cannot be fetched"),
    "to_file": (b"", "cannot be fetched"),
}
PLACES = {"/moved.yaml": "/mine.yaml", "/circle.yaml": "/circle.yaml", "/to_file.yaml": "file:///etc/hostname"}


class _Handler(BaseHTTPRequestHandler):
    requests: list[dict[str, str]] = []  # noqa: RUF012 - of all instances

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.requests.append(dict(self.headers))
        self.send_response(302 if path in PLACES else 200)
        self.send_header("Location", PLACES.get(path, ""))
        self.end_headers()
        self.wfile.write(ANSWERS.get(Path(path).stem, (RECIPE.encode(), ""))[0])

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


def test_it_is_copied_with_its_origin_and_sends_nothing_of_the_user(call: Call, server: str, tmp_path: Path) -> None:
    for name in ("mine", "moved"):
        code, out, err = call("copy", f"{server}/{name}.yaml?token=secret#part")
        assert code == 0, err
        text = (tmp_path / "recipes" / f"{name}.yaml").read_text()
        assert text.replace(f"# copied from {server}/{name}.yaml by mlotool {__version__}\n", "") == RECIPE
        assert f"mlotool run recipes/{name}.yaml" in out
    assert set(_Handler.requests[0]) <= {"Host", "User-Agent", "Accept", "Accept-Encoding", "Connection"}
    assert _Handler.requests[0]["User-Agent"] == "mlotool"


def test_refused_and_nothing_written(call: Call, server: str, tmp_path: Path) -> None:
    for name, (_, words) in ANSWERS.items():
        code, _, err = call("copy", f"{server}/{name}.yaml")
        assert code == 2 and words in err, err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_other_urls(call: Call) -> None:
    for url in ("file:///etc/hostname", "http:///x.yaml", "http://user:password@127.0.0.1/x.yaml",
                "http://127.0.0.1:1/x.yaml", "http://127.0.0.1/\n.yaml", "http://user@[::1/x.yaml", "://"):  # fmt: skip
        code, _, err = call("copy", url, "mine.yaml")
        assert code == 2 and "expected" in err and "password" not in err


def test_never_over_another_file_or_through_a_link(call: Call, server: str, tmp_path: Path) -> None:
    outside, link = tmp_path / "outside.yaml", tmp_path / "recipes" / "mine.yaml"
    link.parent.mkdir()
    link.symlink_to(outside)
    (tmp_path / "kept.yaml").write_text("mine")
    for target in ("recipes", "kept.yaml"):
        code, _, err = call("copy", f"{server}/mine.yaml", target)
        assert code == 2 and "--force" in err
    assert link.is_symlink() and (tmp_path / "kept.yaml").read_text() == "mine"
    for target in ("recipes", "kept.yaml"):
        assert call("copy", f"{server}/mine.yaml", target, "--force")[0] == 0
    assert not outside.exists() and not link.is_symlink()
    assert "seed: 3" in (tmp_path / "kept.yaml").read_text()
    assert call("copy", "mwn", "some/where/other.yaml")[0] == 0 and call("copy", "mwn", "some/where/other.yaml")[0] == 2
