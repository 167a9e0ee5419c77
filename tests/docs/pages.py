"""Runs the code of a page of the documentation, block by block, as a reader would."""

import contextlib
import doctest
import importlib.util
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from mlotool.cli.arguments import read_request
from mlotool.cli.main import VERBS
from mlotool.cli.verbs.validate import sweep_faults
from mlotool.config import check, compose
from mlotool.config.composition import with_values
from mlotool.config.security.trusted import trusted_names
from tests.small_recipes import ELSEWHERE, RECIPES

Call = Callable[..., tuple[int, str, str]]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n(?P<code>.*?)^ *```$", re.M | re.S
)
OUTPUT = "output"
EXAMPLE = "example"
PRINTED = "# What is printed is compared.\n"
NEEDS = "needs "
DATE = "2026-01-31_12-00-00"
"""In a path of outputs/: the date of whichever run or sweep is the newest there."""
ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
QUIET, FAST = ("runner.progress_bar=false",), ("debug=fast", "logger=csv")
RANGE = (r"range\(0,\d+\)", "range(0,2)")
FEW = ((r"sweep\.num_trials=\d+", "sweep.num_trials=1"), RANGE, (r"sweep\.fuse=\w+", "sweep.fuse=1"))
ONE_RATE, ONE_SEED = (r"(\.lr=[^,(]+),.*", r"\1"), (r"^seed=(\d+,.*|range.*)", "seed=0")
"""Of several learning rates and seeds, where the page prints nothing of their jobs."""
SHORT = (
    (r"for _ in range\(\d+\)", "for _ in range(2)"),
    (r"\bticks=\d+", "ticks=6"),
    (r'"runner\.max_ticks=\d+"', '"runner.max_ticks=6", "logger=csv"'),
)
OF_A_RUN = re.compile(r" (?:resume|decisions|inherit)=(?:auto|outputs/(\w+)\S*)")
"""A word of a command line that names the folder of an earlier run or sweep."""
MAKE_TARGET = re.compile(r"^([a-z-]+):", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        language: `python`, `bash`, `yaml` or `text`.
        title: of a block that is a file, its path; `output` is what the block before prints, `example` is only shown;
            one that begins with `needs` says what a reader has and a test has not, such as a second GPU.
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


def rehearsed(mlotool: Call) -> Call:
    """Return the command line, where each run is a rehearsal."""

    def run(*words: str) -> tuple[int, str, str]:
        if words[0] == "run":
            words = (*_shorter(words, [ONE_RATE]), *(word for word in FAST if word not in words))
        return mlotool(*words)

    return run


@cache
def composed(recipe: str) -> DictConfig:
    """Return the config of a built-in recipe, as it stands."""
    return compose(recipe)


def quickly_validating(mlotool: Call) -> Call:
    """Return the command line, whose `validate` also takes `-m`, and composes little of built-in recipes again."""

    def run(*words: str) -> tuple[int, str, str]:
        if words[0] == "validate" and "-m" in words:
            trusted = [word for option, word in pairwise(words) if option == "--trust"]
            request = read_request([word for word in words[1:] if word not in ("-m", "--trust", *trusted)])
            faults = sweep_faults(request, trusted, machine=False)
            return 2 * bool(faults), "", "\n".join(faults)
        recipe, values = "".join(words[1:2]).removeprefix("+recipe="), words[2:]
        if words[0] == "validate" and recipe in RECIPES and all("=" in word for word in values):
            if not values:
                # Another test runs each recipe as it stands.
                return 0, "", ""
            if (config := with_values(composed(recipe), values)) is not None:
                check(config)
                return 0, "", ""
        return mlotool(*words)

    return run


def run_page(path: Path, mlotool: Call, *, is_rehearsal: bool = False, goes_on: bool = True) -> int:
    """Run every block of a page in the working folder, and return how many there were.

    In a rehearsal all trainings take a few ticks, and what is printed is compared with nothing. Where a page does not
    go on with its runs, words that name the folder of one are left out; the page must have a command that makes it.

    - A block with a title is written to that file; one of recipes/ is compared with that recipe. In the end the modules
      that were written are imported, and the recipes validated that no command has read.
    - Lines of a bash block that begin with `mlotool` are given to the command line in this process. Sweeps, and runs of
      known recipes, are validated only, unless the rest of the page reads their folder; all others take seconds. Of
      benchmarks and `make` options and targets are looked up; other lines are given to a shell.
    - What stands in a block whose title begins with `needs` is validated; Python runs where its packages are installed.
    - Text with the title `output` is what the block before has printed; `...` stands for anything. YAML without a title
      is part of a recipe.
    """
    mlotool = quickly_validating(rehearsed(mlotool) if is_rehearsal else mlotool)
    names: dict[str, Any] = {"__name__": "__page__"}
    text = path.read_text(encoding="utf-8")
    if not goes_on:
        folders, text = OF_A_RUN.findall(text), OF_A_RUN.sub("", text)
        unmade = [name for name in folders if not re.search(rf"^mlotool run .*\b{name}\b", text, re.M)]
        assert not unmade, f"{path.name}: no command makes outputs/{unmade}"
    printed, found, were_run = "", list(blocks(text)), set[str]()
    unread = set[str]()
    for number, block in enumerate(found):
        place = f"{path.name}, line {block.line}"
        title = block.title or ""
        if title == OUTPUT:
            wanted, found_text = (
                "\n".join(line.rstrip() for line in text.splitlines()) for text in (block.code, printed)
            )
            same = doctest.OutputChecker().check_output(f"{wanted}\n", f"{found_text}\n", doctest.ELLIPSIS)
            assert same or is_rehearsal, f"{place}: printed {printed!r}, expected {block.code!r}"
        elif title.startswith("recipes/"):
            lines = iter((ROOT / title).read_text(encoding="utf-8").splitlines())
            # Each search goes on behind the line that was found: lines are in the order of the recipe.
            missing = [line for line in block.code.splitlines() if line not in lines]
            assert not missing, f"{place}: {title} has no lines {missing}, or not in this order"
        elif title == EXAMPLE:
            assert block.language == "text", f"{place}: {block.language} that is only shown"
        elif title and not title.startswith(NEEDS):
            assert block.language != "bash", f"{place}: commands with the title of a file, which nothing runs"
            Path(title).parent.mkdir(parents=True, exist_ok=True)
            Path(title).write_text(block.code, encoding="utf-8")
            unread.add(title)
            were_run.discard(title)
        elif block.language == "python" and title and not _is_installed(block.code):
            compile(block.code, str(path), "exec")
        elif block.language == "python":
            stream, [code] = io.StringIO(), _shorter([block.code], SHORT if is_rehearsal else ())
            with contextlib.redirect_stdout(stream):
                exec(compile("\n" * block.line + code, str(path), "exec"), names)
            printed = stream.getvalue()
        elif block.language == "bash":
            lines_of, printed = block.code.replace("\\\n", " ").splitlines(), ""
            for position, line in enumerate(lines_of):
                if title.startswith(NEEDS):
                    printed += _validate(line, f"{place}: {line}", mlotool)
                    continue
                blocks_after = (one.code for one in found[number + 1 :] if not (one.title or "").startswith(NEEDS))
                later = "\n".join([*lines_of[position + 1 :], *blocks_after])
                if found[number + 1 : number + 2] and found[number + 1].title == OUTPUT:
                    later = f"{PRINTED}{later}"
                printed += _run(line, f"{place}: {line}", mlotool, later, were_run)
                if line.startswith(("mlotool run ", "mlotool validate ")):
                    unread -= set(shlex.split(line, comments=True))
        elif block.language == "yaml":
            unknown = _targets(yaml.safe_load(block.code)) - set(trusted_names())
            assert not [name for name in unknown if name.startswith(("mlotool.", "torch."))], f"{place}: {unknown}"
        else:
            raise AssertionError(f"{place}: {block.language} without a title")
    _check_files([Path(title) for title in sorted(unread)], mlotool)
    return len(found)


def _check_files(files: Sequence[Path], mlotool: Call) -> None:
    """Import modules that a page has written, and validate recipes."""
    here = [path.parent.name for path in Path().glob("*/__init__.py")]
    # A copy of what is imported from elsewhere is looked at by its own test.
    packages = sorted(
        name for name in here if str(Path.cwd()) in str(getattr(sys.modules.get(name), "__file__", Path.cwd()))
    )
    trusting = [word for package in packages for word in ("--trust", package)]
    for file in files:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".py" and (len(file.parts) == 1 or file.parts[0] in packages):
            importlib.import_module(".".join(file.with_suffix("").parts))
        elif file.suffix == ".yaml" and text.startswith("# @package _global_"):
            code, _, err = mlotool("validate", str(file), *trusting)
            assert code == 0, f"{file}: {err}"


def _targets(node: Any) -> set[str]:
    if isinstance(node, list):
        return {name for each in node for name in _targets(each)}
    if not isinstance(node, dict):
        return set()
    own = {node["_target_"]} if isinstance(node.get("_target_"), str) else set()
    return own | {name for each in node.values() for name in _targets(each)}


def _is_installed(code: str) -> bool:
    imported = re.findall(r"^(?:from|import) (\w+)", code, re.M)
    return all(importlib.util.find_spec(name) is not None for name in imported)


def _run(line: str, place: str, mlotool: Call, later: str, were_run: set[str]) -> str:
    """Run a line of a bash block, and return what it prints; `later` is the code of the page from there on."""
    words = shlex.split(_dated(line), comments=True)
    if not words or words[0] in (".", "cd"):
        return ""
    if words[0] == "make":
        targets = MAKE_TARGET.findall((ROOT / "Makefile").read_text())
        assert words[1] in targets, place
        return ""
    if words[:3] == ["git", "worktree", "add"] or words[0] == ".ci/run":
        return ""
    if words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        unknown = {word for word in words if word.startswith("--")} - _options(words[2])
        assert not unknown, f"{place}: no options {sorted(unknown)}"
        return ""
    if words[0] != "mlotool":
        done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{place}: {done.stdout}{done.stderr}"
        return done.stdout
    code, out, err = mlotool(*_quick(words[1:], later, were_run))
    assert code == 0, f"{place}: {err}"
    return out


def _validate(line: str, place: str, mlotool: Call) -> str:
    words = shlex.split(line, comments=True)
    if "mlotool" in words and "run" in words:
        code, _, err = mlotool(*_validating(words[words.index("run") + 1 :]))
        assert code == 0, f"{place}: {err}"
    elif "mlotool" in words:
        assert words[words.index("mlotool") + 1] in VERBS or "pip" in words, place
    for extra in re.findall(r"mlotool\[(\w+)\]|PATH\[(\w+)\]", line):
        assert any(f"\n{name} = [" in (ROOT / "pyproject.toml").read_text() for name in extra if name), place
    return ""


def _validating(words: Sequence[str]) -> list[str]:
    """Return the words that validate what `mlotool run` with some words would run."""
    return ["validate", *_shorter([word for word in words if not word.startswith("resume=")], [RANGE])]


def _shorter(texts: Sequence[str], replaced: Sequence[tuple[str, str]]) -> list[str]:
    """Return texts in which what matches a pattern is replaced."""
    found = list(texts)
    for long, short in replaced:
        found = [re.sub(long, short, text) for text in found]
    return found


def _quick(words: Sequence[str], later: str, were_run: set[str]) -> list[str]:
    """Return the words of a command, so that it takes seconds."""
    if words[0] == "check":
        return _validating([word for word in words[1:] if word != "--ticks" and not word.isdigit()])
    if words[0] == "show" and "--nodes" in words and not words[1].endswith(".yaml") and not later.startswith(PRINTED):
        # All models of a large space are counted.
        return _validating([words[1], *words[words.index("--nodes") + 2 :]])
    if words[0] == "copy":
        # Of a recipe that another test runs.
        were_run |= {words[2], Path(words[2]).stem}
    if words[0] != "run":
        return list(words)
    recipe = next((word.removeprefix("+recipe=") for word in words[1:] if _is_recipe(word)), "")
    is_built_in = not recipe.endswith(".yaml") and not Path("recipes", f"{recipe}.yaml").exists()
    is_known = is_built_in or recipe in were_run or recipe.startswith("outputs/")
    values = dict(word.partition("=")[::2] for word in words)
    default = f"outputs/{values.get('name', Path(recipe).stem)}{'/multirun' if '-m' in words else ''}"
    folder = values.get("hydra.run.dir", values.get("hydra.sweep.dir", default))
    is_read = later.startswith(PRINTED) or "resume" in values
    is_read = is_read or (folder not in were_run and _is_read(folder, recipe, later))
    if not is_read and (is_known or "-m" in words):
        return _validating(words[1:])
    were_run |= {recipe, folder}
    few = _shorter(words, FEW if later.startswith(PRINTED) or "print(" in later else (*FEW, ONE_RATE, ONE_SEED))
    is_short = is_built_in or recipe == "mine.yaml" or "-m" in words or not is_read
    page = () if is_read and "report.html" in later else ("runner.report=false",)
    return [*few, *page, *QUIET, *(FAST if is_short else ()), *(ELSEWHERE.get(recipe, ()) if is_built_in else ())]


def _is_read(folder: str, recipe: str, later: str) -> bool:
    """Say whether later lines name a folder of runs, not that of their sweeps, or go on with it."""
    resumes = rf"^mlotool run .*{re.escape(recipe)}\b.*resume="
    return re.search(rf"{re.escape(folder)}(?!/multirun)|{resumes}", later, re.M) is not None


def _is_recipe(word: str) -> bool:
    """Say whether a word of a command line names a recipe."""
    return word.startswith("+recipe=") or ("=" not in word and not word.startswith("-"))


def _dated(line: str) -> str:
    """Return a line with the newest run, or sweep, in the place of a date that stands for it."""

    def newest(found: re.Match[str]) -> str:
        folders = sorted(Path(found[1]).glob("20*"), key=lambda folder: folder.stat().st_mtime)
        assert folders, f"{found[0]}: there is no run in {found[1]}"
        return str(folders[-1])

    return re.sub(rf"(outputs/[\w/]+)/{DATE}", newest, line)


def _options(module: str) -> set[str]:
    """Return the options of a benchmark, by its source: a benchmark takes minutes, and changes torch's settings."""
    place = ROOT.joinpath(*module.split("."))
    files = [*place.glob("*.py")] if place.is_dir() else [place.with_suffix(".py")]
    return set(re.findall(r'"(--[\w-]+)"', "".join(file.read_text(encoding="utf-8") for file in files)))
