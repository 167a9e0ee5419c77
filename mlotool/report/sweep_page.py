"""One self-contained page of a sweep: sweep.html, and its figures as PNG files beside it."""

import shlex
from collections import Counter
from importlib.resources import files
from pathlib import Path

from mlotool.core.run_files import write_text
from mlotool.report.figure import Card, Sketchbook, report_style
from mlotool.report.formats import NONE, number
from mlotool.report.inherited_figure import inherited_cards
from mlotool.report.markup import Markup, details, element
from mlotool.report.model_nodes import read_models
from mlotool.report.model_picture import model_section
from mlotool.report.pareto import pareto_front
from mlotool.report.pareto_figure import front_cards
from mlotool.report.sweep import ENDED, INFEASIBLE
from mlotool.report.sweep_curves import curve_cards, objective_cards, read_curves
from mlotool.report.sweep_figures import importance_cards, parallel_cards
from mlotool.report.sweep_fusion import fusion_lines
from mlotool.report.sweep_settings import Comparison, Setting, compare, seeds
from mlotool.report.sweep_tables import SIGNS, front_table, jobs_table, settings_table
from mlotool.report.write import grid, page, section

FILE = "sweep.html"
PAGE = "report.html"
MAX_ERRORS = 50
MAX_LINES = 10
"""Overrides that stand in lines of their own; more of them are written one behind the other."""

# Selected by the very data that it is measured on, which a reader of the curves would not expect.
WHICH_VALUE = "The value of a job is that of its best checkpoint, or its last one where no best checkpoint is kept."


def write_sweep_page(sweep_dir: Path, comparison: Comparison | None = None) -> Path:
    """Write sweep.html and report/*.png from the folders of a sweep's jobs.

    Args:
        sweep_dir: the folder of a sweep, also of one that is still running.
        comparison: what `compare` has read from it, if it has.

    Returns:
        the page.

    Raises:
        ConfigError: `sweep_dir` is not the folder of a sweep, or its report/ is a link that leads out of it.
        WriteError: the disk does not take the page.
    """
    sweep_dir = Path(sweep_dir)
    comparison = comparison or compare(sweep_dir)
    title = f"{comparison.name}: sweep"
    parts = [_header(title, comparison)]
    book = Sketchbook(sweep_dir / "report")
    with report_style():
        curves = curve_cards(book, comparison, read_curves(comparison))
        own = [*objective_cards(book, comparison), *importance_cards(book, comparison)]
        parallel = parallel_cards(book, comparison)
        two = front_cards(book, comparison)
        inherited = inherited_cards(book, comparison)
    parts += _figures("Hyperparameters", parallel)
    parts += _figures("Objective", [*curves, *own, *two, *inherited])
    if two:
        parts.append(section("Pareto front", front_table(comparison, pareto_front(comparison))))
    parts += _best_model(comparison)
    if comparison.has_seeds and len(comparison.settings) > 1:
        parts.append(section("Settings", settings_table(comparison)))
    if comparison.rows:
        parts.append(
            section(
                "Jobs",
                jobs_table(comparison),
                *_on_demand(comparison),
                *_infeasible(comparison),
                *_constants(comparison),
            )
        )
    together = fusion_lines(sweep_dir)
    if together:
        parts.append(section("What ran as one program", element("ul", *(element("li", line) for line in together))))
    parts += _errors(comparison)
    script = files("mlotool.report").joinpath("sort_table.js").read_text(encoding="utf-8")
    text = page(title, parts, script, has_figures=bool(book.files))
    return write_text(sweep_dir, FILE, text)


def _best_model(comparison: Comparison) -> list[Markup]:
    """Show the model of the best job, where it has one of a space."""
    setting = comparison.best or comparison.only
    rows = () if setting is None else [row for row in setting.rows if row.status == "finished"]
    for row in rows:
        models, _ = read_models(row.folder)
        cards = [card for each in models for card in model_section(each)]
        if cards:
            return [section("Best model" if comparison.best else "Model", *cards)]
    return []


def _figures(title: str, cards: list[Card]) -> list[Markup]:
    return [section(title, grid(cards))] if cards else []


def _header(title: str, comparison: Comparison) -> Markup:
    class_, text = _state(comparison)
    sign = element("span", SIGNS.get(class_, "?"), aria_hidden="true")
    head = element("div", element("h1", title), element("span", sign, text, class_=f"badge {class_}"), class_="head")
    tiles = [_first_tile(comparison), *_best_tile(comparison), _count_tile(comparison)]
    parts = [head, element("dl", *tiles, class_="tiles")]
    chosen = comparison.best or comparison.only
    words = [] if chosen is None or chosen.mean is None else comparison.overrides(chosen)
    if words:
        lines = ("\n" if len(words) <= MAX_LINES else " ").join(words)
        whose = "The best setting's own" if comparison.best else "Its"
        parts.append(element("p", f"{whose} overrides; one click selects them.", class_="muted"))
        parts.append(element("pre", lines, class_="command"))
    if comparison.num_ended:
        parts.append(element("p", WHICH_VALUE, class_="muted"))
    parts += [element("p", note, class_="muted") for note in comparison.notes]
    return element("header", *parts)


