"""CPU time of a hypergradient and of a training cycle, four ways, beside the engine before; rivals take turns."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.harness.rounds import Seconds, summarize
from benchmarks.mixflow.peaks import row_of
from benchmarks.mixflow.setting import BEFORE, WAYS, Setting

WIDTHS = (128, 256)
SETTINGS = (Setting("maml"), Setting("weighting", "implicit"))
SECONDS_OF_A_TURN = 0.5
"""About; a slow rival's turn is one hypergradient."""
KINDS = {"hypergradient": "start", "cycle": "start_cycles"}

Call = Callable[..., Any]
"""An `Engine`."""


def measure(now: Call, before: Call | None, num_rounds: int, *, is_small: bool = False) -> dict[str, Any]:
    """Print and return a row for each setting, width and kind.

    Args:
        now: this version.
        before: the version that ratios are to; None: to this version's reverse products.
        num_rounds: in which each rival has a turn.
        is_small: narrow and shallow.
    """
    rows = []
    widths = (8, 16) if is_small else WIDTHS
    for width in widths:
        for setting in SETTINGS:
            sized = setting.sized(width=width, num_layers=2 if is_small else 8)
            memory = row_of(sized, now, before)["memory"]
            # A cycle adds the steps and little else: it is timed once.
            for kind in KINDS if width == min(widths) else ("hypergradient",):
                row = _timed(sized, kind, now, before, num_rounds)
                rows.append({"title": setting.title, "width": width, "kind": kind, "memory": memory, **row})
                show(rows[-1:])
    show(rows)
    return {"rows": rows}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of time ratios with their quartiles; below 1 is faster."""
    names = list(rows[0]["cpu"])
    print(f"| {' | '.join(['', 'width', 'of', *names])} |\n{'|---' * (len(names) + 3)}|")
    for row in rows:
        cells = [_cell(row["cpu"][name]) for name in names]
        print(f"| {' | '.join([row['title'], str(row['width']), row['kind'], *cells])} |", flush=True)


def _cell(time: Mapping[str, float]) -> str:
    quartiles = f"{time['ratio_quartile_1']:.2f}-{time['ratio_quartile_3']:.2f}"
    return f"{time['ms']:.0f} ms, {time['ratio']:.2f} ({quartiles})"


def _timed(setting: Setting, kind: str, now: Call, before: Call | None, num_rounds: int) -> dict[str, Any]:
    rivals: dict[str, Call] = {} if before is None else {BEFORE: before}
    rivals |= {way.name: now for way in WAYS}
    if before is not None:
        before(KINDS[kind], BEFORE, setting)
    for way in WAYS:
        now(KINDS[kind], way.name, setting.by(way))
    first = next(iter(rivals))
    num_cycles = max(1, round(SECONDS_OF_A_TURN / rivals[first]("go_on", first, 1)[1]))
    found: dict[str, list[Seconds]] = {name: [] for name in rivals}
    names = list(rivals)
    for number in range(num_rounds):
        # Another one starts each round: what follows a rival in a fixed order would inherit its caches.
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            wall, cpu = rivals[name]("go_on", name, num_cycles)
            found[name].append(Seconds(wall / num_cycles, cpu / num_cycles))
    for engine in set(rivals.values()):
        engine("stop")
    return {
        "num_rounds": num_rounds,
        "num_cycles": num_cycles,
        "cpu": summarize(found, first, "cpu"),
        "wall": summarize(found, first, "wall"),
    }
