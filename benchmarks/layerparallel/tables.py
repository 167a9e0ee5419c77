"""The tables of the part `times`, in Markdown, from its result file."""

from collections.abc import Mapping, Sequence
from typing import Any

HEADS = (
    "rival",
    "ms a batch",
    "over 1 thread",
    "fastest rounds",
    "over all threads",
    "over data parallel",
    "CPU, busiest rank",
    "difference",
)


def tables(content: Mapping[str, Any]) -> str:
    """Return the tables of all settings of a result file."""
    return "\n\n".join(setting_table(name, each) for name, each in content["settings"].items())


def setting_table(name: str, setting: Mapping[str, Any]) -> str:
    """Return what one workload and number of ranks has: times, what was not run, the stages, and equation 27."""
    parts = [f"### {name}", _times(setting), _notes(setting)]
    if setting["model_of_speedup"]:
        parts.append(_model(setting["model_of_speedup"]))
    return "\n\n".join(parts)


def _times(setting: Mapping[str, Any]) -> str:
    rows = []
    for name, wall in setting["wall"].items():
        difference = setting["difference"].get(name)
        over_data_parallel = setting["wall_over_data_parallel"].get(name)
        rows.append(
            [
                name,
                f"{wall['ms']:.0f}" if wall["ms"] >= 100 else f"{wall['ms']:.1f}",
                _speedup(wall),
                f"{1 / wall['ratio_of_fastest']:.2f}",
                _speedup(setting["wall_over_all_threads"][name]),
                "" if over_data_parallel is None else _speedup(over_data_parallel),
                _speedup(setting["cpu_time"][name]),
                "" if difference is None else f"{difference:.0e}" if difference else "0",
            ]
        )
    rows += [[name, "not run", reason] + [""] * (len(HEADS) - 3) for name, reason in setting["not_run"].items()]
    return _table(HEADS, rows)


def _notes(setting: Mapping[str, Any]) -> str:
    exchanged = setting["exchanged"]
    lines = [f"{setting['num_rounds']} rounds, {setting['workload']['num_batches']} batches of "]
    lines[0] += f"{setting['workload']['batch_size']}; load average {setting['load_average'][0]:.1f} at the start, "
    lines[0] += f"{setting['load_average_at_the_end'][0]:.1f} at the end."
    states = " / ".join(f"{each:,}" for each in exchanged["states"])
    lines.append(f"{exchanged['parameters']:,} parameters; from stage to stage {states} numbers a batch.")
    for name, each in setting["balance"].items():
        lines.append(f"{name[0].upper()}{name[1:]}: {_balance(each)}")
    if setting["checked_with"]:
        lines.append(f"Gradients of data parallelism and of pipelines: {setting['checked_with']}.")
    return "\n".join(f"- {line}" for line in lines)


def _balance(found: Mapping[str, Any]) -> str:
    if "not_run" in found:
        return f"none, {found['not_run']}."
    ways = [
        f"{f'{way}: ' if way else ''}{found['seconds'][way]:.2f} by time, {found['operations'][way]:.2f} by operations"
        for way in found["seconds"]
    ]
    stages = " / ".join(f"{each:.1f}" for each in found["ms"])
    return f"cut before {', '.join(found['cut'])} ({stages} ms); the busiest rank over the mean, {'; '.join(ways)}."


def _model(rows: Mapping[str, Any]) -> str:
    found = []
    for name, row in rows.items():
        seconds = " / ".join(f"{1e3 * row[part]:.1f}" for part in ("forward", "backward", "auxiliary"))
        found.append([name, seconds, f"{row['predicted']:.2f} ({row['bound']:.0f})", f"{row['measured']:.2f}"])
    return _table(("rival", "forward / backward / method, ms", "equation 27 (bound)", "measured"), found)


def _speedup(summary: Mapping[str, float]) -> str:
    # A ratio of times below 1 is a speed-up above 1; the quartiles change places.
    middle, low, high = (1 / summary[key] for key in ("ratio", "ratio_quartile_3", "ratio_quartile_1"))
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
