"""What a finished run gives and tells: modules, metrics, nodes, untrained candidates; what is refused of calls."""

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mlotool
from mlotool import RunResult, compose, load, run
from mlotool.config import find_recipe
from mlotool.core.bound_module import BoundModule
from mlotool.core.errors import ConfigError, RunError
from mlotool.distributed.collectives import Ranks
from mlotool.hypergradient import FirstOrder
from mlotool.losses import path_cross_entropy
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.runner import evaluate
from mlotool.runner.checkpoint import read_checkpoint
from mlotool.runner.records import num_parameters, warn_of_untrained
from mlotool.spaces import Operator, PathWeights, SharedSpace, UniformPaths
from tests.runner.tiny import Blobs

QUIET = ["runner.accelerator=cpu", "logger.wandb=false", "runner.report=false", "runner.progress_bar=false"]
RECIPE = """# @package _global_
# A space.
defaults: [plain, _self_]
problems:
  classifier:
    module:
      _target_: mlotool.spaces.Space
      base: {_target_: mlotool.models.MLP, image_shape: [1, 8, 8], hidden: [8, 8], num_classes: 10}
      inputs: [1, 8, 8]
      mutators:
        - _target_: mlotool.spaces.Operator
          name: activation
          at: {type: ReLU}
          candidates: {relu: null, tanh: {_target_: torch.nn.Tanh}}
"""


def test_a_space_leaves_its_nodes_and_decisions(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    words = [*QUIET, "runner.max_ticks=2", "+decisions.activation_1=tanh"]
    folder = mlotool.run(mlotool.compose(str(tmp_path / "mine.yaml"), words), output_dir=tmp_path / "run").output_dir
    [(name, record)] = json.loads((folder / "nodes.json").read_text())["problems"].items()
    assert (name, record["num_parameters"], record["num_nodes"]) == ("classifier", 682, 8)
    node = {"id": "layers.4", "kind": "Tanh", "inputs": ["layers.3"], "shape": [8], "mutator": "activation"}
    assert record["nodes"][5] == node
    assert [node["mutator"] for node in record["nodes"]].count(None) == 7
    assert record["decisions"] == [
        {"name": f"activation_{number}", "value": value, "candidates": ["relu", "tanh"], "num_candidates": 2}
        for number, value in enumerate(("relu", "tanh"))
    ]
    assert json.loads((folder / "summary.json").read_text())["num_parameters"] == {"classifier": 682}


def space(**settings: Any) -> SharedSpace:
    activation = Operator("activation", {"type": "ReLU"}, {"relu": None, "tanh": nn.Tanh})
    torch.manual_seed(0)
    base = lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))  # noqa: E731
    return SharedSpace(base, [activation], inputs=[4], **settings)


def cross_entropy(batch: Any, *, model: Any) -> Tensor:
    return functional.cross_entropy(model(batch["input"]), batch["target"])


def told(program: Program, ranks: Ranks | None = None) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_untrained(program, ranks or Ranks())
    return [str(warning.message) for warning in found]


class WithOthers(Ranks):
    """Beside ranks that have drawn each candidate once."""

    def total(self, tensor: Tensor) -> Tensor:
        return tensor + 1


SETTINGS = {"stream": Stream(Blobs(40, 0), 8, seed=0), "optimizer": partial(torch.optim.SGD, lr=0.1)}


def test_parameters_are_those_of_one_task() -> None:
    frozen = nn.Linear(2, 3).requires_grad_(False)
    for module, settings, count in (
        (nn.Linear(2, 3), {"tasks": 4}, 9),
        (nn.Sequential(nn.Linear(2, 2), frozen), {}, 15),
    ):
        problem = Problem("net", module, cross_entropy, roles={"model": "net"}, **SETTINGS, **settings)
        assert num_parameters(Program([problem], Graph())) == {"net": count}


def test_a_candidate_that_was_never_drawn_is_told_at_the_end() -> None:
    torch.manual_seed(3)
    problem = Problem("net", space(paths=UniformPaths()), cross_entropy, roles={"model": "net"}, **SETTINGS)
    made = Program([problem], Graph())
    schedule = Schedule(made)
    assert told(made) == []
    schedule.tick()
    counts = problem.module.path_counts
    never = [f"{name}: {value}" for name, values in counts.items() for value, count in values.items() if not count]
    [message] = told(made)
    assert len(never) == 2 and ", ".join(never) in message
    assert message.startswith("problems.net.module: found candidates that no training step has computed")
    assert "FairPaths" in message
    assert told(made, WithOthers()) == []
    for _ in range(30):
        schedule.tick()
    assert told(made) == []


def test_where_another_problem_decides_its_rate_is_named_and_the_entropy_weight_keeps_decisions_open() -> None:
    roles = {"model": "net", "paths": "paths"}
    net = Problem("net", space(), path_cross_entropy, roles=roles, hypergradient=FirstOrder(), **SETTINGS)
    module = PathWeights(space)
    paths = Problem("paths", module, path_cross_entropy, roles=roles, **SETTINGS)
    made = Program([net, paths], Graph({"paths": ["net"]}, {"net": ["paths"]}))
    with torch.no_grad():
        net.module.counts[0] += 1
        module.logits["activation_0"][1] = 3.0
    assert "a lower problems.paths.optimizer.lr" in told(made)[0]
    batch = {"input": torch.randn(8, 4), "target": torch.randint(3, (8,))}
    given = {"model": space(), "paths": BoundModule(module, training=True)}
    plain, kept = (path_cross_entropy(batch, **given, entropy=weight).loss for weight in (0.0, 0.5))
    assert torch.allclose(plain - kept, 0.5 * module.entropy())


