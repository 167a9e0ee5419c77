"""One self-contained page of a run: report.html, and its figures as PNG files beside it."""

import warnings
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from mlotool.core.run_files import write_text
from mlotool.report.curves import Best, constant_rates, evaluation_cards, training_cards
from mlotool.report.figure import Card, Sketchbook, report_style
from mlotool.report.graph_picture import graph_picture
from mlotool.report.learned_figures import learned_cards, split_learned
from mlotool.report.markup import Markup, element, join
from mlotool.report.model_nodes import read_models
from mlotool.report.model_picture import model_section
from mlotool.report.palette import css_variables, problem_colours
from mlotool.report.parallel_figures import (
    speedup_card,
    split_series,
    timeline_card,
    violation_cards,
)
from mlotool.report.parallel_records import read_timelines
from mlotool.report.residuals import residual_cards
from mlotool.report.run_folder import RunFolder, as_dict, read_run_folder, refuse_foreign
from mlotool.report.sections import final_table, header, metric_notes, origin
from mlotool.report.series import SPLIT_NAMES, Series, problem_names, read_series
from mlotool.report.shared_paths import paths_card, read_paths, shares
from mlotool.report.weights import read_weightings, weighting_cards

# A recipe is anybody's text: should any of it ever reach the page as markup, the browser still loads and runs nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
MAX_SERIES, MAX_METRICS = 100, 25


def write_report(run_dir: Path) -> Path:
    """Write report.html and report/*.png from what the run folder holds.

    Args:
        run_dir: the folder of a finished, failed or interrupted run; missing files leave their section out.

    Returns:
        the page.

    Raises:
        ConfigError: `run_dir` is not the folder of a run, or its report/ is a link that leads out of it.
        WriteError: the disk does not take the page.

    Example:
        >>> from mlotool.report import write_report
        >>> write_report(Path("outputs/mwn/2025-01-31_10-00-00"))  # doctest: +SKIP
        PosixPath('outputs/mwn/2025-01-31_10-00-00/report.html')
    """
    refuse_foreign(Path(run_dir))
    run = read_run_folder(Path(run_dir))
    if run.is_wrong_way_round:
        warnings.warn(f"{run.path}: {run.wrong_way_note}", stacklevel=2)
    book = Sketchbook(run.path / "report")
    with report_style():
        body = _body(run, book)
    return write_text(run.path, "report.html", page(run.name, body))


def _body(run: RunFolder, book: Sketchbook) -> list[Markup]:
    series, notes = read_series(run.path)
    weightings, more = read_weightings(run.path)
    models, unread = read_models(run.path)
    shared, unread_paths = read_paths(run.path)
    run.notes += [*more, *notes, *unread, *unread_paths]
    parallel_series, series = split_series(series)
    values, series = split_learned(series)
    if len(series) > MAX_SERIES:
        run.notes.append(f"metrics.csv has {len(series)} keys; only the first {MAX_SERIES} are drawn.")
        series = series[:MAX_SERIES]
    metrics = list(dict.fromkeys(each.metric for each in series))
    if len(metrics) > MAX_METRICS:
        # A figure each.
        run.notes.append(f"metrics.csv has {len(metrics)} metrics; only the first {MAX_METRICS} are drawn.")
        series = [each for each in series if each.metric in metrics[:MAX_METRICS]]
    splits = _splits(run, series)
    colours = problem_colours(problem_names(run.problems, series, splits))
    objective = run.objective
    value = objective.get("value")
    best = Best(run.best_tick, str(objective.get("key")), value if isinstance(value, int | float) else None)
    evaluated = colours.get(str(as_dict(run.config.get("evaluate")).get("problem")), "ink")
    curves = [*evaluation_cards(book, series, splits, evaluated, best), *training_cards(book, series, colours)]
    rates = constant_rates(series, colours)
    learned = learned_cards(book, values[:MAX_SERIES], colours)
    weighting = [
        card
        for weighting in weightings
        for card in weighting_cards(book, weighting, run.metrics, _weigher(run, weighting.name, colours))
    ]
    parallel = _parallel(run, book, [each for each in parallel_series if each.owner in colours])
    parts = [header(run), *_graph(run, colours), section("Curves", *_curves(curves, rates))]
    parts += [section("Model", *model_section(each, shares(shared.get(each.problem, {})))) for each in models]
    if shared:
        cards = [paths_card(name, each) for name, each in shared.items()]
        parts.append(section("Paths of the shared weights", *cards))
    if parallel:
        parts.append(section("Layer-parallel training", grid(parallel)))
    if learned:
        parts.append(section("What the upper problems learned", grid(learned)))
    if weighting:
        parts.append(section("What the weighting learned", *_at_its_start(run), grid(weighting)))
    parts.append(section("Final metrics", final_table(run, colours), *metric_notes(run)))
    parts.append(section("How to get this again", origin(run)))
    return parts


