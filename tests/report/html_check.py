"""Whether a page is well-formed and loads nothing."""

from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

from mlotool.report import write_sweep_page

SCRIPT = files("mlotool.report").joinpath("sort_table.js").read_text(encoding="utf-8")
VOID = {"meta", "br", "hr", "img", "link", "input", "wbr"}


class Page(HTMLParser):
    """Collects what a test asks about, and every fault of nesting."""

    def __init__(self, file: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.faults: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.handlers: list[str] = []
        self._open: list[str] = []
        self._words: list[str] = []
        self.source = file.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        self.faults += [f"<{tag}> is not closed" for tag in self._open]
        self.text = " ".join(" ".join(self._words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1] != tag:
            self.faults.append(f"</{tag}> closes {self._open[-1:]}")
        else:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self._words.append(data)


def read_page(file: Path, script: str | None = None) -> Page:
    """Parse a page and assert what every page must hold to.

    Args:
        file: the page.
        script: the only script that it has, word for word; such a page links to those of its folders as well.
    """
    page = Page(file)
    assert page.faults == []
    local = () if script is None else ("./",)
    assert all(link.startswith(("#", "data:image/", *local)) for link in page.links), page.links
    assert not any("/../" in link or ":" in link for link in page.links if link.startswith("./")), page.links
    if script is None:
        assert "script" not in page.tags and "script-src" not in page.source
    else:
        assert page.tags.count("script") == 1
        digest = b64encode(sha256(page.source.partition("<script>")[2].partition("</script>")[0].encode()).digest())
        assert page.source.partition("<script>")[2].startswith(f"{script}</script>")
        assert page.source.count("script-src") == 1
        assert f"script-src &#39;sha256-{digest.decode()}&#39;" in page.source
    assert not page.handlers and "@import" not in page.source
    assert len(page.ids) == len(set(page.ids)), "two elements share an id"
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    return page


def read_sweep_page(folder: Path) -> Page:
    """Write the page of a sweep, and parse it."""
    return read_page(write_sweep_page(folder), SCRIPT)
