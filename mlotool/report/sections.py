"""The page's sections that are words and tables: header, final metrics, provenance."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlotool.report.formats import NONE, duration, number, shortened
from mlotool.report.markup import Markup, details, element, join
from mlotool.report.palette import variable
from mlotool.report.run_folder import RunFolder, as_dict

BADGES = {
    "finished": ("✓", "finished"),
    "pruned": ("✂", "pruned: stopped early, as other jobs of the sweep did better"),
    "failed": ("✕", "failed"),
    "infeasible": ("∅", "infeasible: its decisions make no model, which was not trained"),
    "interrupted": ("❙❙", "interrupted"),
    "unknown": ("?", "no summary: still running, or killed"),
}
# What platform.processor() and platform.machine() answer.
ARCHITECTURES = ("x86_64", "AMD64", "i386", "i686", "aarch64", "arm64", "arm", "armv7l", "ppc64le", "riscv64", "s390x")


def header(run: RunFolder) -> Markup:
    """Name, status, error, and the facts one looks for first."""
    sign, text = BADGES[run.status]
    badge = element("span", element("span", sign, aria_hidden="true"), text, class_=f"badge {run.status}")
    parts = [element("div", element("h1", run.name), badge, class_="head"), _tiles(run)]
    if run.summary.get("error"):
        tone = "card error soft" if run.status in ("interrupted", "infeasible") else "card error"
        error = element("pre", str(run.summary["error"]), class_="wrap")
        parts.append(
            element(
                "div",
                element("h3", "Why it stopped" if run.status != "infeasible" else "Why it makes no model"),
                error,
                class_=tone,
            )
        )
    if run.notes:
        notes = [element("p", note, class_="muted") for note in run.notes]
        parts.append(element("div", element("h3", "Notes on this folder"), *notes, class_="card error soft"))
    return element("header", *parts)


def _tiles(run: RunFolder) -> Markup:
    objective, provenance = run.objective, run.provenance
    key, mode = objective.get("key"), objective.get("mode")
    modes = {"max": "larger is better", "min": "smaller is better"}
    best = f"best checkpoint at tick {run.best_tick}" if run.best_tick is not None else "no best checkpoint"
    below = "; ".join(part for part in (modes.get(str(mode), ""), best) if part)
    label = f"objective {key}" if key else "objective"
    tiles = [
        _tile(label, number(objective.get("value")), below, "tile first"),
        _tile("ticks", number(run.summary.get("num_ticks")), _started(provenance)),
        _tile("duration", duration(provenance.get("duration_s")), _of_which(run.summary.get("training_s"))),
        _tile("device", _device(provenance.get("device"))),
        _tile("seed", number(provenance.get("seed", run.config.get("seed")))),
    ]
    return element("dl", *tiles, class_="tiles")


def _started(provenance: Mapping[str, Any]) -> str:
    started = provenance.get("started")
    return f"started {str(started)[:16].replace('T', ' ')}" if started else ""


def _device(name: object) -> str:
    # A processor is recorded by its architecture, which tells few readers what it is; a GPU by its name.
    return f"CPU ({name})" if name in ARCHITECTURES else str(name or NONE)


def _of_which(training: object) -> str:
    text = duration(training)
    return "" if text == NONE else f"training {text}"


def _tile(label: str, value: str, below: str = "", class_: str = "tile") -> Markup:
    small = [element("small", below)] if below else []
    return element("div", element("dt", label), element("dd", value, *small), class_=class_)


def final_table(run: RunFolder, colours: Mapping[str, str]) -> Markup:
    """All last metrics and the best checkpoint's, grouped by who logged them.

    What is evaluated in the end is so at the best checkpoint, where there is one.
    """
    at_end = _evaluated_in_the_end(run)
    ended = {key: value for key, value in run.metrics.items() if str(key).partition("/")[0] in at_end}
    last = {key: value for key, value in run.metrics.items() if key not in ended}
    values = (last, {**run.best_metrics, **ended}) if run.best_tick is not None else (run.metrics, run.best_metrics)
    keys = list(dict.fromkeys([*run.metrics, *run.best_metrics]))
    if not keys:
        return element("p", "The run logged no metrics.", class_="muted card")
    owners = dict.fromkeys(str(key).partition("/")[0] for key in keys)
    ordered = [*(name for name in colours if name in owners), *(name for name in owners if name not in colours)]
    rows: list[Markup] = []
    for owner in ordered:
        dot = (
            [element("span", class_="dot", style=f"background:{variable(colours[owner])}")] if owner in colours else []
        )
        rows.append(element("tr", element("th", *dot, owner, colspan=3, scope="rowgroup"), class_="group"))
        rows += [_metric_row(run, key, values) for key in keys if str(key).partition("/")[0] == owner]
    best = "best checkpoint" if run.best_tick is None else f"best checkpoint (tick {run.best_tick})"
    heads = [element("th", "metric", scope="col")]
    heads += [element("th", text, scope="col", class_="number") for text in ("last", best)]
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    return element("div", table, class_="card scroll")


def metric_notes(run: RunFolder) -> list[Markup]:
    """Say what the metrics are of besides the run's own training: inherited weights, statistics taken anew."""
    count, inherited = as_dict(run.config.get("evaluate")).get("recalibrate"), run.config.get("inherit")
    texts = []
    if isinstance(inherited, str):
        texts.append(
            f"The run began with the weights of {shortened(inherited, 200)}; inherited/.. is what it had before its "
            "first tick."
        )
    if isinstance(count, int) and not isinstance(count, bool):
        texts.append(f"Running statistics were taken anew over {count} training batches before each evaluation.")
    return [element("p", text, class_="muted") for text in texts]


