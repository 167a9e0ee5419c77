"""Mistakes of users, a few rows a rule: each ends in one message with what was found, and leaves nothing."""
# ruff: noqa: E501 - a mistake and what is said of it stand in one line

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from omegaconf import OmegaConf

from mlotool.config import compose, package_dir
from mlotool.config.security import trusted
from mlotool.core import process, user_code
from tests import forked
from tests.cli.conftest import Call
from tests.cli.user_package import write_package

RECIPE = (package_dir("recipes") / "mwn.yaml").read_text().replace("max_ticks: 2000", "max_ticks: 2")
PLAIN = "# @package _global_\ndefaults: [plain, _self_]\nrunner: {max_ticks: 1, progress_bar: false, report: false}\nlogger: {wandb: false}\n"
QUIET = ("logger=csv", "runner.report=false", "runner.progress_bar=false")
P, RATE = "problems.classifier.", "problems.classifier.optimizer.lr"
SLIP = """\
import torch
from torch import nn
import torch.nn.functional as F
from mypackage.data import Data, Dicts, samples
from mypackage.models import Net

"""
BATCH = "batch = {input: float32 (8, 1, 8, 8), target: int64 (8,)"
CROSS_ENTROPY = 'F.cross_entropy(model(batch["input"]), batch["target"])'


class Mistake(NamedTuple):
    """What a user typed, what has to be said, the exit code, and the files that lie beside mypackage/ and mine.yaml."""

    words: tuple[str, ...]
    says: tuple[str, ...]
    code: int = 2
    files: Mapping[str, str] = {}
    leaves: bool = False


def typed(line: str, *says: str, **end: Any) -> Mistake:
    """A command line, whose words are apart by two blanks."""
    return Mistake(tuple(line.split("  ")), says, files={"odd.yaml": PLAIN}, **end)


def run(line: str, *says: str, **end: Any) -> Mistake:
    return typed(f"run  odd.yaml  {line}", *says, **end)


def changed(old: str, new: str, *says: str, **end: Any) -> Mistake:
    """The recipe of two problems with another text in the place of one."""
    assert old in RECIPE, old
    return Mistake(("run", "odd.yaml", *QUIET), says, files={"odd.yaml": RECIPE.replace(old, new)}, **end)


def slip(source: str, line: str, *says: str, **end: Any) -> Mistake:
    """The user's recipe, where one target is the user's code."""
    words = ("run", "mine.yaml", "--trust", "mypackage", "--trust", "slip", *line.split("  "))
    return Mistake(words, says, files={"slip/__init__.py": f"{SLIP}{source}\n"}, **end)


def loss(body: str, *says: str, before: str = "", **end: Any) -> Mistake:
    return slip(f"{before}def loss(batch, *, model):\n    {body}", f"{P}loss._target_=slip.loss", *says, **end)


def module(body: str, *says: str) -> Mistake:
    return slip(f"class Mine(Net):\n    {body}", f"{P}module._target_=slip.Mine", *says)


def data(split: str, *says: str, before: str = "") -> Mistake:
    source = f"{before}class Mine(Data):\n    def split(self, name):\n        {split}"
    return slip(source, "data._target_=slip.Mine", *says)


def item(result: str, *says: str) -> Mistake:
    items = f"class Items(Dicts):\n    def __getitem__(self, index):\n        {result}\n\n\n"
    return data("return Items(*samples())", *says, before=items)


def metric(result: str, *says: str) -> Mistake:
    line = "evaluate.metrics=[accuracy,{_target_: slip.metric}]"
    return slip(f"def metric(module, batch):\n    {result}", line, *says)


