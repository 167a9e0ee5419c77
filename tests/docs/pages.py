"""Runs the code of a page of the documentation, block by block, as a reader would."""

import contextlib
import doctest
import io
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^ *```", re.M | re.S
)
OUTPUT = "output"
ROOT = Path(__file__).parents[2]
FAST = ("debug=fast", "logger=csv", "runner.progress_bar=false")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        language: `python`, `bash`, `yaml` or `text`.
        title: of a block that is a file, its path; `output` is what the block before prints.
        code: the text.
        line: where it begins in its page, from 1.
    """

    language: str
    title: str | None
    code: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page, in their order."""
    for found in FENCE.finditer(text):
        indent = len(found["indent"])
        code = "".join(line[indent:] for line in found["code"].splitlines(keepends=True))
        yield Block(found["language"], found["title"], code, text[: found.start()].count("\n") + 1)


def run_page(path: Path, mlotool: Callable[..., tuple[int, str, str]]) -> int:
    """Run every block of a page in the working folder, and return how many there were.

    A block with a title is written to that file; one of recipes/ has lines of that recipe, and is compared with it.
    Runs of built-in recipes are rehearsals of seconds (`debug=fast`). Python blocks share their names. Lines of a bash
    block that begin with `mlotool` are given to the command line in this process, all others to a shell. A text block
    with the title `output` is compared with what the block before has printed; `...` stands for anything.
    """
    names: dict[str, Any] = {"__name__": "__page__"}
    printed, found = "", list(blocks(path.read_text(encoding="utf-8")))
    for block in found:
        place = f"{path.name}, line {block.line}"
        if block.title == OUTPUT:
            same = doctest.OutputChecker().check_output(block.code, printed, doctest.ELLIPSIS)
            assert same, f"{place}: printed {printed!r}, expected {block.code!r}"
        elif block.title is not None and block.title.startswith("recipes/"):
            lines = {line.strip() for line in (ROOT / block.title).read_text(encoding="utf-8").splitlines()}
            missing = [line for line in block.code.splitlines() if line.strip() not in lines]
            assert not missing, f"{place}: {block.title} has no lines {missing}"
        elif block.title is not None:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.code, encoding="utf-8")
        elif block.language == "python":
            stream = io.StringIO()
            with contextlib.redirect_stdout(stream):
                exec(compile("\n" * block.line + block.code, str(path), "exec"), names)
            printed = stream.getvalue()
        elif block.language == "bash":
            printed = "".join(_command(line, place, mlotool) for line in block.code.splitlines())
        else:
            assert block.language in ("text", "yaml"), f"{place}: {block.language}"
    return len(found)


def _command(line: str, place: str, mlotool: Callable[..., tuple[int, str, str]]) -> str:
    words = shlex.split(line, comments=True)
    if not words:
        return ""
    if words[0] == "mlotool":
        is_built_in = words[1] == "run" and any(word.startswith(("+recipe=", "mine.yaml")) for word in words)
        code, out, err = mlotool(*words[1:], *(FAST if is_built_in else ()))
        assert code == 0, f"{place}: {line}: {err}"
        return out
    return subprocess.run(line, shell=True, check=True, capture_output=True, text=True).stdout
