"""A page a recipe: its header, its graph, a committed run, its text; and an index with a picture of each, by task."""

import html
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from PIL import Image

import mlotool
from benchmarks.recipe_table import read_header
from mlotool.config.recipes import TASKS
from mlotool.folders.run_folder import RunFolder
from mlotool.report.figure import THEME, problem_colours
from mlotool.report.graph import model_section, problem_graph
from mlotool.report.models import read_models, read_paths, shares

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
        "[all results](../recipes.md). The runs that are shown were made on a CPU that had other work as well: their",
        "times are upper bounds.",
    ]
    for task in TASKS:
        recipes = [recipe for recipe in RECIPES if read_header(recipe)["Task"].strip() == task]
        if not recipes:
            continue
        lines += ["", f"## {task[0].upper()}{task[1:]}", "", '<div class="grid cards" markdown>', ""]
        for recipe in recipes:
            thumbnail = _thumbnail(recipe.stem)
            picture = (
                f"    [![A picture of a run of {recipe.stem}]({thumbnail})]({recipe.stem}.md)\n\n" if thumbnail else ""
            )
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
    lines = [f"# {name}", "", header["what"], "", "```bash", f"mlotool run {name}"]
    if committed(f"{name}/search"):
        lines += [f"mlotool run -m {name}      # searches"]
    lines += ["```", ""]
    papers = list(dict.fromkeys(_ARXIV.findall(text)))
    if papers:
        links = ", ".join(f"[arXiv {paper}](https://arxiv.org/abs/{paper})" for paper in papers)
        lines += [f"{'Papers' if len(papers) > 1 else 'Paper'}: {links}", ""]
    lines += [f"**{field}.** {_cell(header[field])}\n" for field in _FIELDS if header.get(field)]
    picture = graph(name)
    if picture:
        lines += ["", "## Problems", "", f'<div class="graph">{picture}</div>', ""]
        lines += ["Solid: its parameters change the training of the problem below. Dashed: its trained parameters are"]
        lines += ["used above; its last line names the hypergradient method."]
    lines += ["", *_run(name), "", "## The recipe", "", f'```yaml title="recipes/{name}.yaml"', text.strip(), "```"]
    return "\n".join(lines) + "\n"


def graph(name: str) -> str | None:
    """Return the picture of a recipe's problems, as SVG."""
    config: Any = OmegaConf.to_container(_composed(name), resolve=True)
    picture = problem_graph(config, problem_colours(config["problems"]))
    return None if picture is None else str(picture)


@cache
def _composed(name: str) -> DictConfig:
    return mlotool.compose(name)


def committed(name: str) -> dict[str, Any] | None:
    """Return what is kept of a recipe's run, or of its search (`explore_mnasnet/search`), if there is one."""
    path = RUNS / name / "run.json"
    return json.loads(path.read_text()) if path.exists() else None


def style() -> str:
    """Return the colours and letters of the pictures, for light and dark pages, as CSS."""
    page = (Path(mlotool.__file__).parent / "report" / "page.css").read_text()
    letters = "\n".join(line for line in page.splitlines() if line.startswith((".graph", ".node", ".key")))
    light, dark = (" ".join(f"--{name}: {pair[mode]};" for name, pair in THEME.items()) for mode in (0, 1))
    return f".graph {{ {light} }}\n[data-md-color-scheme=slate] .graph {{ {dark} }}\n{letters}\n"


def _run(name: str) -> list[str]:
    run, search = committed(name), committed(f"{name}/search")
    if run is None and search is None:
        return ["## A run", "", "None is kept here: it takes long, or data or a GPU that not everybody has."]
    lines = []
    if search is not None:
        best, statuses = search["best"], ", ".join(f"{count} {status}" for status, count in search["jobs"].items())
        lines += ["## A search", "", _how(search), "", f"Jobs: {statuses}; sampler `{search['sampler']}`.", ""]
        lines += ["| of the best job | |", "|---|---|", f"| `{search['objective']}` | {best['value']:.4g} |"]
        lines += [f"| `{key}` | {value:.4g} |" for key, value in search["test"].items()]
        lines += [
            *_figures(f"{name}/search", search),
            *_models(f"{name}/search", "The best model: its graph and its decisions"),
        ]
    if run is not None:
        problems = _composed(name).problems
        metrics = {
            key: value
            for key, value in run["metrics"].items()
            if isinstance(value, int | float) and key.partition("/")[0] not in problems
        }
        lines += ["", "## A run" if search is None else "## A run with the first candidates", "", _how(run), ""]
        at_best = _at_best(name)
        lines += ["| value | | taken at |", "|---|---|---|"]
        lines += [
            f"| `{key}` | {value:.4g} | {'best checkpoint' if key.partition('/')[0] in at_best else 'last tick'} |"
            for key, value in metrics.items()
        ]
        lines += [*_figures(name, run), *_models(name, "The model: its graph and its decisions")]
    return lines


def _at_best(name: str) -> set[str]:
    """Return the splits and analyses that a run evaluates at its end, with the best checkpoint, where it keeps one."""
    config = _composed(name)
    splits = {} if config.evaluate is None else dict(config.evaluate.splits)
    source = str(config.objective).partition("/")[0]
    has_best = isinstance(splits.get(source), int) or source in config.problems
    return {*(split for split, every in splits.items() if every == "end"), *config.analyses} if has_best else set()


def _how(made: dict[str, Any]) -> str:
    seconds, torch = f"{made['seconds']:.0f} s", made["versions"]["torch"]
    return f"`{made['command']}`, seed {made['seed']}, {seconds}, torch {torch}, {made['date']}."


def _figures(folder: str, made: dict[str, Any]) -> list[str]:
    lines = []
    for figure in made["figures"]:
        is_wide = _is_wide(RUNS / folder / figure)
        text, width = Path(figure).stem.replace("-", ", "), 860 if is_wide else 560
        lines += ["", f"![{text}](../runs/{folder}/{figure}){{ width={width} }}"]
    return lines


def _is_wide(figure: Path) -> bool:
    if figure.suffix == ".svg":
        width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', figure.read_text(encoding="utf-8"))[0]
        return float(width) > 2 * float(height)
    with Image.open(figure) as picture:
        return picture.width > 2 * picture.height


def _models(folder: str, title: str) -> list[str]:
    """Return the graphs of the models of spaces, with what was decided."""
    records, _ = read_models(RunFolder(RUNS / folder))
    paths, _ = read_paths(RunFolder(RUNS / folder))
    cards = [model_section(each, shares(paths.get(each.problem, {}))) for each in records]
    graph = f'<div class="graph">{"".join(cards)}</div>'
    return ["", f"<details markdown><summary>{title}</summary>", "", graph, "", "</details>"] if cards else []


def _thumbnail(name: str) -> str | None:
    for folder in (f"{name}/search", name):
        made = committed(folder)
        if made and made["figures"]:
            return f"../runs/{folder}/{made['figures'][0]}"
    return None


def _cell(text: str) -> str:
    return html.escape(text.replace("+-", "±").replace("|", "/"), quote=False)