# fmt: off
COMMANDS = {
    "spaces around the equals sign": run("seed  =  3", "Found two recipes", "key=value"),
    "a folder of 300 letters": run(f"hydra.run.dir={'a' * 300}", "File name too long", code=1),
    "a folder of groups that is not there": run("-cd  nowhere", "--config-dir"),
    "settings of a search in a grid": run("-m  seed=0  sweep.num_trials=5", "warning: sweep.num_trials", code=0, leaves=True),
    "jobs in one folder": run("-m  seed=0,1  hydra.sweep.dir=outputs/x  hydra.sweep.subdir=y", "holds a run already", leaves=True),
    "a sweep of another recipe to go on with": run("-m  seed=0,1  resume=swept", "Repeat the command that began that sweep"),
    "resume of another program's run": run("resume=other", "resume: found 'other'"),
    "the config of a run as a recipe": typed("run  run/config.yaml", "found the config of a run"),
    "report of another program's run": typed("report  other", "found another folder"),
}
RECIPES = {
    "a reset to another kind of module": changed("warmup_steps: 300", "reset_to: reweight", f"{P}reset_to", "layers.1.weight"),
    "a scheduler that ends before the run": changed("5.0e-3}", "5.0e-3}\n    scheduler: {_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: 0.1, total_steps: 1}", "OneCycleLR failed", code=1, leaves=True),
    "an upper problem that never steps": changed("warmup_steps: 300", "warmup_steps: 3", "runner.max_ticks: found 2", "waits for 4 steps of 'classifier'", code=0, leaves=True),
    "a learned rate and a scheduler": typed(f"run  learned_lr  debug=fast  {'  '.join(QUIET)}  +{P}scheduler={{_target_: torch.optim.lr_scheduler.StepLR, step_size: 1}}", f"{P}scheduler"),
}
CODE = {
    "inputs of another size": slip("", f"+{P}module.inputs=10", ", in forward", "8x64 and 10x10", BATCH),
    "a loss a sample": loss(f"return {CROSS_ENTROPY[:-1]}, reduction='none')", "slip.loss (slip/__init__.py", "shape (8,)", "expected a 0-D tensor", BATCH),
    "roles by position": slip(f"def loss(batch, model):\n    return {CROSS_ENTROPY}", f"{P}loss._target_=slip.loss", "unknown role 'model'", "Write a * before it: def f(batch, *, model)"),
    "a syntax error": slip("def loss(batch, *, model)\n    return 0", f"{P}loss._target_=slip.loss", "slip/__init__.py", "SyntaxError"),
    "an optimizer whose step fails": slip("class Mine(torch.optim.SGD):\n    def step(self, closure=None):\n        raise ZeroDivisionError('no step')", f"{P}optimizer._target_=slip.Mine", "After tick 0: problems.classifier: its step failed at slip/__init__.py", code=1, leaves=True),
    "a module whose constructor fails": module("def __init__(self):\n        super().__init__(self.width)", ", in __init__: AttributeError"),
    "a split without targets": data('return Dicts(*samples()) if name == "train" else [{"input": x} for x in samples()[0]]', "evaluate.problem", "KeyError: 'target'", "a batch with input and target"),
    "data without splits": slip("class Mine:\n    def split(self, name):\n        return Dicts(*samples())", "data._target_=slip.Mine", "slip.Mine (slip/__init__.py, line", "has no splits", "split(name)"),
    "a split without samples": data("return Dicts(*samples(0 if name == 'val' else 40))", "val: found 0 samples"),
    "a sample that fails later": slip("class Items(Dicts):\n    def __getitem__(self, index):\n        if index == 39:\n            raise ValueError('sample 39 is broken')\n        return super().__getitem__(index)\n\n\nclass Mine(Data):\n    def split(self, name):\n        return Items(*samples()) if name == 'train' else super().split(name)", f"data._target_=slip.Mine  {P}stream.shuffle=false  runner.max_ticks=9", "After tick 4: data: slip.Items", "in __getitem__: ValueError: sample 39 is broken", code=1, leaves=True),
    "samples of different shapes": item('return {"input": torch.zeros(1, 8, 8 + index), "target": 0}', "the first = {input: float32 (1, 8,", "the last = {input:", "tensors of one shape"),
    "exit at import": loss(f"return {CROSS_ENTROPY}", "importing 'slip' failed", "SystemExit", before="import sys\nsys.exit(0)\n"),
    "torch's loss in place of a function": slip("", f"{P}loss._target_=torch.nn.CrossEntropyLoss", "mlotool.losses.cross_entropy"),
    "no_grad around a loss": loss(f"return {CROSS_ENTROPY}", "returned a tensor without", before="@torch.no_grad()\n"),
    "backward in a loss": loss(f"loss = {CROSS_ENTROPY}\n    loss.backward()\n    return loss", "Correct the loss, the module or the data"),
    "a batch that is scaled in place": loss(f'batch["input"].mul_(2)\n    return {CROSS_ENTROPY}', "a batch that it has changed"),
    "a batch by position": loss("return model(batch[0]).sum()", "KeyError: 0", "It was given batch = {input:"),
    "autograd.grad without create_graph": loss(f"loss = {CROSS_ENTROPY}\n    torch.autograd.grad(loss, list(model.parameters()))\n    return loss", "a second time"),
    "another default dtype": loss(f"torch.set_default_dtype(torch.float64)\n    return {CROSS_ENTROPY}", "dtype"),
    "a loss that becomes complex": slip(f"calls = 0\n\n\ndef loss(batch, *, model):\n    global calls\n    calls += 1\n    return {CROSS_ENTROPY} * (1j if calls > 2 else 1)", f"{P}loss._target_=slip.loss  runner.max_ticks=5", "After tick", "complex", code=1, leaves=True),
    "a module in double precision": module("def __init__(self):\n        super().__init__()\n        self.double()", "dtype"),
    "a metric that takes a key out of the batch": metric('batch.pop("target"); return {"a": torch.ones(())}', "changed"),
    "an objective that is not a number": slip('def metric(module, batch):\n    return {"a": torch.tensor(float("nan"))}', "evaluate.metrics=[{_target_: slip.metric}]  objective=val/a", "'val/a' is nan", code=0, leaves=True),
    "an optimizer that is none of torch's": slip("class Mine:\n    def __init__(self, params, lr):\n        pass", f"{P}optimizer._target_=slip.Mine", "expected an instance of torch.optim"),
    "an optimizer that keeps a function": slip("class Mine(torch.optim.SGD):\n    def step(self, closure=None):\n        super().step()\n        self.state[self.param_groups[0]['params'][0]]['f'] = lambda: 0", f"{P}optimizer._target_=slip.Mine", "optimizer", code=1, leaves=True),
}
MISTAKES = {f"{place}: {name}": row for place, table in (("command", COMMANDS), ("recipe", RECIPES), ("code", CODE)) for name, row in table.items()}  # fmt: skip
# fmt: on


