"""All figures of a folder on one page."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mlotool.report.formats import number
from mlotool.report.page import page

SIGNS = {"done": "✓", "failed": "✕", "skipped": "\N{EN DASH}", "unfinished": "❙❙", "begun": "●"}
CLASSES = {"done": "finished", "failed": "failed", "unfinished": "interrupted"}


def write_page(folder: Path) -> Path:
    """Write index.html from the JSON files of a folder; return it."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    parts = [_header(found)]
    for name, content in found.items():
        checks = Markup().join(_check(name, content))
        parts.append(Markup("<section><h2>{}</h2>{}</section>").format(content.get("title", name), checks))
    file = folder / "index.html"
    file.write_text(page("plain.html", _title(found), body=Markup().join(parts)), encoding="utf-8")
    return file


def _title(found: Mapping[str, Mapping[str, Any]]) -> str:
    devices = {call["device"] for content in found.values() for call in content.get("calls", ())}
    return "mlotool: the GPU checks, a dry run" if devices == {"cpu"} else "mlotool on a GPU"


def _header(found: Mapping[str, Mapping[str, Any]]) -> Markup:
    title = _title(found)
    calls = [call for content in found.values() for call in content.get("calls", ())]
    machines = sorted(
        {f"{call['device']}, torch {call['versions']['torch']}, commit {call['commit']}" for call in calls}
    )
    states = [str(content.get("status")) for content in found.values()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    said = [*machines, f"Checks: {counts or 'none'}."]
    if "dry run" in title:
        said.append(
            "On the CPU, with small models and batches: it shows that the checks run, and its figures mean nothing."
        )
    lines = Markup().join(Markup('<p class="muted">{}</p>').format(line) for line in said)
    return Markup('<header><div class="head"><h1>{}</h1></div>{}</header>').format(title, lines)


def _check(name: str, content: Mapping[str, Any]) -> Iterator[Markup]:
    status = str(content.get("status"))
    reason = f": {content['reason']}" if content.get("reason") and status != "done" else ""
    badge = '<p><span class="badge {}"><span aria-hidden="true">{}</span>{}</span> {}{}</p>'
    yield Markup(badge).format(CLASSES.get(status, ""), SIGNS.get(status, "?"), status, name, reason)
    rows: Mapping[str, Any] = content.get("rows", {})
    rivals = {key: row["rivals"] for key, row in rows.items() if "rivals" in row}
    if rivals:
        lines = [
            [key, rival, each.get("ms"), _ratio(each), each.get("peak_mib"), each.get("error")]
            for key, found in rivals.items()
            for rival, each in found.items()
        ]
        yield _table(["", "program", "ms", "time over that of `base` below (quartiles)", "peak, MiB", "error"], lines)
    flat = {key: {name: value for name, value in row.items() if name != "rivals"} for key, row in rows.items()}
    flat = {key: row for key, row in flat.items() if row}
    heads = list(dict.fromkeys(name for row in flat.values() for name, value in row.items() if _is_short(value)))
    if flat and heads:
        yield _table(["", *heads], [[key, *(row.get(name) for name in heads)] for key, row in flat.items()])
    long = {key: {n: v for n, v in row.items() if not _is_short(v)} for key, row in flat.items()}
    for key, row in long.items():
        for label, value in row.items():
            text = value if isinstance(value, str) else json.dumps(value, indent=1)
            yield _details(f"{key}: {label}", text)
    if content.get("trace"):
        yield _details("Where it failed", str(content["trace"]))


def _details(summary: str, text: str) -> Markup:
    return Markup("<details><summary>{}</summary><pre>{}</pre></details>").format(summary, text)


def _is_short(value: Any) -> bool:
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and len(value) <= 120)


def _ratio(row: Mapping[str, Any]) -> str | None:
    if "ratio" not in row:
        return None
    return f"{row['ratio']:.2f} ({row['ratio_quartile_1']:.2f}-{row['ratio_quartile_3']:.2f})"


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> Markup:
    top = Markup().join(Markup('<th scope="col">{}</th>').format(head) for head in heads)
    body = Markup().join(
        Markup("<tr>{}</tr>").format(Markup().join(Markup("<td>{}</td>").format(_text(cell)) for cell in row))
        for row in rows
    )
    table = '<div class="card scroll"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    return Markup(table).format(top, body)


def _text(cell: Any) -> str:
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return number(cell)
    return "" if cell is None else str(cell)
