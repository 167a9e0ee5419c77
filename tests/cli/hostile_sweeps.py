"""Sweep folders that a stranger could hand on: each builder spoils a whole one, of two jobs.

A builder gets the sweep's folder and `outside`, a folder beside it with secret.txt, which must stay as it is and whose
text must not show anywhere. Add a function with `@hostile`, and every test takes it.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.hostile_folders import ESCAPE, LAUGHS

Builder = Callable[[Path, Path], None]
SWEEPS: dict[str, Builder] = {}
RECORDS = ("plan.json", "multirun.yaml", "sweep.json")


def hostile(builder: Builder) -> Builder:
    SWEEPS[builder.__name__] = builder
    return builder


def _replace(path: Path) -> Path:
    """Remove what stands there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    return path


def _link(path: Path, target: Path) -> None:
    _replace(path).symlink_to(target)


def _summaries(sweep: Path, **changes: Any) -> None:
    for file in sweep.glob("*/summary.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _plan(sweep: Path, **changes: Any) -> None:
    plan = {"objective": "val/accuracy", "mode": "max", "num_jobs": 2, "keys": {"seed": {"num_values": 2}}}
    (sweep / "plan.json").write_text(json.dumps({**plan, **changes}))


def _jobs(sweep: Path, count: int, words: Callable[[int], str], **summary: Any) -> None:
    """Add jobs that have ended."""
    for number in range(2, count + 2):
        folder = sweep / str(number)
        folder.mkdir()
        (folder / "overrides.txt").write_text(words(number))
        objective = {"key": "val/accuracy", "value": number / count, "mode": "max"}
        content = {"status": "finished", "objective": objective, "metrics": {}, "num_ticks": 2, "training_s": 0.1}
        (folder / "summary.json").write_text(json.dumps({**content, **summary}))


@hostile
def records_behind_links(sweep: Path, outside: Path) -> None:
    for name in RECORDS:
        _link(sweep / name, outside / "secret.txt")


@hostile
def pages_behind_links(sweep: Path, outside: Path) -> None:
    for name in ("sweep.csv", "settings.csv", "sweep.html", ".lock"):
        _link(sweep / name, outside / "secret.txt")


@hostile
def pages_of_another_by_hard_links(sweep: Path, outside: Path) -> None:
    for name in ("sweep.csv", "settings.csv", "sweep.html", "plan.json"):
        os.link(outside / "secret.txt", _replace(sweep / name))


@hostile
def dangling_links(sweep: Path, outside: Path) -> None:
    for name in ("sweep.csv", "settings.csv", "sweep.html", "plan.json", "study.db", "2"):
        _link(sweep / name, outside / "new" / name)


@hostile
def a_job_behind_a_link(sweep: Path, outside: Path) -> None:
    shutil.copytree(sweep / "0", outside / "0")
    _link(sweep / "0", outside / "0")


@hostile
def another_folder_as_a_job(sweep: Path, outside: Path) -> None:
    _link(sweep / "0", outside)


@hostile
def files_of_jobs_behind_links(sweep: Path, outside: Path) -> None:
    for name in ("overrides.txt", "summary.json", "job.json", "report.html", "metrics.csv", "provenance.json"):
        _link(sweep / "0" / name, outside / "secret.txt")


@hostile
def checkpoints_behind_a_link(sweep: Path, outside: Path) -> None:
    shutil.copytree(sweep / "0" / "checkpoints", outside / "checkpoints")
    _link(sweep / "0" / "checkpoints", outside / "checkpoints")


@hostile
def pipes(sweep: Path, outside: Path) -> None:
    for name in (*RECORDS, ".lock", "study.db", "0/summary.json", "0/overrides.txt", "1/job.json", "1/metrics.csv"):
        os.mkfifo(_replace(sweep / name))


@hostile
def folders_in_the_place_of_files(sweep: Path, outside: Path) -> None:
    for name in ("plan.json", "sweep.csv", "settings.csv", "sweep.html", ".lock", "0/summary.json", "1/overrides.txt"):
        _replace(sweep / name).mkdir()


@hostile
def files_in_the_place_of_jobs(sweep: Path, outside: Path) -> None:
    for name in ("0", "1"):
        _replace(sweep / name).write_text("no folder")


@hostile
def a_billion_laughs(sweep: Path, outside: Path) -> None:
    for name in RECORDS:
        (sweep / name).write_text(LAUGHS)


@hostile
def records_of_20_megabytes(sweep: Path, outside: Path) -> None:
    for name in RECORDS:
        (sweep / name).write_text('{"keys": {' + ", ".join(f'"k{i}": {{}}' for i in range(1_500_000)) + "}}")


@hostile
def records_as_deep_as_can_be(sweep: Path, outside: Path) -> None:
    (sweep / "plan.json").write_text('{"keys":' * 100_000)
    (sweep / "sweep.json").write_text("[" * 500_000)
    (sweep / "multirun.yaml").write_text("[" * 100_000)


@hostile
def records_of_other_types(sweep: Path, outside: Path) -> None:
    _plan(sweep, objective=["val"], mode={"max": 1}, num_jobs="two", keys=[["seed", 2]])
    (sweep / "multirun.yaml").write_text("hydra: {overrides: {task: {run: plain}}}\n")
    (sweep / "sweep.json").write_text('{"identity": [1, 2], "name": {}}')


@hostile
def keys_of_other_types(sweep: Path, outside: Path) -> None:
    _plan(sweep, keys={"seed": 3, "": {"num_values": -1}, "a b": {"num_values": "x", "is_log": "yes"}, "lr": None})


@hostile
def more_jobs_than_atoms(sweep: Path, outside: Path) -> None:
    _plan(sweep, num_jobs=10**14, keys={"seed": {"num_values": 10**14}, "lr": {"num_values": 10**14}})


@hostile
def numbers_without_end(sweep: Path, outside: Path) -> None:
    (sweep / "plan.json").write_text(
        '{"num_jobs": DIGITS, "keys": {"seed": {"num_values": DIGITS}}}'.replace("DIGITS", "9" * 9_999)
    )
    for number, value in enumerate(("9" * 9_999, "1e999")):
        text = '{"status": "finished", "metrics": {"a": V}, "training_s": V, "objective": {"key": "a", "value": V}}'
        (sweep / str(number) / "summary.json").write_text(text.replace("V", value))


@hostile
def objectives_at_the_end_of_floats(sweep: Path, outside: Path) -> None:
    for number, value in enumerate((1.7e308, -1.7e308)):
        file = sweep / str(number) / "summary.json"
        objective = {"key": "val/accuracy", "value": value, "mode": "max"}
        file.write_text(json.dumps({**json.loads(file.read_text()), "objective": objective}))
    _jobs(sweep, 6, lambda number: f"seed={number}\nrunner.max_ticks=1.7e308\nlr={number * 1e307}\n")


@hostile
def logarithms_of_what_has_none(sweep: Path, outside: Path) -> None:
    _plan(sweep, keys={"lr": {"num_values": 0, "is_log": True}, "name": {"num_values": 0, "is_log": True}})
    _jobs(sweep, 6, lambda number: f"lr={[0, -1, 'nan', 'inf', '5e-324', 'x'][number - 2]}\nname=a{number}\n")


@hostile
def objectives_that_disagree(sweep: Path, outside: Path) -> None:
    for number, objective in enumerate(({"key": ["a"], "value": "x", "mode": 3}, "val/accuracy")):
        file = sweep / str(number) / "summary.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "objective": objective}))


@hostile
def summaries_of_other_types(sweep: Path, outside: Path) -> None:
    _summaries(sweep, status=["finished"], metrics=[1], num_ticks={"a": 1}, training_s="long", error={"a": [1]})


@hostile
def summaries_that_are_no_mappings(sweep: Path, outside: Path) -> None:
    (sweep / "0" / "summary.json").write_text("[1, 2]")
    (sweep / "1" / "summary.json").write_bytes(b"\xff\xfe\x00")


@hostile
def commands_to_the_terminal(sweep: Path, outside: Path) -> None:
    text = f"{ESCAPE}\u202e\x9b2J\r\n"
    _summaries(sweep, status=text, error=text, metrics={text: 1.0}, objective={"key": text, "value": 1, "mode": "max"})
    _plan(sweep, objective=text, keys={text: {"num_values": 2}})
    for number in range(2):
        (sweep / str(number) / "overrides.txt").write_text(f"{text}={number}{text}\nseed={text}{number}\n")


@hostile
def searches_of_other_types(sweep: Path, outside: Path) -> None:
    _plan(sweep, search={"repeats": [3], "num_random": "x", "second_objective": 3, "second_mode": {}, "sampler": 1})
    _summaries(sweep, num_parameters={"a": "b", "c": -1}, status="infeasible", error=[1])


@hostile
def searches_without_end(sweep: Path, outside: Path) -> None:
    numbers = {"repeats": 10**12, "num_random": 10**12, "sampler": ESCAPE}
    _plan(sweep, search={**numbers, "second_objective": "a/num_parameters", "second_mode": "min"})
    _jobs(sweep, 500, lambda number: f"+decisions.a={number}\n", num_parameters={"a": 10**14}, status="infeasible")
    _jobs_beside(sweep, outside)


def _jobs_beside(sweep: Path, outside: Path) -> None:
    """Put another search beside the sweep, whose folder is a link."""
    shutil.copytree(sweep, outside / "search")
    (sweep.parent / "other").symlink_to(outside / "search")


@hostile
def names_that_command_the_terminal(sweep: Path, outside: Path) -> None:
    _jobs(sweep, 2, lambda number: f"seed={number}\n")
    (sweep / "2").rename(sweep / f"2{ESCAPE.replace('/', '')}")
    (sweep / "3").rename(sweep / "<img src=x onerror=alert(1)>")


@hostile
def names_that_are_no_texts(sweep: Path, outside: Path) -> None:
    (sweep / "1").rename(Path(os.fsdecode(os.fsencode(sweep) + b"/\xff\xfe1")))


@hostile
def scripts(sweep: Path, outside: Path) -> None:
    text = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
    _summaries(sweep, status=text, error=text, metrics={text: 1.0}, objective={"key": text, "value": 1, "mode": "max"})
    _plan(sweep, objective=text, keys={text: {"num_values": 2}})
    for number in range(2):
        (sweep / str(number) / "overrides.txt").write_text(f"{text}={number}{text}\nseed={text}{number}\n")


@hostile
def formulas(sweep: Path, outside: Path) -> None:
    for number in range(2):
        (sweep / str(number) / "overrides.txt").write_text(f"a==HYPERLINK(1)\nb=@SUM(1)\nc=+cmd|' /C calc'!A{number}\n")


@hostile
def markup_of_rich(sweep: Path, outside: Path) -> None:
    for number in range(2):
        (sweep / str(number) / "overrides.txt").write_text(f"a=[/red][link=file:///etc]{number}\n[bold=x{number}\n")
    _summaries(sweep, error="[/] [red", status="[/x]")


@hostile
def thousands_of_parameters(sweep: Path, outside: Path) -> None:
    for number in range(2):
        lines = "".join(f"k{index}={index * number}\n" for index in range(8_000))
        (sweep / str(number) / "overrides.txt").write_text(lines)


@hostile
def thousands_of_metrics(sweep: Path, outside: Path) -> None:
    _summaries(sweep, metrics={f"m{index}": index for index in range(60_000)})


@hostile
def thousands_of_jobs(sweep: Path, outside: Path) -> None:
    _jobs(sweep, 3_000, lambda number: f"lr={number}\nseed={number % 7}\n")


@hostile
def thousands_of_jobs_of_many_parameters(sweep: Path, outside: Path) -> None:
    lines = "".join(f"k{index}=VALUE{index}\n" for index in range(200))
    _jobs(sweep, 1_000, lambda number: lines.replace("VALUE", str(number)), metrics={f"m{i}": i for i in range(200)})


@hostile
def values_as_long_as_can_be(sweep: Path, outside: Path) -> None:
    for number in range(2):
        (sweep / str(number) / "overrides.txt").write_text(f"{'k' * 40_000}={'v' * 50_000}{number}\n")
    _summaries(sweep, status="s" * 500_000, error="e " * 500_000)


@hostile
def lines_without_end(sweep: Path, outside: Path) -> None:
    for number in range(2):
        (sweep / str(number) / "overrides.txt").write_text("a=1\n" * 25_000)


@hostile
def a_job_that_says_other_words(sweep: Path, outside: Path) -> None:
    for number in range(2):
        (sweep / str(number) / "overrides.txt").unlink()
        words = [["+recipe=plain"], {"a": 1}, 3, None, f"data.root={outside}", "seed=${oc.env:HOME}"]
        content = {"words": words, "trusted": ["os"], "command": 3, "recipe_file": str(outside / "secret.txt")}
        (sweep / str(number) / "job.json").write_text(json.dumps(content))


@hostile
def words_that_call(sweep: Path, outside: Path) -> None:
    node = f"{{_target_: os.mkdir, path: {outside / 'made'}}}"
    for number in range(2):
        (sweep / str(number) / "overrides.txt").write_text(f"problems.classifier.module={node}\nseed={number}\n")
        (sweep / str(number) / "config.yaml").write_text(f"problems: {{classifier: {{module: {node}}}}}\n")


@hostile
def metrics_that_are_no_tables(sweep: Path, outside: Path) -> None:
    (sweep / "0" / "metrics.csv").write_bytes(b"\x00\xff" * 100_000)
    (sweep / "1" / "metrics.csv").write_text("tick,key,value\n" + "x,y\n" * 1_000 + f"1,{'k' * 100_000},1\n")


@hostile
def metrics_of_200_megabytes(sweep: Path, outside: Path) -> None:
    for number in range(2):
        with (sweep / str(number) / "metrics.csv").open("w") as file:
            file.truncate(200_000_000)


@hostile
def curves_of_everything(sweep: Path, outside: Path) -> None:
    for number in range(2):
        rows = "".join(f"{tick},{tick},val/accuracy,{'1e308' if tick % 2 else '-1e308'}\n" for tick in range(200_000))
        (sweep / str(number) / "metrics.csv").write_text("tick,time,key,value\n" + rows)


@hostile
def records_of_groups(sweep: Path, outside: Path) -> None:
    (sweep / "fusion").mkdir()
    text = f"<script>alert(1)</script><img src=x onerror=alert(1)>{ESCAPE}[bold]"
    stack = {"jobs": [0, 1], "is_fused": False, "fused_s": "1", "alone_s": 1e308, "reason": text}
    for number in range(300):
        (sweep / "fusion" / f"{number}.json").write_text(json.dumps({"jobs": text, "stacks": [stack] * 50}))
    (sweep / "groups.json").write_text(json.dumps({"groups": [[0, 1, 10**20], text]}))


@hostile
def records_of_groups_elsewhere(sweep: Path, outside: Path) -> None:
    (sweep / "fusion").mkdir()
    secret = json.dumps({"stacks": [{"jobs": [0], "reason": (outside / "secret.txt").read_text()}]})
    (outside / "record.json").write_text(secret)
    _link(sweep / "fusion" / "0.json", outside / "record.json")
    _link(sweep / "groups.json", outside / "secret.txt")
    os.mkfifo(sweep / "fusion" / "1.json")