def _evaluated_in_the_end(run: RunFolder) -> set[str]:
    splits = as_dict(as_dict(run.config.get("evaluate")).get("splits"))
    ended = [str(split) for split, every in splits.items() if every == "end"]
    return {*ended, *map(str, as_dict(run.config.get("analyses")))}


def _metric_row(run: RunFolder, key: Any, values: Sequence[Mapping[str, Any]]) -> Markup:
    name = str(key).partition("/")[2] or str(key)
    marked = element("b", name, " ★") if key == run.objective.get("key") else name
    cells = [element("td", number(each.get(key)), class_="number", title=_exact(each.get(key))) for each in values]
    return element("tr", element("th", marked, scope="row"), *cells)


def _exact(value: object) -> str | None:
    return repr(value) if isinstance(value, float) else None


def origin(run: RunFolder) -> Markup:
    """The command, the overrides, where it ran, the config and the recipe."""
    parts: list[Markup] = []
    if run.provenance.get("command"):
        command = element("pre", str(run.provenance["command"]), class_="command")
        parts.append(element("p", "The exact command; one click selects it.", class_="muted"))
        parts.append(command)
    else:
        parts.append(element("p", "The command was not recorded.", class_="muted"))
    if run.overrides:
        parts.append(element("p", "Overrides", class_="muted"))
        parts.append(element("pre", "\n".join(run.overrides)))
    facts = [
        element("tr", element("th", name, scope="row"), element("td", value, class_="text"))
        for name, value in _facts(run)
    ]
    parts.append(element("table", element("tbody", *facts)))
    blocks = [element("div", *parts, class_="card scroll")]
    for summary, text in (("Resolved config", run.config_text), ("Recipe file", run.recipe_text)):
        if text:
            blocks.append(details(summary, element("pre", text)))
    return join(blocks)


def _resumes(provenance: Mapping[str, Any]) -> str | None:
    found = provenance.get("resumes")
    resumes = [as_dict(each) for each in found] if isinstance(found, list) else []
    return "; ".join(f"{each.get('date')} after tick {each.get('tick')}" for each in resumes) or None


def _facts(run: RunFolder) -> list[tuple[str, str]]:
    provenance = run.provenance
    git = as_dict(provenance.get("git"))
    commit = str(git.get("commit") or "")
    dirty = " with uncommitted changes" if git.get("dirty") else ""
    versions = as_dict(provenance.get("versions"))
    facts = {
        "folder": run.path.resolve().name,
        "recipe": provenance.get("recipe_path"),
        "git commit": f"{commit}{dirty}" if commit else None,
        "started": provenance.get("started"),
        "resumed": _resumes(provenance),
        "finished": provenance.get("finished"),
        "platform": provenance.get("platform"),
        "python": provenance.get("python"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    return [(name, str(value)) for name, value in facts.items() if value]