Run = Callable[..., RunResult]


def test_a_finished_run_gives_its_modules_and_repeats_its_numbers(tiny_run: Run) -> None:
    result = tiny_run()
    run_dir = result.output_dir
    for which in ("best", "last"):
        saved = read_checkpoint(run_dir / f"checkpoints/{which}.ckpt")["program"]["classifier"]["module"]
        module = load(run_dir, "classifier", which)
        assert not module.training
        assert all(torch.equal(value, saved[key]) for key, value in module.state_dict().items())
    values = evaluate(run_dir, "test")
    assert values == {key: result.metrics[key] for key in ("test/accuracy", "test/cross_entropy")}
    assert set(evaluate(run_dir, "meta", "last")) == {"meta/accuracy", "meta/cross_entropy"}
    assert set(evaluate(run_dir, "test", overrides=["evaluate.metrics=[f1]"])) == {"test/f1"}
    with pytest.raises(ConfigError, match=r"'evaluate\.metrics=f1'; expected a list, as .* has there"):
        evaluate(run_dir, "test", overrides=["evaluate.metrics=f1"])


def test_wrong_names(tiny_run: Run, tmp_path: Path) -> None:
    run_dir = tiny_run({"debug.limit_ticks": 2, "objective": None}).output_dir
    bare = tiny_run({"debug.limit_ticks": 2, "runner.checkpoint": False}, folder="bare").output_dir
    (tmp_path / "empty").mkdir()
    for call, text in (
        (lambda: load(run_dir, "clasifier", "last"), r"Unknown problem 'clasifier'.*Did you mean 'classifier'"),
        (lambda: load(run_dir, "classifier"), r"no checkpoint 'best', but last"),
        (lambda: load(bare, "classifier"), r"no checkpoint 'best', but none"),
        (lambda: evaluate(run_dir, "tests", "last"), r"found 'tests'.*Did you mean 'test'"),
        (lambda: load("nowhere", "classifier"), r"no folder 'nowhere'; expected a run folder"),
        (lambda: evaluate(tmp_path / "empty", "test"), r"has no config\.yaml; expected the folder of a run"),
    ):
        with pytest.raises(ConfigError, match=text):
            call()  # type: ignore[no-untyped-call]
    torch.save({"state_dict": {}}, tmp_path / "best.ckpt")
    with pytest.raises(RunError, match=r"is not a checkpoint of mlotool"):
        read_checkpoint(tmp_path / "best.ckpt")


def test_a_recipe_runs_and_its_folder_knows_where_its_config_came_from(tmp_path: Path) -> None:
    recipe = find_recipe("mwn")
    overrides = ["runner.max_ticks=4", "runner.progress_bar=false", "logger.wandb=false", "evaluate.splits.val=2"]
    overrides.append("debug.limit_warmup_steps=0")
    result = mlotool.run(compose("mwn", overrides), output_dir=tmp_path)
    assert set(result.metrics) >= {"classifier/loss", "reweight/loss", "val/accuracy", "test/accuracy"}
    assert (tmp_path / "overrides.txt").read_text().split() == overrides
    assert (tmp_path / "recipe.yaml").read_text() == recipe.read_text()
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert provenance["recipe_path"] == str(recipe)
    assert provenance["command"].startswith("mlotool.run(mlotool.compose('mwn', ['runner.max_ticks=4', ")
    # A stranger's folder starts no logger, which might upload.
    named = "loggers: [{_target_: pytorch_lightning.loggers.MLFlowLogger}]"
    (tmp_path / "config.yaml").write_text((tmp_path / "config.yaml").read_text().replace("loggers: []", named))
    assert evaluate(tmp_path, "test")["test/accuracy"] == result.metrics["test/accuracy"]
    assert isinstance(load(tmp_path, "classifier"), torch.nn.Module)
    assert result.objective == pytest.approx(evaluate(tmp_path, "val")["val/accuracy"])


COMPOSED = "expected a config that mlotool.compose has returned"
RESULT = RunResult({}, Path("outputs/mwn/then"), None, None)


@pytest.mark.parametrize(
    ("call", "positional", "keywords", "said"),
    [
        (run, ("mwn",), {}, f"run.config: found 'mwn'; {COMPOSED}. Write mlotool.run(mlotool.compose('mwn', "),
        (load, (RESULT, "c"), {}, "load.run_dir: found a RunResult; expected a path. Give its folder"),
        (evaluate, ("run", ["test"]), {}, "evaluate.split: found ['test']; expected one split's name"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_by_name(call: Any, positional: Any, keywords: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        call(*positional, **keywords)
    assert str(refused.value).startswith(said)
