"""The same through `mlotool run`: `--cfg job` and the jobs of a sweep."""

from collections.abc import Callable
from pathlib import Path

import yaml

from tests.cli.conftest import Result

Call = Callable[..., Result]
OPTIMIZER = "problems: {classifier: {optimizer: {_target_: torch.optim.RMSprop, lr: 0.01}}}"


def test_what_hydra_prints(call: Call, recipe: Callable[..., Path]) -> None:
    file = recipe("data: {_target_: mypackage.Data, root: x}")
    code, out, _ = call("run", str(file), "--cfg", "job", "--package", "data")
    assert code == 0
    assert yaml.safe_load(out) == {"_target_": "mypackage.Data", "root": "x"}


def test_the_jobs_of_a_sweep(call: Call, recipe: Callable[..., Path], tmp_path: Path) -> None:
    file = recipe(OPTIMIZER)
    settings = ("debug=fast", "logger=csv", "runner.progress_bar=false", "runner.report=false")
    choice = "optimizer@problems.classifier.optimizer=sgd,adam"
    code, out, err = call("run", "-m", str(file), choice, *settings)
    assert code == 0, out + err
    configs = [yaml.safe_load(path.read_text()) for path in sorted(tmp_path.glob("outputs/**/config.yaml"))]
    targets = [config["problems"]["classifier"]["optimizer"]["_target_"] for config in configs]
    assert targets == ["torch.optim.SGD", "torch.optim.Adam"]
    assert "momentum" not in configs[1]["problems"]["classifier"]["optimizer"]
