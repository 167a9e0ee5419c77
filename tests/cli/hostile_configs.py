"""Run folders whose texts ask for too much: config.yaml, summary.json, metrics.csv, provenance.json, artifacts."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.cli.hostile_folders import ESCAPE, hostile
from tests.cli.hostile_folders import _change as change

HTML = "<script>alert(1)</script><img src=x onerror=alert(1)>"


def _config(run: Path, update: Callable[[dict[str, Any]], Any]) -> None:
    change(run / "config.yaml", update)


@hostile
def a_config_of_many_workers(run: Path, outside: Path) -> None:
    _config(run, lambda config: config["problems"]["classifier"]["stream"].update(num_workers=10**6))


@hostile
def a_config_of_many_threads(run: Path, outside: Path) -> None:
    _config(run, lambda config: config["runner"].update(num_threads=10**9, devices=64, max_ticks=10**18))


@hostile
def a_config_of_large_batches(run: Path, outside: Path) -> None:
    _config(run, lambda config: config["problems"]["classifier"]["stream"].update(batch_size=10**12))
    _config(run, lambda config: config["evaluate"].update(batch_size=10**12))


@hostile
def a_config_of_batches_of_nothing(run: Path, outside: Path) -> None:
    _config(run, lambda config: config["evaluate"].update(batch_size=-1))


@hostile
def a_config_of_a_large_model(run: Path, outside: Path) -> None:
    _config(run, lambda config: config["problems"]["classifier"]["module"].update(hidden=[10**6, 10**6]))


@hostile
def a_config_of_a_model_larger_than_its_checkpoint(run: Path, outside: Path) -> None:
    _config(run, lambda config: config["problems"]["classifier"]["module"].update(hidden=[30_000, 30_000]))


@hostile
def a_config_of_many_layers(run: Path, outside: Path) -> None:
    _config(run, lambda config: config["problems"]["classifier"]["module"].update(hidden=[10**4] * 900))


@hostile
def a_config_of_large_data(run: Path, outside: Path) -> None:
    _config(
        run,
        lambda config: config.update(
            data={
                "_target_": "mlotool.data.SyntheticClassification",
                "sizes": {"train": 10**12, "val": 1, "test": 10**12},
            }
        ),
    )


@hostile
def a_config_that_reads_the_environment(run: Path, outside: Path) -> None:
    _config(run, lambda config: config.update(name="${oc.env:SECRET_VARIABLE}", objective="${oc.env:HOME}"))


@hostile
def a_config_that_reads_the_environment_in_parts(run: Path, outside: Path) -> None:
    _config(run, lambda config: config["data"].update(root="a${oc.env:SECRET_VARIABLE}", x="$", y="{oc.env:HOME}"))


@hostile
def a_config_of_another_name(run: Path, outside: Path) -> None:
    _config(run, lambda config: config.update(name="../../../outside/x"))


@hostile
def a_config_that_goes_online(run: Path, outside: Path) -> None:
    _config(run, lambda config: config["logger"].update(mode="online", wandb=True, project="other/entity"))


@hostile
def a_config_that_resumes(run: Path, outside: Path) -> None:
    _config(run, lambda config: config.update(resume=str(outside)))


@hostile
def a_config_with_analyses(run: Path, outside: Path) -> None:
    node = {"_target_": "mlotool.losses.weight_against_loss", "roles": {}, "split": "train", "dirpath": str(outside)}
    _config(run, lambda config: config.update(analyses={"../../../outside/x": node, ESCAPE[:2].strip("\x1b"): node}))


@hostile
def a_config_of_a_strangers_package(run: Path, outside: Path) -> None:
    for target in ("antigravity.x", "this.s", "mlotool.cli.main.main", "torch.load", "builtins.eval"):
        _config(run, lambda config, target=target: config["data"].update(_target_=target))


@hostile
def a_config_of_a_hidden_target(run: Path, outside: Path) -> None:
    node = {"_target_": "subprocess.run", "args": ["touch", str(outside / "made")]}
    _config(run, lambda config: config["data"].update(transform=node))
    _config(run, lambda config: config["problems"]["classifier"]["loss"].update(weight=node))


@hostile
def a_config_of_metrics_that_are_code(run: Path, outside: Path) -> None:
    metrics = [{"_target_": "os.system", "command": "x"}, "../x", 3]
    _config(run, lambda config: config["evaluate"].update(metrics=metrics))


@hostile
def a_config_of_wrong_types_everywhere(run: Path, outside: Path) -> None:
    def spoil(config: dict[str, Any]) -> None:
        for key in config:
            config[key] = [{"a": [1, {"b": None}]}]

    _config(run, spoil)


@hostile
def a_config_of_nothing_but_nulls(run: Path, outside: Path) -> None:
    def spoil(config: dict[str, Any]) -> None:
        for key in config:
            config[key] = None

    _config(run, spoil)


@hostile
def a_config_of_infinite_numbers(run: Path, outside: Path) -> None:
    (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace("max_ticks: 2", "max_ticks: .inf").replace("seed: 0", "seed: .nan")
    )


@hostile
def a_config_of_many_digits(run: Path, outside: Path) -> None:
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("seed: 0", f"seed: {'9' * 1_900}"))


@hostile
def a_config_of_base_sixty(run: Path, outside: Path) -> None:
    """YAML 1.1 reads 1:2:3 as a number in base sixty."""
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("seed: 0", f"seed: {'1:' * 900}1"))


@hostile
def a_config_of_aliases(run: Path, outside: Path) -> None:
    _config(run, lambda config: config.update(x=[]))
    with (run / "config.yaml").open("a") as file:
        file.write("a: &a {k: 1}\nb: {<<: *a}\nc: &c [*c]\n")


@hostile
def a_config_of_escapes(run: Path, outside: Path) -> None:
    (run / "config.yaml").write_text(f'name: "\\e]0;owned\\a"\nx: "{HTML}"\n')


@hostile
def a_config_of_html(run: Path, outside: Path) -> None:
    def spoil(config: dict[str, Any]) -> None:
        config["name"] = HTML
        config["objective"] = HTML
        config["problems"][HTML] = config["problems"]["classifier"]
        config["graph"] = {"upper_to_lower": {HTML: ["classifier"]}, "lower_to_upper": {"classifier": [HTML]}}

    _config(run, spoil)


@hostile
def a_config_of_many_problems(run: Path, outside: Path) -> None:
    def spoil(config: dict[str, Any]) -> None:
        names = [f"p{index}" for index in range(600)]
        config["problems"] = {name: {"x": 1} for name in names}
        config["graph"] = {"upper_to_lower": dict.fromkeys(names, names[:12])}

    _config(run, spoil)


@hostile
def a_summary_of_nonsense(run: Path, outside: Path) -> None:
    (run / "summary.json").write_text(
        json.dumps(
            {
                "status": "finished",
                "num_ticks": 10**17,
                "training_s": -1e300,
                "error": {"a": [ESCAPE, HTML]},
                "metrics": {HTML: 1.0, ESCAPE: 2, "a/b": [1], "": None, "/": 1e308, "x" * 50_000: 1},
                "objective": {"key": ["x"], "value": "y", "mode": {"a": 1}},
                "best": {"tick": -(10**17), "metrics": {"a": {"b": 1}}},
            }
        )
    )


@hostile
def a_summary_that_has_finished(run: Path, outside: Path) -> None:
    """`resume` is to say what has come of it, and there is nothing of that."""
    change(
        run / "summary.json",
        lambda summary: summary.update(status="finished", num_ticks=10**6, metrics=3, objective=[]),
    )


@hostile
def a_summary_that_has_finished_without_end(run: Path, outside: Path) -> None:
    change(
        run / "summary.json",
        lambda summary: summary.update(
            num_ticks=10**6,
            metrics={f"{ESCAPE}{HTML}{index}": "x" for index in range(20_000)},
            objective={"key": ESCAPE, "value": ESCAPE},
        ),
    )


@hostile
def a_summary_of_a_long_text(run: Path, outside: Path) -> None:
    (run / "summary.json").write_text('{"error": "' + "x" * 10_000_000 + '"}')


@hostile
def a_summary_of_lone_surrogates(run: Path, outside: Path) -> None:
    (run / "summary.json").write_text(
        '{"status": "failed", "error": "\\ud800 \\u202e\\u001b[2J", "metrics": {"\\udfff/a": 1}}'
    )


@hostile
def a_provenance_of_commands(run: Path, outside: Path) -> None:
    (run / "provenance.json").write_text(
        json.dumps(
            {
                "command": f"{ESCAPE}; rm -rf / {HTML}",
                "git": {"commit": ESCAPE, "dirty": "x", "mlotool": 3},
                "versions": {"torch": ESCAPE, "mlotool": [HTML], "x": {"y": 1}},
                "device": ESCAPE,
                "resumes": [ESCAPE, {"date": HTML, "tick": [1]}, 3],
                "started": "not a time",
                "recipe_path": "../../../outside/secret.txt",
                "seed": {"a": 1},
                "duration_s": "x",
            }
        )
    )


@hostile
def a_provenance_of_many_resumes(run: Path, outside: Path) -> None:
    entries = [{"date": "2026", "tick": index} for index in range(40_000)]
    (run / "provenance.json").write_text(json.dumps({"resumes": entries, "started": "2026-01-01T00:00:00"}))


@hostile
def metrics_of_a_gigabyte(run: Path, outside: Path) -> None:
    with (run / "metrics.csv").open("r+b") as file:
        file.truncate(1_000_000_000)


@hostile
def metrics_of_ten_gigabytes(run: Path, outside: Path) -> None:
    with (run / "metrics.csv").open("r+b") as file:
        file.truncate(10_000_000_000)


@hostile
def metrics_of_nulls(run: Path, outside: Path) -> None:
    (run / "metrics.csv").write_bytes(b"tick,key,value\n" + b"\x00\n" * 100_000 + b"1,a\x00/b,1\n" * 1000)


@hostile
def metrics_of_odd_numbers(run: Path, outside: Path) -> None:
    ticks = ("1e308", "-1", "nan", "inf", "0x10", "1_0", "٣", "", "-1e308", "5e-324", "9" * 1_000)
    values = (*ticks, "=cmd|' /C calc'!A0", "1e309")
    lines = [f"{tick},classifier/loss,{value}\n{tick},val/accuracy,{value}\n" for tick in ticks for value in values]
    (run / "metrics.csv").write_text("tick,key,value\n" + "".join(lines))


@hostile
def metrics_with_html_in_their_keys(run: Path, outside: Path) -> None:
    keys = (
        HTML,
        f"classifier/{HTML}",
        ESCAPE,
        f"classifier/{ESCAPE}",
        "=1+1",
        "$x^2$/\\frac{1}{0}",
        "a/" + "x" * 1_900,
    )
    lines = [f'{tick},"{key}",{tick}\n' for tick in range(5) for key in keys]
    (run / "metrics.csv").write_text("tick,key,value\n" + "".join(lines))


@hostile
def metrics_of_many_lines(run: Path, outside: Path) -> None:
    (run / "metrics.csv").write_text("tick,key,value\n" + "1,classifier/loss,1\n" * 6_000_000)


@hostile
def metrics_of_many_problems(run: Path, outside: Path) -> None:
    lines = [f"{tick},p{index}/loss,1\n" for index in range(900) for tick in (1, 2)]
    (run / "metrics.csv").write_text("tick,key,value\n" + "".join(lines))


@hostile
def artifacts_of_odd_arrays(run: Path, outside: Path) -> None:
    for name, array in (
        ("fortran", np.asfortranarray(np.ones((3, 4)))),
        ("texts", np.array(["x" * 100] * 3)),
        ("times", np.array(["2026-01-01"], dtype="datetime64[D]")),
        ("records", np.zeros(3, dtype=[("a", "<f8"), ("b", "O")])),
        ("nothing", np.zeros((0, 3))),
        ("scalar", np.float64(3)),
        ("infinite", np.full(10, np.inf)),
        ("extreme", np.array([1e308, -1e308, 5e-324, np.nan])),
        ("complex", np.array([1j])),
        ("half", np.array([65504, -65504], dtype=np.float16)),
        ("whole", np.array([2**63 - 1, -(2**63)])),
    ):
        np.savez(run / "artifacts" / f"{name}.npz", loss=array, weight=array, clean=array, allow_pickle=True)


@hostile
def artifacts_of_lying_headers(run: Path, outside: Path) -> None:
    headers = (
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}",
        "{'descr': '<f8', 'fortran_order': True, 'shape': (10**9, 10**9)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (0, 1000000000000)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
        "__import__('os').mkdir('made')",
        "(" * 5_000,
        "{'descr': [('a', '<f8')] * 9, 'fortran_order': 3, 'shape': 'x'}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (True, 1)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "1," * 3_000 + ")}",
    )
    for index, header in enumerate(headers):
        with zipfile.ZipFile(run / "artifacts" / f"lying{index}.npz", "w") as archive:
            for name in ("loss", "weight"):
                content = header.encode() + b"\n"
                archive.writestr(
                    f"{name}.npy", b"\x93NUMPY\x01\x00" + len(content).to_bytes(2, "little") + content + bytes(64)
                )
    with zipfile.ZipFile(run / "artifacts" / "third.npz", "w") as archive:
        for name in ("loss", "weight"):
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x03\x00" + (2**32 - 1).to_bytes(4, "little") + b"{" * 100)


@hostile
def timelines_of_nonsense(run: Path, outside: Path) -> None:
    span = {"rank": 0, "batch": 0, "what": ESCAPE + HTML, "begin": 0.0, "end": 1.0}
    for index, content in enumerate(
        (
            {"stages": 256, "spans": [{**span, "rank": each % 256, "batch": each} for each in range(20_000)]},
            {"stages": 10**17, "spans": [span]},
            {"stages": 1, "spans": [{**span, "begin": "nan", "end": "inf"}]},
            {"stages": 1, "spans": [{**span, "batch": -(10**17), "what": "forward"}]},
            {"stages": 1, "spans": {"a": 1}},
            {"stages": 1, "spans": [{**span, "what": f"w{each}{HTML}"} for each in range(3_000)]},
        )
    ):  # fmt: skip
        (run / "artifacts" / f"parallel_{index}.json").write_text(json.dumps(content))


@hostile
def a_recipe_of_html(run: Path, outside: Path) -> None:
    (run / "recipe.yaml").write_text(f"</pre></details>{HTML}{ESCAPE}\n")
    (run / "overrides.txt").write_text(f"a={HTML}\n" * 1_000 + f"{ESCAPE}\n\x00\u202e\n")
    (run / "graph.mmd").write_text(f"graph TD\nclick a call alert()\n{HTML}\n")
