"""What a stranger could hand on: recipes, and builders that spoil a whole run, or a whole sweep of two jobs.

A builder gets the folder and `outside`, a folder beside it with secret.txt, which must stay as it is and whose text
must not show anywhere. A function with `@run` or `@sweep` is taken by every test of its kind. Of a recipe it is said
what it tries, and what the refusal has to name: CANARY is a path outside the working folder, SECRET an environment
variable; what a target makes is `here`, inside it.
"""

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

Builder = Callable[[Path, Path], None]
RUNS: dict[str, Builder] = {}
SWEEPS: dict[str, Builder] = {}
SECRET = "the-secret-of-the-user"
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
HTML = "<script>alert(1)</script><img src=x onerror=alert(1)>"
TEXTS = ("config.yaml", "summary.json", "provenance.json", "metrics.csv", "recipe.yaml", "overrides.txt")


def run(builder: Builder) -> Builder:
    RUNS[builder.__name__] = builder
    return builder


def sweep(builder: Builder) -> Builder:
    SWEEPS[builder.__name__] = builder
    return builder


def _free(path: Path) -> Path:
    """Remove what stands there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    return path


def _link(path: Path, target: Path) -> None:
    _free(path).symlink_to(target)


def _change(file: Path, change: Callable[[Any], object]) -> None:
    load, dump = (yaml.safe_load, yaml.safe_dump) if file.suffix == ".yaml" else (json.loads, json.dumps)
    content = load(file.read_text())
    change(content)
    file.write_text(dump(content))


# Links: where they stand, and where they lead, seen from `outside`.
LINKS = {
    "texts_behind_links": dict(zip(TEXTS, ["secret.txt", "/proc/self/environ", "/dev/zero"] * 2, strict=True)),
    "pages_behind_links": {"report.html": "secret.txt", "report": ""},
    "places_that_loggers_write_to": dict.fromkeys(("wandb", "tensorboard", "artifacts"), ""),
}
LINKS_OF_SWEEPS = {
    "records_behind_links": dict.fromkeys(("plan.json", "multirun.yaml", "sweep.json", "0/summary.json"), "secret.txt"),
    "notes_behind_links": dict.fromkeys(("fusion/0.json", "0/overrides.txt"), "secret.txt"),
    "tables_behind_links": dict.fromkeys(("sweep.csv", "settings.csv", "sweep.html", ".lock"), "secret.txt"),
    "another_folder_as_a_job": {"0": ""},
}
PIPES = (*TEXTS, "nodes.json", "artifacts/weights.npz", "checkpoints/last.ckpt", "checkpoints/best.ckpt")
PIPES_OF_SWEEPS = ("plan.json", "multirun.yaml", ".lock", "study.db", "0/summary.json", "1/metrics.csv")
# Configs: what is changed in them.
CONFIGS: dict[str, Callable[[Any, Path], object]] = {
    "a_config_that_looks_elsewhere": lambda config, outside: config["data"].update(root=str(outside)),
    "a_config_that_downloads": lambda config, outside: config["data"].update(download=True),
    "a_config_that_reads_the_environment": lambda config, outside: config.update(objective="${oc.env:HOME}"),
    "a_config_that_calls": lambda config, outside: config["problems"]["classifier"].update(
        module={"_target_": "os.mkdir", "path": str(outside / "made")}
    ),
    "a_config_of_a_model_larger_than_its_checkpoint": lambda config, outside: config["problems"]["classifier"][
        "module"
    ].update(hidden=[9_000, 9_000]),
}


def _linked(places: Mapping[str, str], folder: Path, outside: Path) -> None:
    for name, target in places.items():
        (folder / name).parent.mkdir(exist_ok=True)
        _link(folder / name, outside / target)


def _piped(names: Sequence[str], folder: Path, outside: Path) -> None:
    for name in names:
        os.mkfifo(_free(folder / name))


def _changed(change: Callable[[Any, Path], object], folder: Path, outside: Path) -> None:
    _change(folder / "config.yaml", lambda config: change(config, outside))


RUNS |= {name: partial(_linked, places) for name, places in LINKS.items()}
RUNS |= {"pipes": partial(_piped, PIPES), **{name: partial(_changed, change) for name, change in CONFIGS.items()}}
SWEEPS |= {name: partial(_linked, places) for name, places in LINKS_OF_SWEEPS.items()}
SWEEPS |= {"pipes_in_a_sweep": partial(_piped, PIPES_OF_SWEEPS)}


@run
def checkpoints_behind_links(folder: Path, outside: Path) -> None:
    shutil.copytree(folder / "checkpoints", outside / "checkpoints")
    _link(folder / "checkpoints", outside / "checkpoints")


@run
def names_of_commands(folder: Path, outside: Path) -> None:
    for name in (ESCAPE, "a\nb", "'\"`$(touch made)`", "${oc.env:HOME}", os.fsdecode(b"\xff\xfe")):
        for place in (f"artifacts/{name}.npz", f"artifacts/parallel_{name}.json", f"checkpoints/{name}.ckpt"):
            (folder / place).write_text("x")


@run
def a_billion_laughs(folder: Path, outside: Path) -> None:
    (folder / "config.yaml").write_text(LAUGHS)


@run
def texts_of_other_types(folder: Path, outside: Path) -> None:
    (folder / "config.yaml").write_text("problems: 3\nrunner: [1]\nevaluate: x\ngraph: {a: {b: 1}}\nname: {a: b}\n")
    (folder / "summary.json").write_text('{"status": "finished", "num_ticks": "x", "objective": 3, "best": 1}')
    (folder / "provenance.json").write_text('{"versions": 3, "resumes": "x", "started": [], "git": 0}')
    (folder / "nodes.json").write_text('{"problems": {"a": [3]}}')


@run
def commands_to_the_terminal_and_markup(folder: Path, outside: Path) -> None:
    text = ESCAPE + HTML
    metrics = {"status": text, "error": text, "metrics": {text: 1.0}}
    _change(folder / "summary.json", lambda summary: summary.update(metrics))
    (folder / "overrides.txt").write_text(f"seed={text}\n")
    (folder / "recipe.yaml").write_text(f"</pre></details>{text}\n")
    (folder / "metrics.csv").write_text("tick,key,value\n" + f'1,"classifier/{text}",1\n' * 3)
    node = {"id": text, "kind": text, "inputs": [], "shape": [1], "mutator": text}
    (folder / "nodes.json").write_text(json.dumps({"problems": {text: {"nodes": [node], "num_parameters": 10**400}}}))


@run
def texts_without_end(folder: Path, outside: Path) -> None:
    digits = '{"status": "finished", "num_ticks": D, "metrics": {"a/b": D}, "objective": {"key": "a", "value": D}}'
    (folder / "summary.json").write_text(digits.replace("D", "9" * 100_000))
    (folder / "provenance.json").write_text('{"a":' * 300_000)
    (folder / "recipe.yaml").write_text("# x\n" * 10_000_000)
    keys = "".join(f"1,classifier/k{index},1\n" for index in range(30_000))
    (folder / "metrics.csv").write_text(f"tick,key,value\n{keys}{'1,' * 10_000_000}\n")


@run
def artifacts_that_lie(folder: Path, outside: Path) -> None:
    array = np.array([_Made(outside / "made")], dtype=object)
    np.savez(folder / "artifacts" / "pickle.npz", loss=array, weight=array)
    for name, shape, num in (("zeros", (60_000_000,), 60), ("claims", (10**13,), 0)):
        with zipfile.ZipFile(folder / "artifacts" / f"{name}.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            for part in ("loss", "weight"):
                with archive.open(f"{part}.npy", "w", force_zip64=True) as member:
                    header = {"descr": "<f8", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(member, header)
                    for _ in range(num):
                        member.write(bytes(8_000_000))


# Checkpoints.
def _checkpoints(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change our part of each."""
    for file in (folder / "checkpoints").glob("*.ckpt"):
        content = torch.load(file, weights_only=True)
        change(content["mlotool"])
        torch.save(content, file)


