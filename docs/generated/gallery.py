"""A page a recipe: its header, its graph, a committed run, its text; and an index with a picture of each, by task."""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import mlotool
from benchmarks.recipe_table import read_header
from mlotool.config.recipes import TASKS
from mlotool.report.graph_picture import graph_picture
from mlotool.report.palette import THEME, problem_colours

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
RUNS = ROOT / "docs" / "runs"
_ARXIV = re.compile(r"arXiv[: ]+(\d{4}\.\d{4,5})")
_FIELDS = ("Task", "Result", "Baseline", "Time")


def pages() -> Iterator[tuple[str, str]]:
    """Yield the address of each page, and the page in Markdown."""
    yield "gallery/index.md", index()
    for recipe in RECIPES:
        yield f"gallery/{recipe.stem}.md", page(recipe)


def index() -> str:
    """Return the page of all recipes, by task."""
    lines = [
        "# Recipes",
        "",
        "Each recipe is one file, which trains by one command. A table with all results side by side is in",
        "[all results](../recipes.md).",
    ]
    for task in TASKS:
        recipes = [recipe for recipe in RECIPES if read_header(recipe)["Task"].strip() == task]
        if not recipes:
            continue
        lines += ["", f"## {task[0].upper()}{task[1:]}", "", '<div class="grid cards" markdown>', ""]
        for recipe in recipes:
            run = committed(recipe.stem)
            picture = f"    [![]({_picture(recipe.stem, run)})]({recipe.stem}.md)\n\n" if run and run["figures"] else ""
            lines += [
                f"-   **[{recipe.stem}]({recipe.stem}.md)**",
                "",
                f"{picture}    {read_header(recipe)['what']}",
                "",
            ]
        lines += ["</div>"]
    return "\n".join(lines) + "\n"


def page(recipe: Path) -> str:
    """Return the page of a recipe."""
    header, text, name = read_header(recipe), recipe.read_text(encoding="utf-8"), recipe.stem
    lines = [f"# {name}", "", header["what"], "", "```bash", f"mlotool run +recipe={name}", "```", ""]
    papers = list(dict.fromkeys(_ARXIV.findall(text)))
    if papers:
        links = ", ".join(f"[arXiv {paper}](https://arxiv.org/abs/{paper})" for paper in papers)
        lines += [f"{'Papers' if len(papers) > 1 else 'Paper'}: {links}", ""]
    lines += [f"**{field}.** {_cell(header[field])}\n" for field in _FIELDS if header.get(field)]
    picture = graph(name)
    if picture:
        lines += ["", "## Problems", "", f'<div class="graph">{picture}</div>', ""]
        lines += ["Solid: its parameters shape the problem below. Dashed: its solution is read above, with the"]
        lines += ["hypergradient on its tab."]
    lines += ["", *_run(name), "", "## The recipe", "", f'```yaml title="recipes/{name}.yaml"', text.strip(), "```"]
    return "\n".join(lines) + "\n"


def graph(name: str) -> str | None:
    """Return the picture of a recipe's problems, as SVG."""
    config: Any = OmegaConf.to_container(mlotool.compose(name), resolve=True)
    picture = graph_picture(config, problem_colours(config["problems"]))
    return None if picture is None else str(picture)


def committed(name: str) -> dict[str, Any] | None:
    """Return what is kept of a recipe's run, if there is one."""
    path = RUNS / name / "run.json"
    return json.loads(path.read_text()) if path.exists() else None


def style() -> str:
    """Return the colours and letters of the pictures, for light and dark pages, as CSS."""
    page = (Path(mlotool.__file__).parent / "report" / "page.css").read_text()
    letters = "\n".join(line for line in page.splitlines() if line.startswith(".graph"))
    light, dark = (" ".join(f"--{name}: {pair[mode]};" for name, pair in THEME.items()) for mode in (0, 1))
    return f".graph {{ {light} }}\n[data-md-color-scheme=slate] .graph {{ {dark} }}\n{letters}\n"


def _run(name: str) -> list[str]:
    run = committed(name)
    if run is None:
        return ["## A run", "", "None is kept here: it takes long, or data or a GPU that not everybody has."]
    made = (
        f"`{run['command']}`, seed {run['seed']}, {run['seconds']} s, torch {run['versions']['torch']}, {run['date']}."
    )
    problems = mlotool.compose(name).problems
    metrics = {
        key: value
        for key, value in run["metrics"].items()
        if isinstance(value, int | float) and key.partition("/")[0] not in problems
    }
    lines = ["## A run", "", made, "", "| last value of | |", "|---|---|"]
    lines += [f"| `{key}` | {value:.4g} |" for key, value in metrics.items()]
    for figure in run["figures"]:
        lines += ["", f"![{Path(figure).stem.replace('-', ', ')}](../runs/{name}/{figure}){{ width=560 }}"]
    return lines


def _picture(name: str, run: dict[str, Any]) -> str:
    return f"../runs/{name}/{run['figures'][0]}"


def _cell(text: str) -> str:
    return html.escape(text.replace("+-", "±").replace("|", "/"), quote=False)
