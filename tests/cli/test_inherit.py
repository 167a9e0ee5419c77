"""From a search to a model: weights and decisions of another run's folder, as they are typed."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import mlotool
from mlotool.cli.main import main
from mlotool.folders.safe_files import read_json
from mlotool.runner.evaluation import Evaluator
from mlotool.runner.loading import evaluate
from tests.cli.small_space import small_space

# One of the decisions is about running statistics.
RECIPE = small_space(
    "relu: null, tanh: {_target_: torch.nn.Tanh}",
    "batch: {_target_: torch.nn.BatchNorm1d, num_features: 8}, "
    "slow: {_target_: torch.nn.BatchNorm1d, num_features: 8, momentum: 0.001}",
)
# The metrics of the shared run itself are looked at by nobody.
pytestmark = pytest.mark.filterwarnings("ignore:evaluate. found no path")

UNIFORM = "+problems.classifier.module.paths={_target_: mlotool.spaces.UniformPaths}"
SHARED = ["+problems.classifier.module.shared=true", UNIFORM]
PATH = {"activation_0": "tanh", "activation_1": "relu", "norm_0": "slow"}
CHOSEN = [f"decisions.{name}={value}" for name, value in PATH.items()]

Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe, and runs of a shared space (shared) and of a model of the space (plain)."""
    path = tmp_path_factory.mktemp("runs")
    (path / "small.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        assert main(["run", "small.yaml", *SHARED, "hydra.run.dir=shared", "runner.max_ticks=12"]) == 0
        assert main(["run", "small.yaml", *CHOSEN, "hydra.run.dir=plain"]) == 0
    return path


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    monkeypatch.chdir(folder)

    def call(*words: str) -> tuple[int, str]:
        capfd.readouterr()
        code = main(["run", *words])
        return code, capfd.readouterr().err

    yield call


def _config(path: Path) -> Any:
    return OmegaConf.load(path / "config.yaml")


def _state(path: Path) -> dict[str, torch.Tensor]:
    return mlotool.load(path, "classifier", "last").state_dict()


def test_a_model_inherits_its_part_of_a_shared_space(folder: Path, run: Run) -> None:
    words = ["small.yaml", *CHOSEN, "inherit=shared", "runner.max_ticks=0", "hydra.run.dir=zero"]
    assert run(*words)[0] == 0
    expected = mlotool.load("shared", "classifier", "last").state_of(PATH)
    torch.testing.assert_close(_state(folder / "zero"), expected, rtol=0, atol=0)
    summary = read_json(folder / "zero", "summary.json") or {}
    assert (summary["num_ticks"], summary["status"]) == (0, "finished")
    assert summary["objective"]["value"] == evaluate("zero", "val")["val/accuracy"]
    assert (read_json(folder / "zero", "provenance.json") or {})["inherit"] == "shared"


def test_a_run_says_what_it_begins_with_and_is_resumed_without_the_other_folder(
    folder: Path, run: Run, tmp_path: Path
) -> None:
    words = ["small.yaml", *CHOSEN, "inherit=copy", "runner.log_every=1"]
    (folder / "shared").rename(folder / "copy")
    try:
        assert run(*words, "runner.max_ticks=6", "hydra.run.dir=whole")[0] == 0
        assert run(*words, "runner.max_ticks=3", "hydra.run.dir=parts")[0] == 0
    finally:
        (folder / "copy").rename(folder / "shared")
    assert run(*words, "runner.max_ticks=6", "resume=parts")[0] == 0
    whole, parts = ((folder / name / "metrics.csv").read_text().splitlines() for name in ("whole", "parts"))
    first = [line.split(",")[1] for line in whole if line.startswith("0,")]
    assert first == ["inherited/val/accuracy", "inherited/test/accuracy"]
    # The shorter run ends where the other one is in the middle, and evaluates its last split there.
    assert set(whole) <= set(parts)
    torch.testing.assert_close(_state(folder / "parts"), _state(folder / "whole"), rtol=0, atol=0)


def test_a_run_that_dies_in_its_first_evaluation_goes_on(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["small.yaml", *CHOSEN, "inherit=shared", "evaluate.recalibrate=2", "runner.max_ticks=3"]
    assert run(*words, "hydra.run.dir=unbroken")[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "evaluate", lambda *_: 1 / 0)
        assert run(*words, "hydra.run.dir=broken")[0] != 0
    assert (folder / "broken" / "metrics.csv").read_text() == "tick,key,value\n"
    assert run(*words, "resume=broken")[0] == 0
    whole, again = ((folder / name / "metrics.csv").read_text() for name in ("unbroken", "broken"))
    assert again == whole


def test_a_plain_run_inherits_a_run_of_the_same_model(folder: Path, run: Run) -> None:
    words = ["inherit=plain/checkpoints/best.ckpt", "runner.max_ticks=0", "hydra.run.dir=again"]
    assert run("small.yaml", *CHOSEN, *words)[0] == 0
    best = mlotool.load("plain", "classifier", "best").state_dict()
    torch.testing.assert_close(_state(folder / "again"), best, rtol=0, atol=0)


def test_decisions_of_a_run_make_its_model_of_a_shared_space_too(folder: Path, run: Run) -> None:
    assert run("small.yaml", *SHARED, "decisions=plain", "runner.max_ticks=1", "hydra.run.dir=found")[0] == 0
    config = _config(folder / "found")
    assert (dict(config.decisions), config.decisions_from) == (PATH, "plain")
    assert (config.problems.classifier.module.shared, config.problems.classifier.module.paths) == (False, None)
    assert (read_json(folder / "found", "provenance.json") or {})["decisions_from"] == "plain"
    assert _state(folder / "found").keys() == _state(folder / "plain").keys()
    # A recipe may name the folder, and decisions by name win.
    (folder / "named.yaml").write_text(RECIPE + "decisions: plain\n")
    assert run("named.yaml", "decisions.norm_0=batch", "runner.max_ticks=1", "hydra.run.dir=named")[0] == 0
    assert dict(_config(folder / "named").decisions) == PATH | {"norm_0": "batch"}


def test_decisions_of_a_search_are_what_its_analysis_found(folder: Path, run: Run) -> None:
    _search(folder, "activation_0: tanh\nnorm_0: slow\n\n")
    assert run("small.yaml", "decisions=search", "runner.max_ticks=1", "hydra.run.dir=from_search")[0] == 0
    assert dict(_config(folder / "from_search").decisions) == {"activation_0": "tanh", "norm_0": "slow"}


def _search(folder: Path, text: str) -> None:
    """Write the folder of a search that has found decisions."""
    (folder / "search" / "artifacts").mkdir(exist_ok=True, parents=True)
    config = _config(folder / "plain")
    config.problems.classifier.module.shared = True
    config.analyses = {"architecture": {"_target_": "mlotool.losses.path_analysis", "roles": {}}}
    OmegaConf.save(config, folder / "search" / "config.yaml")
    (folder / "search" / "summary.json").write_text(json.dumps({"status": "finished"}))
    (folder / "search" / "artifacts" / "architecture_decisions.txt").write_text(text)


def test_decisions_of_a_folder_are_for_a_recipe_of_one_model(folder: Path, run: Run) -> None:
    policy = """  policy:
    module: {_target_: mlotool.spaces.PathPolicy, space: classifier}
    loss: {_target_: mlotool.losses.cross_entropy, roles: {model: classifier}}
"""
    (folder / "policy.yaml").write_text(RECIPE.replace("evaluate:", f"{policy}evaluate:", 1))
    code, err = run("policy.yaml", "decisions=plain", "hydra.run.dir=refused")
    assert code == 2 and "a recipe whose problem 'policy' chooses the paths of a shared space" in err


def test_trials_of_a_search_inherit_and_its_best_job_gives_decisions(folder: Path, run: Run) -> None:
    pytest.importorskip("optuna")
    words = ["sweep.num_trials=2", "sweep.fuse=2", "hydra.sweep.dir=trials"]
    assert run("-m", "small.yaml", "inherit=shared", "runner.max_ticks=0", "evaluate.recalibrate=2", *words)[0] == 0
    jobs = [folder / "trials" / str(number) for number in range(2)]
    values = [(read_json(job, "summary.json") or {})["objective"]["value"] for job in jobs]
    for job, value in zip(jobs, values, strict=True):
        assert evaluate(job, "val", "last")["val/accuracy"] == value
    assert run("small.yaml", "decisions=trials", "runner.max_ticks=1", "hydra.run.dir=from_trials")[0] == 0
    best = jobs[values.index(max(values))]
    assert dict(_config(folder / "from_trials").decisions) == dict(_config(best).decisions)


REFUSED = [
    (["inherit=nowhere"], "inherit: found 'nowhere', which is not a folder"),
    (["inherit=cut"], "inherit: found 'cut', a run that is interrupted; expected a finished run."),
    (["inherit=shared", "problems.classifier.module.base.hidden=[8,9]"], "does not fit its module here"),
    (["inherit=plain", *SHARED], "does not fit its module here"),
    (["inherit=shared", "problems.classifier.module.mutators.0.name=other"],
     "found the decision other_0=relu of the problem 'classifier', which the shared space in 'shared' does not"),
    (["decisions=nowhere"], "decisions: found 'nowhere', which is not a folder"),
    (["decisions=shared"], "a run that searches a shared space without an analysis of its paths"),
    (["runner.max_ticks=0", "objective=classifier/loss"], "found 'classifier/loss' with runner.max_ticks=0"),
    (["runner.max_ticks=0", "evaluate=null", "objective=null"], "runner.max_ticks: found 0 with nothing to evaluate"),
]  # fmt: skip
WRITTEN = {
    "activation_0: ${oc.env:HOME}\n": "decisions: found 'activation_0': '${oc.env:HOME}' in search",
    "activation_7: tanh\n": "decisions.activation_7: found 'tanh', but no model asks for a decision of this name",
    "activation_0: tanh\n" * 10_000: "expected at most 100000",
}


def test_what_cannot_be_taken_is_one_message(folder: Path, run: Run) -> None:
    (folder / "cut").mkdir()
    (folder / "cut" / "config.yaml").write_text((folder / "plain" / "config.yaml").read_text())
    (folder / "cut" / "summary.json").write_text(json.dumps({"status": "interrupted"}))
    searched = [(["decisions=search"], message, text) for text, message in WRITTEN.items()]
    for words, message, text in [*((words, message, "") for words, message in REFUSED), *searched]:
        if text:
            _search(folder, text)
        code, err = run("small.yaml", *words, "hydra.run.dir=refused")
        assert (code, err.count("error:")) == (2, 1), err
        assert message in err
        assert not (folder / "refused" / "config.yaml").exists()


def test_validate_looks_for_the_folder(folder: Path, run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "small.yaml", "inherit=shared/checkpoints/last.ckpt", "--targets"]) == 0
    assert main(["validate", "small.yaml", "inherit=nowhere", "--targets"]) != 0
    assert "inherit: found 'nowhere', which is not a folder" in "".join(capfd.readouterr())
