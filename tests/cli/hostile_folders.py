"""Run folders that a stranger could hand on: each builder spoils a whole, finished run.

A builder gets the run's folder and `outside`, a folder beside it with secret.txt, which must stay as it is and whose
text must not show anywhere. Add a function with `@hostile`, and every test takes it.
"""

import json
import os
import pickle
import shutil
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

Builder = Callable[[Path, Path], None]
FOLDERS: dict[str, Builder] = {}
SECRET = "the-secret-of-the-user"
LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
ESCAPE = "\x1b]0;owned\x07\x1b[2J"


def hostile(builder: Builder) -> Builder:
    FOLDERS[builder.__name__] = builder
    return builder


def _link(path: Path, target: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _change(file: Path, change: Callable[[Any], None]) -> None:
    is_yaml = file.suffix == ".yaml"
    content = (yaml.safe_load if is_yaml else json.loads)(file.read_text())
    change(content)
    file.write_text((yaml.safe_dump if is_yaml else json.dumps)(content))


@hostile
def texts_behind_links(run: Path, outside: Path) -> None:
    for name in ("recipe.yaml", "overrides.txt", "config.yaml", "summary.json", "provenance.json"):
        _link(run / name, outside / "secret.txt")


@hostile
def a_recipe_behind_a_link(run: Path, outside: Path) -> None:
    for name in ("recipe.yaml", "overrides.txt"):
        _link(run / name, outside / "secret.txt")


@hostile
def pages_behind_links(run: Path, outside: Path) -> None:
    _link(run / "report.html", outside / "secret.txt")
    _link(run / "report", outside)


@hostile
def pictures_behind_links(run: Path, outside: Path) -> None:
    (run / "report").mkdir(exist_ok=True)
    for file in [*(run / "report").iterdir(), run / "report" / "loss-classifier.svg"]:
        _link(file, outside / "secret.txt")


@hostile
def dangling_links(run: Path, outside: Path) -> None:
    for name in ("report.html", "metrics.csv", "summary.json", "sweep.csv", "report"):
        _link(run / name, outside / "new" / name)


@hostile
def metrics_behind_a_link(run: Path, outside: Path) -> None:
    shutil.copy(run / "metrics.csv", outside / "metrics.csv")
    _link(run / "metrics.csv", outside / "metrics.csv")


@hostile
def metrics_of_another_by_a_hard_link(run: Path, outside: Path) -> None:
    for name in ("metrics.csv", "report.html", "provenance.json"):
        (run / name).unlink(missing_ok=True)
        os.link(outside / "secret.txt", run / name)


@hostile
def checkpoints_behind_a_link(run: Path, outside: Path) -> None:
    shutil.copytree(run / "checkpoints", outside / "checkpoints")
    _link(run / "checkpoints", outside / "checkpoints")


@hostile
def loggers_behind_links(run: Path, outside: Path) -> None:
    for name in ("wandb", "tensorboard", "artifacts"):
        _link(run / name, outside)


@hostile
def hparams_behind_a_link(run: Path, outside: Path) -> None:
    (run / "tensorboard").mkdir(exist_ok=True)
    _link(run / "tensorboard" / "hparams.yaml", outside / "hparams.yaml")


@hostile
def circles_of_links(run: Path, outside: Path) -> None:
    _link(run / "config.yaml", Path("config.yaml"))
    _link(run / "report", Path("report"))


@hostile
def pipes(run: Path, outside: Path) -> None:
    for name in ("config.yaml", "summary.json", "metrics.csv", "recipe.yaml", "artifacts/weights.npz"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)


@hostile
def a_pipe_as_a_checkpoint(run: Path, outside: Path) -> None:
    for file in (run / "checkpoints").iterdir():
        file.unlink()
        os.mkfifo(file)


@hostile
def a_socket_as_the_summary(run: Path, outside: Path) -> None:
    (run / "summary.json").unlink()
    here = Path.cwd()
    # The name of a socket is short.
    os.chdir(run)
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind("summary.json")
    os.chdir(here)


@hostile
def folders_in_the_place_of_files(run: Path, outside: Path) -> None:
    for name in ("config.yaml", "summary.json", "report.html"):
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()


@hostile
def a_billion_laughs(run: Path, outside: Path) -> None:
    (run / "config.yaml").write_text(LAUGHS)


@hostile
def a_config_of_20_megabytes(run: Path, outside: Path) -> None:
    (run / "config.yaml").write_text("a: [" + "x, " * 7_000_000 + "]\n")


@hostile
def a_config_with_a_tag(run: Path, outside: Path) -> None:
    (run / "config.yaml").write_text(f"seed: !!python/object/apply:os.mkdir [{outside / 'made'}]\n")


@hostile
def a_config_that_looks_elsewhere(run: Path, outside: Path) -> None:
    _change(run / "config.yaml", lambda config: config["data"].update(root=str(outside)))


@hostile
def a_config_that_downloads(run: Path, outside: Path) -> None:
    _change(run / "config.yaml", lambda config: config["data"].update(download=True))


@hostile
def a_config_that_calls(run: Path, outside: Path) -> None:
    node = {"_target_": "os.mkdir", "path": str(outside / "made")}
    _change(run / "config.yaml", lambda config: config["problems"]["classifier"].update(module=node))


@hostile
def a_config_of_other_types(run: Path, outside: Path) -> None:
    (run / "config.yaml").write_text("problems: 3\nrunner: [1]\nevaluate: x\ngraph: {a: {b: {c: 1}}}\nname: {a: b}\n")


@hostile
def deep_json(run: Path, outside: Path) -> None:
    (run / "summary.json").write_text("[" * 500_000)
    (run / "provenance.json").write_text('{"a":' * 300_000)


@hostile
def numbers_without_end(run: Path, outside: Path) -> None:
    text = (
        '{"status": "finished", "num_ticks": DIGITS, "training_s": 1e999, "error": NaN, "metrics": {"a/b": DIGITS}, '
        '"objective": {"key": "val/accuracy", "value": DIGITS}, "best": {"tick": DIGITS, "metrics": {"a/b": -1e999}}}'
    )
    (run / "summary.json").write_text(text.replace("DIGITS", "9" * 100_000))


@hostile
def a_summary_of_wrong_types(run: Path, outside: Path) -> None:
    (run / "summary.json").write_text(
        '{"status": "finished", "num_ticks": "x", "objective": 3, "metrics": [], "best": 1}'
    )
    (run / "provenance.json").write_text('{"versions": 3, "resumes": "x", "started": [], "git": 0}')


@hostile
def texts_of_megabytes(run: Path, outside: Path) -> None:
    _change(run / "summary.json", lambda summary: summary.update(status="failed", error="x" * 1_900_000))
    (run / "recipe.yaml").write_text("# x\n" * 10_000_000)


@hostile
def commands_to_the_terminal(run: Path, outside: Path) -> None:
    _change(run / "summary.json", lambda summary: summary.update(status=ESCAPE, error=ESCAPE, metrics={ESCAPE: 1.0}))
    _change(run / "config.yaml", lambda config: config.update(name="x"))
    (run / "overrides.txt").write_text(f"seed={ESCAPE}\n")
    (run / "artifacts" / f"{ESCAPE}.npz").write_text("x")


@hostile
def a_line_of_metrics_without_end(run: Path, outside: Path) -> None:
    (run / "metrics.csv").write_text("tick,key,value\n" + "1," * 20_000_000)


@hostile
def keys_without_end(run: Path, outside: Path) -> None:
    (run / "metrics.csv").write_text("tick,key,value\n" + "".join(f"1,classifier/k{i},1\n" for i in range(300_000)))


@hostile
def a_quote_without_end(run: Path, outside: Path) -> None:
    (run / "metrics.csv").write_text('tick,key,value\n1,"' + "x\n" * 2_000_000)


@hostile
def an_artifact_that_unpacks_without_end(run: Path, outside: Path) -> None:
    with zipfile.ZipFile(run / "artifacts" / "weights.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("loss", "weight"):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(
                    member, {"descr": "<f8", "fortran_order": False, "shape": (60_000_000,)}
                )
                for _ in range(60):
                    member.write(bytes(8_000_000))


@hostile
def an_artifact_that_claims_without_end(run: Path, outside: Path) -> None:
    with zipfile.ZipFile(run / "artifacts" / "weights.npz", "w") as archive:
        for name, descr in (("loss", "<f8"), ("weight", "|V0")):
            with archive.open(f"{name}.npy", "w") as member:
                header = {"descr": descr, "fortran_order": False, "shape": (10**13,)}
                np.lib.format.write_array_header_1_0(member, header)


@hostile
def an_artifact_with_a_pickle(run: Path, outside: Path) -> None:
    array = np.array([_Call(outside / "made")], dtype=object)
    np.savez(run / "artifacts" / "weights.npz", loss=array, weight=array)


@hostile
def a_checkpoint_with_a_pickle(run: Path, outside: Path) -> None:
    for file in (run / "checkpoints").iterdir():
        torch.save({"mlotool": _Call(outside / "made")}, file)


@hostile
def a_checkpoint_that_unpacks_without_end(run: Path, outside: Path) -> None:
    for file in (run / "checkpoints").iterdir():
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x/data.pkl", "w") as member:
            for _ in range(300):
                member.write(bytes(1_000_000))


@hostile
def a_checkpoint_that_expands(run: Path, outside: Path) -> None:
    for file in (run / "checkpoints").iterdir():
        content = torch.load(file, weights_only=True)
        state = content["mlotool"]["program"]["classifier"]["module"]
        for key in state:
            state[key] = torch.zeros(1).expand(10**12)
        torch.save(content, file)


@hostile
def a_checkpoint_of_other_shapes(run: Path, outside: Path) -> None:
    for file in (run / "checkpoints").iterdir():
        content = torch.load(file, weights_only=True)
        state = content["mlotool"]["program"]["classifier"]["module"]
        content["mlotool"]["program"]["classifier"]["module"] = {"x": torch.zeros(3), **state, next(iter(state)): 3}
        torch.save(content, file)


@hostile
def a_checkpoint_of_wrong_types(run: Path, outside: Path) -> None:
    for file in (run / "checkpoints").iterdir():
        torch.save({"mlotool": {"program": 3, "tick": -(10**30), "metrics": {"a": []}, "metrics_position": -5}}, file)


@hostile
def nodes_behind_a_link(run: Path, outside: Path) -> None:
    _link(run / "nodes.json", outside / "secret.txt")


@hostile
def nodes_that_are_a_pipe(run: Path, outside: Path) -> None:
    os.mkfifo(run / "nodes.json")


@hostile
def nodes_of_a_tangle(run: Path, outside: Path) -> None:
    names = [f"{ESCAPE}<script>{number}" for number in range(1_500)]
    nodes = [
        {"id": name, "kind": ESCAPE, "inputs": names[max(0, number - 8) : number], "shape": [1], "mutator": "m"}
        for number, name in enumerate(names)
    ]
    decisions = [{"name": name, "value": name, "candidates": names[:50]} for name in names[:90]]
    content = {"problems": {"classifier": {"nodes": nodes, "decisions": decisions, "num_parameters": 10**400}}}
    (run / "nodes.json").write_text(json.dumps(content))


@hostile
def nodes_of_two_rows(run: Path, outside: Path) -> None:
    begin = [{"id": f"a{number}", "kind": "a", "inputs": [], "shape": None, "mutator": "m"} for number in range(45)]
    names = [each["id"] for each in begin]
    end = [{"id": f"b{number}", "kind": "b", "inputs": names, "shape": None, "mutator": "m"} for number in range(44)]
    (run / "nodes.json").write_text(json.dumps({"problems": {"classifier": {"nodes": begin + end}}}))


@hostile
def a_checkpoint_with_another_end(run: Path, outside: Path) -> None:
    for file in (run / "checkpoints").iterdir():
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("x", b"y")


@hostile
def a_checkpoint_behind_a_link(run: Path, outside: Path) -> None:
    for file in (run / "checkpoints").iterdir():
        shutil.copy(file, outside / file.name)
        _link(file, outside / file.name)


class _Call:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


assert pickle.dumps(_Call(Path("x")))