def write_folders(folder: Path) -> None:
    """Make a folder of another program, one of a sweep, and of a run what could be taken for a recipe."""
    for name in ("other/checkpoints", "swept", "run"):
        (folder / name).mkdir(parents=True)
    (folder / "other/config.yaml").write_text("model: resnet\ntrainer: {epochs: 3}\n")
    (folder / "other/checkpoints/best.ckpt").write_bytes(b"abc")
    (folder / "swept/sweep.json").write_text('{"name": "plain", "identity": {"fixed": ["+recipe=plain"]}}')
    (folder / "run/config.yaml").write_text(OmegaConf.to_yaml(compose("plain"), resolve=True))
    (folder / "run/provenance.json").write_text("{}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with mypackage/ and mine.yaml; what is imported from it is forgotten."""
    write_package(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(trusted, "_packages", {})
    monkeypatch.setattr(user_code, "_packages", set())
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mypackage", "slip")]:
        del sys.modules[name]


def _files(folder: Path) -> set[str]:
    paths = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {path for path in paths if "__pycache__" not in path}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(call: Call, folder: Path, name: str) -> None:
    mistake = MISTAKES[name]
    for file, content in mistake.files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(content)
    if name.startswith("command"):
        write_folders(folder)
    before = _files(folder)
    with warnings.catch_warnings():
        # As for a user, to whom a warning is shown.
        warnings.simplefilter("default")
        code, out, err = call(*mistake.words)
    text = out + err
    assert [part for part in mistake.says if part not in text] == [], text
    assert code == mistake.code, text
    assert "not foreseen" not in text
    assert "mlotool: " in err
    left = _files(folder) - before
    assert bool(left) == mistake.leaves, left
    assert all(path.startswith("outputs/") for path in left)


def test_an_odd_environment_changes_nothing_and_letters_that_it_has_not_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text(PLAIN.replace("\n", "\n# To \u2192 1.\n", 1), encoding="utf-8")
    odd = {"HOME": None, "TMPDIR": "/no/such/folder", "COLUMNS": "wide", "LC_ALL": "C", "PYTHONUTF8": "0"}
    strict = {"COLUMNS": "20", "PYTHONIOENCODING": "ascii:strict", "PYTHONWARNINGS": "error"}
    list_and_show = "import sys; from mlotool.cli.main import main, open_streams; open_streams(); sys.exit(main(['list']) or main(['show', 'plain']))"
    for changes in ({**odd, "PYTHONCOERCECLOCALE": "0"}, strict):
        environment = {key: value for key, value in {**os.environ, **changes}.items() if value is not None}
        command = [sys.executable, "-c", list_and_show]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        assert r"\u2" in done.stdout and "problems:" in done.stdout


def _impatient(words: tuple[str, ...]) -> int:
    process.SECONDS_TO_END = 0.5
    return forked.call_mlotool(words)


def test_a_thread_that_a_package_leaves_does_not_keep_the_command_alive(folder: Path) -> None:
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), name='beat').start()\n"
    (folder / "mypackage/__init__.py").write_text(source)
    words = ("validate", "mine.yaml", "--trust", "mypackage", "--targets")
    done = forked.run(_impatient, words, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "is valid" in done.stdout and "found the threads 'beat' 0.5 s after everything else has ended" in done.stderr


def test_a_run_that_never_began_leaves_no_folder_and_takes_none_of_the_users(call: Call, tmp_path: Path) -> None:
    words = "run", "plain", "problems.classifier.optimizer.lr=-1"
    assert call(*words)[0] == 2 and [*(tmp_path / "outputs").iterdir()] == []
    (tmp_path / "mine").mkdir()
    assert call(*words, "hydra.run.dir=mine/run")[0] == 2
    assert (tmp_path / "mine").is_dir() and not (tmp_path / "mine" / "run").exists()


@pytest.mark.filterwarnings("always:found the override")
def test_overrides_of_an_evaluation_that_do_nothing_or_too_much_are_told(call: Call, tmp_path: Path) -> None:
    code, _, err = call(
        "run", "plain", "runner.max_ticks=1", "logger=csv", "runner.report=false", "evaluate.splits.val=1"
    )
    assert code == 0, err
    [run] = (tmp_path / "outputs" / "plain").iterdir()
    hidden = f"{P}module.hidden"
    for value in ("8", "[8]", "[90000,90000]"):
        code, _, err = call("evaluate", str(run), "--split", "val", f"{hidden}={value}")
        assert code in (1, 2)
        assert "module" in err and "not foreseen" not in err
        assert value != "[8]" or f"config.yaml with the override {hidden}=[8] (state.classifier.module.layers" in err
    for word in ("runner.max_ticks=3", f"{P}optimizer.lr=3"):
        code, _, err = call("evaluate", str(run), "--split", "val", word)
        assert code == 0 and f"found the override {word}, which has no effect on a finished run" in err
    code, _, err = call("evaluate", str(run), "--split", "vall")
    assert code == 2 and "--split: found 'vall'" in err and "Correct --split." in err
    code, out, err = call("evaluate", str(run), "--split", "val", "evaluate.metrics=[f1]")
    assert (code, "does nothing" in err) == (0, False), err
    assert out.startswith("val/f1 ")


WITH_ANALYSIS = (
    "analyses: {look: {_target_: mypackage.losses.look, roles: {model: classifier}, split: val, batch_size: 8}}\n"
)
# What is wrong only where it is called, and what `validate --targets` says of it.
CALLED = {
    "": "",
    "def good(batch, *, model): return F.cross_entropy(model(batch['input'])[:, :, None], batch['input'])": "problems.classifier.loss",
    "def look(batches, *, model): return {'x': next(iter(batches))['nothing'].sum()}": "analyses.look: mypackage.losses.look",
}


@pytest.mark.parametrize("source", CALLED)
def test_what_fails_where_it_is_called_is_found_before_a_run(call: Call, folder: Path, source: str) -> None:
    look = "\n\ndef look(batches, *, model):\n    return {'x': model(next(iter(batches))['input']).sum()}\n\n\n"
    with (folder / "mypackage" / "losses.py").open("a") as file:
        file.write(look + source)
    with (folder / "mine.yaml").open("a") as file:
        file.write(WITH_ANALYSIS)
    code, out, err = call("validate", "mine.yaml", "--trust", "mypackage", "--targets")
    assert (code, CALLED[source] in err) == (2 if source else 0, True), out + err