def _at_its_start(run: RunFolder) -> list[Markup]:
    """Say which problems had made no step at the checkpoint that is analysed, as in a warm-up of others."""
    is_best = run.best_tick is not None
    steps = run.best_metrics if is_best else run.metrics
    idle = [name for name in run.problems if steps.get(f"{name}/step") == 0]
    when = f"at the best checkpoint (tick {run.best_tick})" if is_best else "in this run"
    text = f"No step had been made {when} by {', '.join(idle)}: what is drawn is how it began."
    return [element("p", text, class_="muted")] if idle else []


def _parallel(run: RunFolder, book: Sketchbook, series: Sequence[Series]) -> list[Card]:
    timelines, notes = read_timelines(run.path)
    run.notes += notes
    wide = [timeline_card(book, timeline) for timeline in timelines]
    narrow = [speedup_card(book, timeline) for timeline in timelines if timeline.num_stages > 1]
    return [*wide, *narrow, *violation_cards(book, series), *residual_cards(book, series)]


def _splits(run: RunFolder, series: Sequence[Series]) -> list[str]:
    """Return the evaluated splits: the recipe's first, then usual names that were logged as well."""
    chosen = [str(name) for name in as_dict(as_dict(run.config.get("evaluate")).get("splits"))]
    logged = [each.owner for each in series if each.owner in SPLIT_NAMES]
    return [name for name in dict.fromkeys((*chosen, *logged)) if name not in run.problems]


def _weigher(run: RunFolder, analysis: str, colours: Mapping[str, str]) -> str:
    roles: Mapping[str, Any] = as_dict(as_dict(as_dict(run.config.get("analyses")).get(analysis)).get("roles"))
    return colours.get(str(roles.get("weigher")), "ink")


def _graph(run: RunFolder, colours: Mapping[str, str]) -> list[Markup]:
    picture = graph_picture(run.config, colours)
    if picture is None:
        return []
    key = []
    if as_dict(run.config.get("graph")).get("upper_to_lower"):
        key.append(element("span", element("i"), "its parameters shape the problem below"))
    if as_dict(run.config.get("graph")).get("lower_to_upper"):
        text = "its solution is read above, with the hypergradient on its tab"
        key.append(element("span", element("i", class_="dashed"), text))
    parts = [element("div", picture, class_="graph"), *([element("p", *key, class_="key muted")] if key else [])]
    return [section("Problems", element("div", *parts, class_="card"))]


def section(title: str, *children: Markup) -> Markup:
    """Return a section of the page."""
    return element("section", element("h2", title), *children)


def _curves(cards: Sequence[Card], rates: str) -> list[Markup]:
    if not cards:
        text = "metrics.csv holds no values: nothing was logged before the run ended."
        return [element("p", text, class_="muted card")]
    return [grid(cards), *([element("p", rates, class_="muted")] if rates else [])]


def grid(cards: Sequence[Card]) -> Markup:
    """Return figures side by side, wide ones in a row of their own."""
    figures = []
    for card in cards:
        note = [element("figcaption", card.note)] if card.note else []
        class_ = "row" if card.is_wide else None
        figures.append(element("figure", element("h3", card.title), card.svg, *note, class_=class_))
    return element("div", *figures, class_="cards")


def page(title: str, body: Sequence[Markup], script: str = "", *, has_figures: bool = True) -> str:
    """Return a whole page, with its style in it.

    Args:
        title: of the window.
        body: its parts.
        script: of ours, word for word: the policy allows it by its hash, and no other.
        has_figures: whether there are PNG files beside it.
    """
    style = Markup(css_variables() + "\n" + files("mlotool.report").joinpath("page.css").read_text(encoding="utf-8"))
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = f"{POLICY}; script-src 'sha256-{digest}'" if script else POLICY
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{title}: report"),
        element("style", style),
    )
    where = "The figures are also PNG files, in report/ beside this page." if has_figures else ""
    foot = element("footer", where, class_="muted")
    scripts = [element("script", Markup(script))] if script else []
    content = element("body", element("main", join(body), foot), *scripts)
    return f"<!doctype html>\n{element('html', head, content, lang='en')}\n"
