"""What a stranger could hand on: recipes, and builders that spoil a whole run, or a whole sweep of two jobs.

A builder gets the folder and `outside`, a folder beside it with secret.txt, which must stay as it is and whose text
must not show anywhere. A function with `@run` or `@sweep` is taken by every test of its kind. Of a recipe it is said
what it tries, and what the refusal has to name: CANARY is a path outside the working folder, SECRET an environment
variable; what a target makes is `here`, inside it.
"""

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
packed = partial(zipfile.ZipFile, mode="w", compression=zipfile.ZIP_DEFLATED, compresslevel=1)
SECRET = "the-secret-of-the-user"
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
HTML = "<script>alert(1)</script><img src=x onerror=alert(1)>"
LAUGHS = "a: &a [x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
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
}

DIGITS = '{"status": "finished", "num_ticks": D, "metrics": {"a/b": D}, "objective": {"key": "a", "value": D}}'
KEYS = "".join(f"1,classifier/k{index},1\n" for index in range(3_000))
# Files with another text.
TEXTS_OF_RUNS = {
    "a_billion_laughs": {"config.yaml": LAUGHS},
    "texts_of_other_types": {
        "config.yaml": "problems: 3\nrunner: [1]\nevaluate: x\ngraph: {a: {b: 1}}\nname: {a: b}\n",
        "summary.json": '{"status": "finished", "num_ticks": "x", "objective": 3, "best": 1}',
        "provenance.json": '{"versions": 3, "resumes": "x", "started": [], "git": 0}',
        "nodes.json": '{"problems": {"a": [3]}}',
    },
    "texts_without_end": {
        "summary.json": DIGITS.replace("D", "9" * 100_000),
        "provenance.json": '{"a":' * 300_000,
        "recipe.yaml": "# x\n" * 1_000_000,
        "metrics.csv": f"tick,key,value\n{KEYS}{'1,' * 1_000_000}\n",
    },
}
ENDLESS = {
    "multirun.yaml": LAUGHS,
    "plan.json": '{"keys":' * 100_000,
    "sweep.json": '{"keys": {' + ", ".join(f'"k{i}": {{}}' for i in range(200_000)) + "}}",
}


def _written(texts: Mapping[str, str], folder: Path, outside: Path) -> None:
    for name, text in texts.items():
        (folder / name).write_text(text)


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
RUNS |= {name: partial(_written, texts) for name, texts in TEXTS_OF_RUNS.items()}
RUNS |= {"pipes": partial(_piped, PIPES), **{name: partial(_changed, change) for name, change in CONFIGS.items()}}
SWEEPS |= {name: partial(_linked, places) for name, places in LINKS_OF_SWEEPS.items()}
SWEEPS |= {"pipes_in_a_sweep": partial(_piped, PIPES_OF_SWEEPS), "records_without_end": partial(_written, ENDLESS)}


