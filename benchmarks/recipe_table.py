"""The table of docs/recipes.md, made of the headers of recipes/*.yaml.

python -m benchmarks.recipe_table          write it into docs/recipes.md
python -m benchmarks.recipe_table --check  say whether it is up to date; exit code 1 where it is not
"""

import argparse
import re
import sys
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- recipes: python -m benchmarks.recipe_table -->", "<!-- /recipes -->"
_FIELD = re.compile(r"# (\w+): +(.*)")
_HOW = re.compile(r"\s*Means\s+and\s+standard\s+errors.*", re.DOTALL)


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


def table() -> str:
    """Return the table in Markdown, the measured recipes first."""
    rows, unmeasured = [], []
    for file in sorted((ROOT / "recipes").glob("*.yaml")):
        header = read_header(file)
        result, baseline = (_HOW.sub("", header.get(name, "")).strip() for name in ("Result", "Baseline"))
        cells = [f"`{file.stem}`", header["Task"], header["what"], result, baseline, header["Time"]]
        row = f"| {' | '.join(cell.replace('+-', '±').replace('|', '/') for cell in cells)} |"
        (unmeasured if result.startswith("not measured") else rows).append(row)
    return "\n".join(
        ["| recipe | task | what | result | baseline | time |", "|---|---|---|---|---|---|", *rows, *unmeasured]
    )


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