@run
def a_checkpoint_with_a_pickle(folder: Path, outside: Path) -> None:
    for file in (folder / "checkpoints").iterdir():
        torch.save({"mlotool": _Made(outside / "made")}, file)


@run
def a_checkpoint_of_two_lists(folder: Path, outside: Path) -> None:
    """Two zip files, one behind the other: who reads from the front finds another one than who reads from the end."""
    for file in (folder / "checkpoints").iterdir():
        evil = io.BytesIO()
        torch.save({"mlotool": _Made(outside / "made")}, evil)
        file.write_bytes(evil.getvalue() + file.read_bytes())


@run
def a_checkpoint_that_unpacks_without_end(folder: Path, outside: Path) -> None:
    for file in (folder / "checkpoints").iterdir():
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x/data.pkl", "w") as member:
            for _ in range(300):
                member.write(bytes(1_000_000))


@run
def a_checkpoint_that_expands(folder: Path, outside: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        module = state["program"]["classifier"]["module"]
        module.update({key: torch.zeros(1).expand(10**12) for key in module})

    _checkpoints(folder, change)


@run
def a_checkpoint_of_lists_in_lists(folder: Path, outside: Path) -> None:
    laughs: Any = "x"
    for _ in range(40):
        laughs = [laughs] * 10
    _checkpoints(folder, lambda state: state.update(tick=laughs, metrics={"a/b": laughs}))


# Sweeps.
def _plan(folder: Path, **changes: Any) -> None:
    plan = {"objective": "val/accuracy", "mode": "max", "num_jobs": 2, "keys": {"seed": {"num_values": 2}}}
    (folder / "plan.json").write_text(json.dumps({**plan, **changes}))


def _summaries(folder: Path, **changes: Any) -> None:
    for file in folder.glob("*/summary.json"):
        _change(file, lambda summary: summary.update(changes))


@sweep
def records_without_end(folder: Path, outside: Path) -> None:
    (folder / "multirun.yaml").write_text(LAUGHS)
    (folder / "plan.json").write_text('{"keys":' * 100_000)
    (folder / "sweep.json").write_text('{"keys": {' + ", ".join(f'"k{i}": {{}}' for i in range(1_000_000)) + "}}")


@sweep
def more_jobs_than_atoms(folder: Path, outside: Path) -> None:
    _plan(folder, num_jobs=10**14, keys={"seed": {"num_values": 10**14}, "lr": {"num_values": 10**14}})
    _summaries(folder, objective={"key": "val/accuracy", "value": 1.7e308, "mode": "max"})


@sweep
def scripts_formulas_and_commands(folder: Path, outside: Path) -> None:
    text = f"</script>{HTML}\"'&{ESCAPE}\u202e[/red]"
    _summaries(folder, status=text, error=text, metrics={text: 1.0}, objective={"key": text, "value": 1, "mode": "max"})
    _plan(folder, objective=text, keys={text: {"num_values": 2}})
    for number in range(2):
        words = f"{text}={number}{text}\na==HYPERLINK(1)\nc=+cmd|' /C calc'!A{number}\nseed={text}{number}\n"
        (folder / str(number) / "overrides.txt").write_text(words)
    stack = {"jobs": [0, 1], "is_fused": False, "fused_s": "1", "alone_s": 1e308, "reason": text}
    (folder / "fusion").mkdir()
    (folder / "fusion" / "0.json").write_text(json.dumps({"stacks": [stack] * 50}))


@sweep
def names_that_are_no_texts(folder: Path, outside: Path) -> None:
    (folder / "1").rename(Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe1")))


class _Made:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


"""Recipes that a stranger could hand on: what each tries, and what the refusal has to name; a few rows a rule.

CANARY is a path outside the working folder, SECRET an environment variable; what a target makes is `here`, inside it.
"""

HEADER = "# @package _global_\n# Harmless.\n"
BASE = "defaults: [plain, _self_]\n"
LAUGHS = "a: &a [x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def _classifier(part: str) -> str:
    return f"problems: {{classifier: {{{part}}}}}"


# What each is: (lines behind the header, words that the message must hold).
HYDRA = {
    "callback": ("hydra: {callbacks: {x: {_target_: os.mkdir, path: CANARY}}}", ["hydra.callbacks"]),
    "run-folder": ("hydra: {run: {dir: CANARY}}", ["hydra.run"]),
    "searchpath": ("hydra: {searchpath: ['file://CANARY']}", ["hydra.searchpath"]),
    "sweep-of-hydra": ("hydra: {sweeper: {params: {hydra.run.dir: CANARY}}}", ["hydra.run.dir"]),
    "sweep-of-upload": ("hydra: {sweeper: {params: {logger.mode: 'online,offline'}}}", ["logger.mode"]),
}
DEFAULTS = {
    "hydra-group": ("defaults: [plain, {/hydra/callbacks: x}]", ["hydra/callbacks"]),
    "recipe-as-logger": ("defaults: [plain, parts/upload@logger]", ["package 'logger'"]),
    "parent": ("defaults: [../../outside]", ["../../outside"]),
    "file-scheme": ("defaults: ['file:///etc/x']", ["file:"]),
    "environment": ("defaults: ['${oc.env:SECRET}']", ["oc.env"]),
    "circle": ("defaults: [plain, hostile]", ["twice", "hostile"]),
    "choices": (
        "defaults:\n- plain\n" + "".join(f"- /model@problems.q{i}.module: mlp\n" for i in range(200)),
        ["recipes and options"],
    ),
}
YAML = {
    "python-apply": ("seed: !!python/object/apply:os.mkdir [CANARY]", ["python/object/apply:os.mkdir"]),
    "billion-laughs": (LAUGHS, ["aliases", "1000"]),
    "self-alias": ("a: &a [*a]", ["40 levels"]),
    "deep": ("a: " + "[" * 500 + "]" * 500, ["40 levels"]),
    "large": ("# x\n" * 40_000, ["100000 bytes"]),
    "long-number": (f"seed: {'9' * 5_000}", ["999", "2000"]),
    "escape-sequence": ('name: "\\e]0;owned\\a"', ["\\x1b]0;owned"]),
}
REFERENCES = {
    "environment": ("data: {root: '${oc.env:SECRET}'}", ["data.root", "oc.env"]),
    "hydra-node": ("objective: '${hydra.runtime.cwd}'", ["hydra.runtime.cwd"]),
    "inside-select": ("objective: '${oc.select:seed,${oc.env:SECRET}}'", ["oc.env"]),
    "node-laughs": (
        "analyses:\n  a0: [x, x, x, x]\n"
        + "".join(f"  a{i}: ['${{analyses.a{i - 1}}}', '${{analyses.a{i - 1}}}']\n" for i in range(1, 40)),
        ["references", "analyses.a"],
    ),
    "circle": ("analyses: {a: '${analyses.b}', b: '${analyses.a}'}", ["analyses.a"]),
    "whole-logger": ("logger: '${analyses.x}'\nanalyses: {x: {mode: online}}", ["logger", "${analyses.x}"]),
}
PLACES = {
    "name-outside": ("name: ../../outside", ["../../outside"]),
    "upload": ("logger: {mode: online}", ["logger.mode", "online"]),
    "root-absolute": ("data: {root: /etc}", ["data.root", "/etc"]),
    "loader": ("data: {loader: torch.load}", ["data.loader", "torch.load"]),
    "weights-only": (_classifier("module: {weights_only: false}"), ["weights_only", "False"]),
    "download": ("data: {download: true}", ["data.download", "True"]),
}
TARGETS = {
    **{
        name: (_classifier(f"loss: {{_target_: '{name}', path: here}}"), ["classifier.loss._target_", name])
        for name in ("os.mkdir", "builtins.eval", "torch.load", "torch.nn.Linear.__init__", "torch.nn.linear",
                     "mlotool.config.provenance.subprocess.run", "mlotool.losses.cross_entropy.__globals__")
    },
    "nested": (
        _classifier("module: {inner: [{x: {_target_: os.mkdir, path: here}}]}"), ["module.inner[0].x._target_"],
    ),
    "layer": (
        _classifier("module: {_target_: torch.nn.Sequential, _args_: [{_target_: os.mkdir}]}"), ["_args_[0]._target_"],
    ),
    "partial": (_classifier("module: {_partial_: true}"), ["module._partial_", "True"]),
    "referred": ("data: {_target_: '${analyses.x}'}\nanalyses: {x: os.mkdir}", ["data._target_", "os.mkdir"]),
}  # fmt: skip
OPERATOR = "_target_: mlotool.spaces.Operator, name: kernel, at: {type: ReLU}, candidates: {k: null}"


def _space(mutator: str = OPERATOR, decisions: str = "{}") -> str:
    base = "{_target_: mlotool.models.MLP, image_shape: [1, 8, 8], hidden: [8, 8], num_classes: 10}"
    space = f"{{_target_: mlotool.spaces.Space, base: {base}, inputs: [1, 8, 8], mutators: [{{{mutator}}}]}}"
    return f"{_classifier(f'module: {space}')}\ndecisions: {decisions}"


SPACES = {
    "predicate": (
        _space(OPERATOR.replace("{type: ReLU}", "{where: {_target_: os.mkdir, path: here}}")),
        ["mutators[0].at.where._target_", "os.mkdir"],
    ),
    "candidate": (
        _space(OPERATOR.replace("{k: null}", "{k: {_target_: os.mkdir, path: here}}")), ["candidates.k._target_"],
    ),
    "large-candidate": (
        _space(OPERATOR.replace("k: null", "k: {_target_: torch.nn.Linear, out_features: 1000000000000}")),
        ["mutators[0].candidates.k: torch.nn", "cannot be built"],
    ),
    "counts": (
        _space("_target_: mlotool.spaces.Repeat, name: m, at: {type: ReLU}, counts: [1, 1000000000]"), ["1000"],
    ),
    "decision-path": (_space(decisions="{kernel_0: ../../etc/passwd}"), ["decisions.kernel_0", "../../etc/passwd"]),
}  # fmt: skip


def _many(lines: str, num: int, end: str = "\n") -> str:
    return end.join(lines.replace("#", str(index)) for index in range(num))


# Small files that cost Hydra, OmegaConf or our own checks much more than their size, as they once did.
LARGE = {
    "problems-by-alias": ("analyses: {x: &a {}}\nproblems:\n" + _many("  p#: *a", 130), ["nothing is set"]),
    "edges": (
        "graph: {lower_to_upper: {x: &a [" + _many("q#", 80, ", ") + "], " + _many("b#: *a", 9, ", ") + "}}",
        ["... and"],
    ),
    "metrics": ("evaluate: {metrics: [" + _many("accurac#", 850, ", ") + "]}", ["and 830 more"]),
}
RECIPES: dict[str, tuple[str, list[str]]] = {
    f"{kind}:{name}": (lines if "defaults:" in lines else BASE + lines, words)
    for kind, group in (
        ("hydra", HYDRA), ("defaults", DEFAULTS), ("yaml", YAML), ("references", REFERENCES), ("places", PLACES),
        ("targets", TARGETS), ("spaces", SPACES), ("large", LARGE),
    )
    for name, (lines, words) in group.items()
}  # fmt: skip
