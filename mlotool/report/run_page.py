"""One self-contained page of a run: report.html, and its figures as SVG files beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlotool.folders.run_folder import RunFolder
from mlotool.folders.sweep_folder import SweepFolder
from mlotool.report import layer_parallel, outputs, run_figures
from mlotool.report.figure import Sketchbook, problem_colours, report_style
from mlotool.report.formats import NONE, duration, number
from mlotool.report.graph import model_section, problem_graph
from mlotool.report.models import read_models, read_paths, shares
from mlotool.report.page import page
from mlotool.report.recorded_run import SPLIT_NAMES, RecordedRun, Series, as_dict, read_series

MAX_SERIES, MAX_METRICS = 100, 25
BADGES = {
    "finished": "finished",
    "pruned": "pruned: stopped early, as other jobs of the sweep did better",
    "failed": "failed",
    "infeasible": "infeasible: its decisions make no working model, so nothing was trained",
    "interrupted": "interrupted",
    "unknown": "no summary: still running, or killed",
}


def write_report(run_dir: Path) -> Path:
    """Write report.html and report/*.svg from what the run folder holds.

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
    folder = RunFolder(run_dir)
    folder.check()
    run = RecordedRun(folder)
    with report_style():
        values = _drawn(run, Sketchbook(folder.path / folder.FIGURES))
    values |= {"recipe": run.recipe, "overrides": run.overrides, "member": _member(run)}
    text = page(
        "run.html", run.name, run=run, badges=BADGES, tiles=_tiles(run), owners=_final(run, values["colours"]),
        metric_notes=_metric_notes(run), facts=_facts(run), findings=_findings(run), **values,
    )  # fmt: skip
    return folder.write_page(text)


def _member(run: RecordedRun) -> str:
    """Return the command that trains the best state of a population's member; "" for any other run."""
    if not (run.folder.path.parent / SweepFolder.POPULATION).is_file():
        return ""
    # It imports OmegaConf, which the page of any other run does without.
    from mlotool.report.sweep import job_command

    return job_command(run)


def _drawn(run: RecordedRun, book: Sketchbook) -> dict[str, Any]:
    """Return the figures of the page, and the graphs of its problems and models."""
    readers = (read_series, run_figures.read_weightings, read_models, read_paths, layer_parallel.read_timelines)
    series, weightings, models, paths, timelines = (_noted(run, read(run.folder)) for read in readers)
    parallel, series = layer_parallel.split_series(series)
    histories = _noted(run, outputs.read_histories(run.folder))
    given, series = outputs.split_series(series)
    learned = [curve for curve in series if curve.metric.startswith(run_figures.LEARNED)]
    series = _first(run, [curve for curve in series if not curve.metric.startswith(run_figures.LEARNED)])
    evaluate, graph = as_dict(run.config.get("evaluate")), as_dict(run.config.get("graph"))
    # The recipe's splits, then usual names that were logged as well.
    logged = [curve.owner for curve in series if curve.owner in SPLIT_NAMES]
    named = dict.fromkeys([*map(str, as_dict(evaluate.get("splits"))), *logged])
    splits = [name for name in named if name not in run.problems]
    # Without a config, the owners of metrics that are no usual split.
    colours = problem_colours(run.problems or dict.fromkeys(one.owner for one in series if one.owner not in splits))
    best = run_figures.Best(run.best_tick, str(run.objective.get("key")), run.objective.get("value"))
    curves = [
        *run_figures.evaluation_cards(book, series, splits, colours.get(str(evaluate.get("problem")), "ink"), best),
        *run_figures.training_cards(book, series, colours),
    ]
    timeline_cards = [layer_parallel.timeline_card(book, timeline) for timeline in timelines]
    speedup_cards = [layer_parallel.speedup_card(book, timeline) for timeline in timelines if timeline.num_stages > 1]
    # What an analysis has drawn of all samples is not drawn again of a few.
    analysed = {problem for arrays in weightings for problem in _players(run, arrays.name)}
    weighting = [
        card
        for arrays in weightings
        for card in run_figures.weighting_cards(book, arrays, run.metrics, _weigher(run, arrays.name, colours))
    ]
    return {
        "colours": colours,
        "graph": problem_graph(run.config, colours),
        "has_shaping": bool(graph.get("upper_to_lower")),
        "has_reading": bool(graph.get("lower_to_upper")),
        "curves": curves,
        "rates": run_figures.constant_rates(series, colours),
        "models": [model_section(model, shares(paths.get(model.problem, {}))) for model in models],
        "paths": paths,
        "parallel": [*timeline_cards, *speedup_cards, *layer_parallel.numbered_cards(book, parallel)],
        "learned": [
            *run_figures.learned_cards(book, learned[:MAX_SERIES], colours),
            *outputs.output_cards(book, given, histories, colours, analysed),
        ],
        "weighting": weighting,
        "idle": _idle(run),
    }


def _noted(run: RecordedRun, read: tuple[Any, list[str]]) -> Any:
    content, notes = read
    run.notes += notes
    return content


def _first(run: RecordedRun, series: list[Series]) -> list[Series]:
    """Return the series that the page has room for: a figure is drawn for each metric."""
    metrics = list(dict.fromkeys(curve.metric for curve in series[:MAX_SERIES]))[:MAX_METRICS]
    kept = [curve for curve in series[:MAX_SERIES] if curve.metric in metrics]
    if len(kept) < len(series):
        run.notes.append(f"metrics.csv has {len(series)} keys; only the first {len(kept)} are drawn.")
    return kept


def _roles(run: RecordedRun, analysis: str) -> dict[Any, Any]:
    return as_dict(as_dict(as_dict(run.config.get("analyses")).get(analysis)).get("roles"))


def _players(run: RecordedRun, analysis: str) -> list[str]:
    """Return the problems whose modules an analysis looks at."""
    roles = _roles(run, analysis).values()
    return [str(as_dict(role).get("problem", role)) for role in roles]


def _weigher(run: RecordedRun, analysis: str, colours: Mapping[str, str]) -> str:
    return colours.get(str(_roles(run, analysis).get("weigher")), "ink")


def _idle(run: RecordedRun) -> str:
    """Say which problems had made no step at the checkpoint that is analyzed, as in a warm-up of others."""
    is_best = run.best_tick is not None
    steps = run.best_metrics if is_best else run.metrics
    idle = [name for name in run.problems if steps.get(f"{name}/step") == 0]
    when = f"at the best checkpoint (tick {run.best_tick})" if is_best else "in this run"
    return f"No step had been made {when} by {', '.join(idle)}: the figures show its initial state." if idle else ""


def _tiles(run: RecordedRun) -> list[tuple[str, ...]]:
    """Return the facts that one looks for first: what they are, the value, and a line below."""
    objective, provenance = run.objective, run.provenance
    mode = {"max": "larger is better", "min": "smaller is better"}.get(str(objective.get("mode")), "")
    best = f"best checkpoint at tick {run.best_tick}" if run.best_tick is not None else "no best checkpoint"
    started, training = provenance.get("started"), duration(run.summary.get("training_s"))
    return [
        (f"objective {objective.get('key') or ''}".strip(), number(objective.get("value")),
         "; ".join(filter(None, (mode, best))), "tile first"),
        ("ticks", number(run.summary.get("num_ticks")),
         f"started {str(started)[:16].replace('T', ' ')}" if started else ""),
        ("duration", duration(provenance.get("duration_s")), "" if training == NONE else f"training {training}"),
        ("device", str(provenance.get("device") or NONE)),
        ("seed", number(provenance.get("seed", run.config.get("seed")))),
    ]  # fmt: skip


def _final(run: RecordedRun, colours: Mapping[str, str]) -> dict[str, list[tuple[str, bool, list[Any]]]]:
    """Return all last metrics and the best checkpoint's, by who logged them: name, whether objective, two values.

    What is evaluated in the end is so at the best checkpoint, where there is one.
    """
    splits = as_dict(as_dict(run.config.get("evaluate")).get("splits"))
    at_end = {*(str(split) for split, every in splits.items() if every == "end")}
    at_end |= set(map(str, as_dict(run.config.get("analyses"))))
    last, best = dict(run.metrics), dict(run.best_metrics)
    for key in run.metrics if run.best_tick is not None else ():
        if str(key).partition("/")[0] in at_end:
            best[key] = last.pop(key)
    owners: dict[str, list[tuple[str, bool, list[Any]]]] = {name: [] for name in colours}
    for key in dict.fromkeys([*run.metrics, *run.best_metrics]):
        owner, _, name = str(key).partition("/")
        row = (name or str(key), key == run.objective.get("key"), [last.get(key), best.get(key)])
        owners.setdefault(owner, []).append(row)
    return {owner: rows for owner, rows in owners.items() if rows}


def _findings(run: RecordedRun) -> list[str]:
    """Say what the run has found out about what it learned, and whether it is a control."""
    held = [name for name, lowers in as_dict(as_dict(run.config.get("graph")).get("upper_to_lower")).items() if lowers]
    control = (
        f"A control run (baseline=fixed): {', '.join(map(str, held))} took no steps and stayed at a neutral value."
    )
    findings = run.summary.get("findings")
    found = [str(text)[:1_000] for text in findings[:20]] if isinstance(findings, list) else []
    return [control, *found] if run.config.get("baseline") == "fixed" else found


def _metric_notes(run: RecordedRun) -> list[str]:
    """Say what the metrics are of besides the run's own training: inherited weights, statistics taken anew."""
    count, inherited = as_dict(run.config.get("evaluate")).get("recalibrate"), run.config.get("inherit")
    notes = [f"The run began with the weights of {str(inherited)[:200]}; inherited/.. are the metrics at that time."]
    taken_anew = f"Running statistics were collected anew from {count} training batches before each evaluation."
    return (notes if inherited else []) + ([taken_anew] if count else [])


def _facts(run: RecordedRun) -> dict[str, str]:
    provenance = run.provenance
    git, resumes = as_dict(provenance.get("git")), provenance.get("resumes")
    resumed = map(as_dict, resumes if isinstance(resumes, list) else ())
    versions = as_dict(provenance.get("versions")).items()
    dirty = " with uncommitted changes" if git.get("dirty") else ""
    facts = {
        "folder": run.folder.path.resolve().name,
        "recipe": provenance.get("recipe_path"),
        "git commit": f"{git['commit']}{dirty}" if git.get("commit") else None,
        "started": provenance.get("started"),
        "resumed": "; ".join(f"{resume.get('date')} after tick {resume.get('tick')}" for resume in resumed),
        **{name: provenance.get(name) for name in ("finished", "platform", "python")},
        "versions": ", ".join(f"{name} {version}" for name, version in versions),
    }
    return {name: str(value) for name, value in facts.items() if value}