def _state(comparison: Comparison) -> tuple[str, str]:
    """Return the badge's class and text."""
    counts = Counter(row.status for row in comparison.rows)
    num, ended = comparison.num_jobs, comparison.num_ended
    if counts["running"]:
        return "running", f"running: {ended} of {num} jobs have ended"
    if ended < num:
        return "interrupted", f"not finished: {ended} of {num} jobs have ended"
    return ("failed", f"{counts['failed']} of {num} failed") if counts["failed"] else ("finished", "finished")


def _first_tile(comparison: Comparison) -> Markup:
    direction = comparison.direction
    setting = comparison.best or comparison.only
    if setting is None or setting.mean is None:
        if not comparison.rows:
            return _tile(comparison.objective, NONE, "no job has begun yet", "tile first")
        return _tile(comparison.objective, NONE, f"no job has finished with a value yet; {direction}", "tile first")
    num, whose = len(comparison.ranked), "settings" if comparison.has_seeds else "jobs that finished"
    what = f"best of {num} {whose}, " if num > 1 else ""
    if not comparison.has_seeds:
        return _tile(f"{what}{comparison.objective}", number(setting.mean), direction, "tile first")
    below = f"mean{' ± standard error' if setting.standard_error is not None else ''} of {seeds(setting)}; {direction}"
    return _tile(f"{what}{comparison.objective}", mean_text(setting), below, "tile first")


def mean_text(setting: Setting) -> str:
    """Return a setting's mean with its standard error, to the digits that the error leaves.

    Example:
        >>> mean_text(Setting({}, (), (0.91, 0.93, 0.92), 3))
        '0.92 ± 0.0058'
    """
    error = setting.standard_error
    return number(setting.mean) if error is None else f"{number(setting.mean)} ± {error:.2g}"


def _best_tile(comparison: Comparison) -> list[Markup]:
    best = comparison.best
    if best is None:
        return []
    return [_tile("jobs of the best setting" if len(best.rows) > 1 else "best job", best.jobs, "")]


def _count_tile(comparison: Comparison) -> Markup:
    counts = Counter(row.status for row in comparison.rows)
    waiting = comparison.num_jobs - len(comparison.rows)
    if waiting:
        counts["not begun"] = waiting
    ended = f"{comparison.num_ended} of {comparison.num_jobs}"
    return _tile("jobs that have ended", ended, ", ".join(f"{count} {status}" for status, count in counts.items()))


def _tile(label: str, value: str, below: str, class_: str = "tile") -> Markup:
    small = [element("small", below)] if below else []
    return element("div", element("dt", label), element("dd", value, *small), class_=class_)


def _constants(comparison: Comparison) -> list[Markup]:
    if not comparison.constants:
        return []
    lines = "\n".join(f"{key}={value}" for key, value in comparison.constants.items())
    so_far = " so far" if comparison.num_ended < comparison.num_jobs else ""
    return [details(f"The same in all jobs{so_far}", element("pre", lines, class_="wrap"))]


def _on_demand(comparison: Comparison) -> list[Markup]:
    """Say how the page of a job is made that has none: jobs that share a process leave it to the reader."""
    ended = (row.folder for row in comparison.rows if row.status in ENDED)
    folder = next((each for each in ended if (each / "config.yaml").is_file() and not (each / PAGE).is_file()), None)
    if folder is None:
        return []
    text = "A job without a link has no page yet; this makes that of the first one:"
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    command = element("pre", f"mlotool report {shlex.quote(str(shown))}", class_="command")
    return [element("p", text, class_="muted"), command]


def _infeasible(comparison: Comparison) -> list[Markup]:
    """Say which draws make no model, which is no failure."""
    found = [row for row in comparison.rows if row.status == INFEASIBLE]
    if not found:
        return []
    lines = [element("li", element("b", f"job {row.job}: "), row.error) for row in found[:MAX_ERRORS]]
    more = [element("p", f"{len(found) - MAX_ERRORS} more are in sweep.csv.")] if len(found) > MAX_ERRORS else []
    one = len(found) == 1
    few = f"{len(found)} draw{' makes' if one else 's make'} no model, and {'was' if one else 'were'} not trained"
    return [details(few, element("ul", *lines, class_="muted"), *more)]


def _errors(comparison: Comparison) -> list[Markup]:
    failed = [row for row in comparison.rows if row.error and row.status != INFEASIBLE][:MAX_ERRORS]
    if not failed:
        return []
    cards = [
        element("div", element("h3", f"Job {row.job}"), element("pre", row.error, class_="wrap"), class_="card error")
        for row in failed
    ]
    return [section("Why jobs failed", *cards)]