@run
def checkpoints_behind_links(folder: Path, outside: Path) -> None:
    shutil.copytree(folder / "checkpoints", outside / "checkpoints")
    _link(folder / "checkpoints", outside / "checkpoints")


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
def artifacts_that_lie_by_names_of_commands(folder: Path, outside: Path) -> None:
    for name in (ESCAPE, "a\nb", "'\"`$(touch made)`", "${oc.env:HOME}", os.fsdecode(b"\xff\xfe")):
        for place in (f"artifacts/{name}.npz", f"artifacts/parallel_{name}.json", f"checkpoints/{name}.ckpt"):
            (folder / place).write_text("x")
    array = np.array([_Made(outside / "made")], dtype=object)
    np.savez(folder / "artifacts" / "pickle.npz", loss=array, weight=array)
    for name, shape, num in (("zeros", (26_000_000,), 26), ("claims", (10**13,), 0)):
        with packed(folder / "artifacts" / f"{name}.npz") as archive:
            for part in ("loss", "weight"):
                with archive.open(f"{part}.npy", "w", force_zip64=True) as member:
                    header = {"descr": "<f8", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(member, header)
                    for _ in range(num):
                        member.write(bytes(8_000_000))


def pickle(file: Path, outside: Path) -> None:
    torch.save({"mlotool": _Made(outside / "made")}, file)


def of_two_lists(file: Path, outside: Path) -> None:
    """Two zip files, one behind the other: who reads from the front finds another one than who reads from the end."""
    whole = file.read_bytes()
    pickle(file, outside)
    file.write_bytes(file.read_bytes() + whole)


def unpacks_without_end(file: Path, outside: Path) -> None:
    with packed(file) as archive:
        archive.writestr("x/data.pkl", bytes(30_000_000))


def of_lists_in_lists(file: Path, outside: Path) -> None:
    content, laughs = torch.load(file, weights_only=True), list[Any]()
    for _ in range(40):
        laughs = [laughs] * 10
    content["mlotool"].update(tick=laughs, metrics={"a/b": laughs})
    torch.save(content, file)


def _spoiled(spoil: Callable[[Path, Path], None], folder: Path, outside: Path) -> None:
    for file in (folder / "checkpoints").glob("*.ckpt"):
        spoil(file, outside)


CHECKPOINTS = (pickle, of_two_lists, unpacks_without_end, of_lists_in_lists)
RUNS |= {f"a_checkpoint_{spoil.__name__}": partial(_spoiled, spoil) for spoil in CHECKPOINTS}


# Sweeps.
def _plan(folder: Path, **changes: Any) -> None:
    plan = {"objective": "val/accuracy", "mode": "max", "num_jobs": 2, "keys": {"seed": {"num_values": 2}}}
    (folder / "plan.json").write_text(json.dumps({**plan, **changes}))


def _summaries(folder: Path, **changes: Any) -> None:
    for file in folder.glob("*/summary.json"):
        _change(file, lambda summary: summary.update(changes))


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


class _Made:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


HEADER = "# @package _global_\n# Harmless.\n"


def _classifier(part: str) -> str:
    return f"problems: {{classifier: {{{part}}}}}"


# What each is: (lines behind the header, words that the message must hold). What is refused before Hydra reads a file
# has its rows in tests/config/security/test_safety.py, and names that are not trusted in test_trusted.py.
RECIPES: dict[str, tuple[str, list[str]]] = {
    "callback": ("hydra: {callbacks: {x: {_target_: os.mkdir, path: CANARY}}}", ["hydra.callbacks"]),
    "sweep-of-upload": ("hydra: {sweeper: {params: {logger.mode: 'online,offline'}}}", ["logger.mode"]),
    "recipe-as-logger": ("defaults: [plain, parts/upload@logger]", ["package 'logger'"]),
    "circle-of-recipes": ("defaults: [plain, hostile]", ["twice", "hostile"]),
    "choices": (
        "defaults:\n- plain\n" + "".join(f"- /model@problems.q{i}.module: mlp\n" for i in range(200)),
        ["recipes and options"],
    ),
    "python-apply": ("seed: !!python/object/apply:os.mkdir [CANARY]", ["python/object/apply:os.mkdir"]),
    "environment": ("data: {root: '${oc.env:SECRET}'}", ["data.root", "oc.env"]),
    "node-laughs": (
        "analyses:\n  a0: [x, x, x, x]\n"
        + "".join(f"  a{i}: ['${{analyses.a{i - 1}}}', '${{analyses.a{i - 1}}}']\n" for i in range(1, 40)),
        ["references", "analyses.a"],
    ),
    "circle": ("analyses: {a: '${analyses.b}', b: '${analyses.a}'}", ["analyses.a"]),
    "whole-logger": ("logger: '${analyses.x}'\nanalyses: {x: {mode: online}}", ["logger", "${analyses.x}"]),
    "upload": ("logger: {mode: online}", ["logger.mode", "online"]),
    "target": (_classifier("loss: {_target_: os.mkdir, path: here}"), ["classifier.loss._target_", "os.mkdir"]),
    "partial": (_classifier("module: {_partial_: true}"), ["module._partial_", "True"]),
    "referred": ("data: {_target_: '${analyses.x}'}\nanalyses: {x: os.mkdir}", ["data._target_", "os.mkdir"]),
}  # fmt: skip
OPERATOR = "_target_: mlotool.spaces.Operator, name: kernel, at: {type: ReLU}, candidates: {k: null}"


def _space(mutator: str) -> str:
    base = "{_target_: mlotool.models.MLP, image_shape: [1, 8, 8], hidden: [8, 8], num_classes: 10}"
    space = f"{{_target_: mlotool.spaces.Space, base: {base}, inputs: [1, 8, 8], mutators: [{{{mutator}}}]}}"
    return _classifier(f"module: {space}")


def _many(lines: str, num: int, end: str = "\n") -> str:
    return end.join(lines.replace("#", str(index)) for index in range(num))


RECIPES |= {
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
    # Small files that cost Hydra, OmegaConf or our own checks much more than their size, as they once did.
    "problems-by-alias": ("analyses: {x: &a {}}\nproblems:\n" + _many("  p#: *a", 60), ["nothing is set"]),
    "edges": (
        "graph: {lower_to_upper: {x: &a [" + _many("q#", 80, ", ") + "], " + _many("b#: *a", 9, ", ") + "}}",
        ["... and"],
    ),
    "metrics": ("evaluate: {metrics: [" + _many("accurac#", 850, ", ") + "]}", ["and 830 more"]),
}  # fmt: skip
