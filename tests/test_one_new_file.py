"""A new data set, model, loss, solver, hypergradient, mutator or sampler is one new file, and all else knows it."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests import forked

PACKAGE = Path(__file__).parents[1] / "mlotool"
FILES = {
    "data/stripes.py": '''
"""Stripes."""
import torch
from mlotool.core.settings import Count, target
from mlotool.data.splits import AbstractData, InMemoryTensors

@target("data")
class Stripes(AbstractData[InMemoryTensors]):
    """Stripes that are thin or thick.

    Args:
        size: of each split.
    """
    def __init__(self, size: Count) -> None:
        self.num_classes = 2
        samples = InMemoryTensors({"input": torch.randn(size, 4), "target": torch.arange(size) % 2})
        super().__init__(dict.fromkeys(("train", "val"), samples))
''',
    "models/gate.py": '''
"""A gate."""
from torch import nn
from mlotool.core.settings import Count, target

@target("module")
class Gate(nn.Linear):
    """A linear gate.

    Args:
        width: of the input.
    """
    def __init__(self, width: Count) -> None:
        super().__init__(width, 2)
''',
    "losses/margin.py": '''
"""A margin."""
from mlotool.core import BoundModule
from mlotool.core.settings import NonNegative, target

@target("loss")
def margin(batch, *, model: BoundModule, width: NonNegative = 1.0):
    """Return the hinge of the margin."""
    return (width - model(batch["input"]).diff(dim=1)).relu().mean()
''',
    "hypergradient/solvers/one_step.py": '''
"""One step."""
from dataclasses import dataclass
from mlotool.core.settings import Positive, target
from mlotool.hypergradient.solvers.base import AbstractSolver, SolveResult, Status

@target("solver")
@dataclass(frozen=True)
class OneStep(AbstractSolver):
    """One step from zero.

    Args:
        rate: of the step.
    """
    rate: Positive = 0.1
    def solve(self, matvec, vector, *, start=None, view=None):
        return SolveResult([self.rate * part for part in vector], Status.FIXED, 0, None)
''',
    "hypergradient/nothing.py": '''
"""No gradient passes."""
from mlotool.core.settings import target
from mlotool.hypergradient.first_order import FirstOrder

@target("hypergradient")
class NoGradient(FirstOrder):
    """No gradient passes."""
''',
    "spaces/mutators/twice.py": '''
"""A module, once or twice."""
from mlotool.core.settings import target
from mlotool.spaces.mutators.repeat import Repeat

@target("mutator")
class Twice(Repeat):
    """A module, once or twice."""
    def __init__(self, name: str, at) -> None:
        super().__init__(name, at, [1, 2])
''',
    "sweep/samplers/coin.py": '''
"""A coin."""
from optuna.samplers import RandomSampler

class CoinSampler(RandomSampler):
    """A coin."""
''',
    "sweep/samplers/chance.py": '"""What samplers share."""',
}
RECIPE = """# @package _global_
name: stripes
data: {_target_: mlotool.data.Stripes, size: 20}
objective: val/accuracy
problems:
  gate:
    module: {_target_: mlotool.models.Gate, width: 4}
    loss: {_target_: mlotool.losses.margin, roles: {model: gate}}
    stream: {split: train, batch_size: 5}
    optimizer: {_target_: torch.optim.SGD, lr: 0.1}
    hypergradient: {_target_: mlotool.hypergradient.Implicit, solver: {_target_: mlotool.hypergradient.OneStep}}
evaluate: {problem: gate, splits: {val: end}}
sweep: {method: optuna, sampler: coin, params: {seed: "0,1"}}
runner: {max_ticks: 3}
"""


def say_what_all_know(root: str) -> None:
    """Be a process that has imported mlotool from a folder, and all else from where the tests have it."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mlotool", "docs")]:
        del sys.modules[name]
    sys.path.insert(0, root)
    import mlotool
    from docs.generated import api
    from mlotool.cli.main import main
    from mlotool.config.security.trusted import trusted_names

    assert mlotool.__file__.startswith(root)
    assert main(["validate", "stripes", "--targets"]) == 0
    none = "problems.gate.hypergradient._target_=mlotool.hypergradient.NoGradient"
    assert main(["validate", "stripes", none, "~problems.gate.hypergradient.solver"]) == 0
    assert main(["validate", "stripes", "+problems.gate.loss.width=-1"]) == 2
    assert main(["list"]) == main(["show", "stripes"]) == 0
    assert "mlotool.spaces.Twice" in trusted_names("mutator")
    print("SCHEMA")
    assert main(["schema"]) == 0
    print("REFERENCE", *(name for names in api.homes().values() for name in names))


def test_all_know_a_new_file(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    root = tmp_path / "checkout"
    for folder in ("mlotool", "conf", "docs"):
        # With what Python has compiled.
        shutil.copytree(PACKAGE.parent / folder, root / folder, ignore=shutil.ignore_patterns("runs"))
    (root / "recipes").mkdir()
    (root / "recipes" / "stripes.yaml").write_text(RECIPE)
    for name, text in FILES.items():
        (root / "mlotool" / name).write_text(text.lstrip())
    done = forked.run(say_what_all_know, str(root), folder=root, environment={**os.environ, "WANDB_MODE": "offline"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "problems.gate.loss.width: found -1; expected a number of at least 0" in done.stderr
    before, _, after = done.stdout.partition("SCHEMA\n")
    assert "stripes" in before
    schema, _, reference = after.partition("REFERENCE ")
    definitions = json.loads(schema)["definitions"]
    names = {"Stripes", "Gate", "margin", "OneStep", "NoGradient", "Twice"}
    assert not [name for name in names if f".{name}'" not in str(definitions)]
    assert names <= set(reference.split())
    sweep = str(json.loads(schema)["properties"]["sweep"])
    assert "'coin'" in sweep and "'chance'" not in sweep
