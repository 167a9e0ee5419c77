"""The table of docs/recipes.md, made of the headers of recipes/*.yaml.

python -m benchmarks.recipe_table          write it into docs/recipes.md
python -m benchmarks.recipe_table --check  say whether it is up to date; exit code 1 where it is not
"""

import argparse
import math
import re
import sys
from dataclasses import astuple, dataclass
from itertools import takewhile
from pathlib import Path

from mlotool.config.recipes import TASKS

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- recipes: python -m benchmarks.recipe_table -->", "<!-- /recipes -->"
_FIELD = re.compile(r"# (\w+): +(.*)")


def read_header(file: Path) -> dict[str, str]:
    """Return the fields of a recipe's header, each as one line, and its first line as `what`."""
    lines = list(takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines()))[1:]
    fields, name = {"what": lines[0].removeprefix("# ")}, ""
    for line in lines[1:]:
        match = _FIELD.fullmatch(line)
        if match:
            name = match[1]
            fields[name] = match[2]
        elif name and line.startswith("#   "):
            fields[name] += " " + line.removeprefix("#").strip()
        else:
            name = ""
    return fields


# The 95% point of Student's t for the difference of five pairs.
_STUDENT_T = 2.78
_NUMBER = r"(-?[\d.]+)(?: \+- ([\d.]+))?"
_SCORE = re.compile(
    rf"(?P<metric>.+) \((?P<direction>higher|lower) is better\): {_NUMBER}; (?P<baseline>.+): {_NUMBER}"
    rf"(?:; difference {_NUMBER})?"
)


@dataclass(frozen=True)
class Score:
    """A recipe's figure beside that of its baseline, from the line `# Score:` of its header.

    Args:
        metric: what is compared.
        ours: the recipe's figure, with its standard error.
        baseline: that of the baseline, with its name.
        difference: ours less the baseline's, with its standard error.
        verdict: better or worse where the difference is larger than chance (95%), else level.
    """

    metric: str
    ours: str
    baseline: str
    difference: str
    verdict: str

    @classmethod
    def read(cls, text: str) -> "Score":
        """Read what stands behind `# Score:`."""
        match = _SCORE.fullmatch(text)
        if match is None:
            form = "'<metric> (higher is better): 0.9 +- 0.1; <baseline>: 0.8 +- 0.1; difference 0.1 +- 0.1'"
            raise ValueError(f"found the score {text!r}; expected {form}")
        _, _, ours, our_error, _, other, other_error, difference, error = match.groups()
        gain = float(difference) if difference else float(ours) - float(other)
        spread = float(error) if difference else math.hypot(float(our_error), float(other_error))
        digits = max(len(number.partition(".")[2]) for number in (ours, other))
        is_level = abs(gain) <= _STUDENT_T * spread
        is_better = (gain > 0) == (match["direction"] == "higher")
        return cls(
            f"{match['metric']} {'↑' if match['direction'] == 'higher' else '↓'}",
            f"{ours} ± {our_error}",
            f"{other} ± {other_error} ({match['baseline']})",
            f"{gain:+.{digits}f} ± {spread:.{digits}f}",
            "level" if is_level else "**better**" if is_better else "worse",
        )


def figures(header: dict[str, str]) -> list[str]:
    """Return the cells of a measured recipe: metric, ours, baseline, difference, verdict, time, memory."""
    score = Score.read(header["Score"]) if "Score" in header else None
    cells = ["", "", "", "", ""] if score is None else list(astuple(score))
    for unit in (r"[\d.]+(?: to [\d.]+)? s\b", r"[\d.]+ GB"):
        found = re.search(unit, header["Time"])
        cells.append(found[0] if found else "")
    return cells


def table() -> str:
    """Return a table of the measured recipes of each task, then one of those that were not measured, in Markdown."""
    headers = {file.stem: read_header(file) for file in sorted((ROOT / "recipes").glob("*.yaml"))}
    lines: list[str] = []
    for task in TASKS:
        measured = {
            name: header
            for name, header in headers.items()
            if header["Task"] == task and not header["Result"].startswith("not measured")
        }
        lines += [f"## {task[0].upper()}{task[1:]}", "", *_table(_COLUMNS)]
        lines += [_row(f"[{name}](gallery/{name}.md)", *figures(header)) for name, header in measured.items()]
        lines.append("")
    lines += ["## Not measured", "", *_table(["recipe", "task", "what it does", "what it needs"])]
    for name, header in headers.items():
        if header["Result"].startswith("not measured"):
            need = re.match(r"not measured: it needs ([^.]+)\.", header["Result"])
            what = header["what"].rstrip(".")
            lines.append(_row(f"[{name}](gallery/{name}.md)", header["Task"], what, need[1] if need else ""))
    return "\n".join(lines)


_COLUMNS = ["recipe", "metric", "recipe's figure", "baseline", "difference", "verdict", "time", "memory"]


def _table(columns: list[str]) -> list[str]:
    return [_row(*columns), "|" + "---|" * len(columns)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    page = ROOT / "docs" / "recipes.md"
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if check:
        if wanted != text:
            print("docs/recipes.md: its table is not that of the headers. Run: python -m benchmarks.recipe_table")
        return int(wanted != text)
    page.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
