"""In recipes: values, structure and graphs that are not what was meant."""

from tests.cli.mistakes.mistake import Mistake

RECIPE = """\
# @package _global_
defaults:
  - /model@problems.classifier.module: mlp
  - /model@problems.reweight.module: weight_net
  - _self_
  - override /data: digits_noisy
  - override /hypergradient: finite_difference
name: odd
problems:
  reweight:
    loss: {_target_: mlotool.losses.cross_entropy, roles: {model: classifier}}
    stream: {split: meta, batch_size: 100}
    optimizer: {_target_: torch.optim.Adam, lr: 1.0e-3}
  classifier:
    loss:
      _target_: mlotool.losses.reweighted_cross_entropy
      roles: {model: classifier, weigher: reweight}
    stream: {split: train, batch_size: 100}
    optimizer: {_target_: torch.optim.SGD, lr: 0.01}
graph:
  upper_to_lower: {reweight: [classifier]}
  lower_to_upper: {classifier: [reweight]}
evaluate: {problem: classifier, metrics: [accuracy], splits: {val: 2, test: end}}
objective: val/accuracy
runner: {max_ticks: 2, progress_bar: false, report: false}
logger: {wandb: false}
"""


def _changed(old: str, new: str, *says: str, code: int = 2, leaves: tuple[str, ...] = ()) -> Mistake:
    assert RECIPE.count(old) == 1
    return Mistake(("run", "odd.yaml"), says, code, {"odd.yaml": RECIPE.replace(old, new)}, leaves=leaves)


def _added(line: str, *says: str) -> Mistake:
    return Mistake(("run", "odd.yaml"), says, files={"odd.yaml": f"{RECIPE}{line}\n"})


def _file(text: str | bytes, *says: str, name: str = "odd.yaml") -> Mistake:
    return Mistake(("run", name), says, files={name: text})


def _classifier(line: str, *says: str, code: int = 2, leaves: tuple[str, ...] = ()) -> Mistake:
    return _changed("SGD, lr: 0.01}", f"SGD, lr: 0.01}}\n    {line}", *says, code=code, leaves=leaves)


def _with(*words: str, says: tuple[str, ...]) -> Mistake:
    return Mistake(("run", "odd.yaml", *words), says, files={"odd.yaml": RECIPE})


def _builtin(recipe: str, *words: str, says: tuple[str, ...], code: int = 2, leaves: tuple[str, ...] = ()) -> Mistake:
    quiet = ("debug=fast", "logger=csv", "runner.report=false", "runner.progress_bar=false")
    return Mistake(("run", recipe, *quiet, *words), says, code, leaves=leaves)


LR, CLASSIFIER = "problems.classifier.optimizer.lr", "problems.classifier."
MISTAKES = {
    "a rate in percent": _changed("lr: 0.01", "lr: 1%", f"{LR}: found '1%'; expected a number"),
    "a decimal comma": _changed("lr: 0.01", "lr: '0,01'", f"{LR}: found '0,01'; expected a number"),
    "a calculation": _changed("lr: 0.01", "lr: 0.1 * 0.1", f"{LR}: found '0.1 * 0.1'; expected a number"),
    "yes for a rate": _changed("lr: 0.01", "lr: yes", f"{LR}: found True; expected a number"),
    "2k ticks": _changed("max_ticks: 2", "max_ticks: 2k", "runner.max_ticks: found '2k'; expected a whole number"),
    "no ticks": _changed("max_ticks: 2", "max_ticks: null", "runner.max_ticks: found null; expected a whole number"),
    "a thousand trillion ticks": _changed(
        "max_ticks: 2", f"max_ticks: 1{'0' * 15}", "runner.max_ticks: found 1000000", "at most 1000000000000"
    ),
    "a trillion trillion ticks": _changed(
        "max_ticks: 2", f"max_ticks: 1{'0' * 24}", "runner.max_ticks: found a whole number of 80 bits"
    ),
    "a million columns": _with(
        "hypergradient=nystrom",
        "hypergradient.solver.rank=1000000",
        says=("hypergradient.solver.rank: found 1000000; expected a whole number of at least 1 and at most 10,000",),
    ),
    "500 data workers": _with(
        f"{CLASSIFIER}stream.num_workers=500",
        says=(f"{CLASSIFIER}stream.num_workers: found 500; expected at most 64", "as each is a process"),
    ),
    "a seed with a leading zero": _added("seed: 010", "found 010 in line 27", "the octal number 8"),
    "a time": _added("seed: 1:30", "found 1:30 in line 27", "to the base 60"),
    "a date": _added("seed: 2026-01-31", "seed: found '2026-01-31'; expected a whole number"),
    "a list of seeds": _added("seed: [0, 1, 2]", "seed: found [0, 1, 2]; expected a whole number"),
    "a metric that is no list": _changed(
        "metrics: [accuracy]", "metrics: accuracy", "evaluate.metrics: found 'accuracy'; expected a list"
    ),
    "splits as a list": _changed(
        "splits: {val: 2, test: end}", "splits: [val]", "evaluate.splits: found ['val']; expected a mapping"
    ),
    "problems as a list": _file(
        "# @package _global_\ndefaults: [_self_]\nproblems:\n  - name: net\n",
        "problems: found [{'name': 'net'}]; expected a mapping",
    ),
    "a graph as a list": _changed(
        "graph:\n  upper_to_lower: {reweight: [classifier]}\n  lower_to_upper: {classifier: [reweight]}",
        "graph: [reweight, classifier]",
        "graph: found ['reweight', 'classifier']; expected keys out of upper_to_lower",
    ),
    "a logger as a text": _changed("{wandb: false}", "wandb", "logger: found 'wandb'; expected keys out of mode"),
    "an arrow for an edge": _changed(
        "{reweight: [classifier]}", "reweight -> classifier", "graph.upper_to_lower: found 'reweight -> classifier'"
    ),
    "an edge to itself": _changed(
        "{reweight: [classifier]}", "{reweight: [reweight]}", "an edge from 'reweight' to itself"
    ),
    "a problem with a space": _file(
        RECIPE.replace("classifier", "my net"), "found the key 'my net'", "letters, digits"
    ),
    "a problem with a dot": _file(RECIPE.replace("classifier", "my.net"), "found the key 'my.net'", "letters, digits"),
    "a problem that YAML reads as true": _file(RECIPE.replace("classifier", "on"), "found the key True", "quotes"),
    "an optimizer by its short name": _changed(
        "torch.optim.SGD", "SGD", f"{CLASSIFIER}optimizer._target_: found 'SGD'", "Did you mean 'torch.optim.SGD'?"
    ),
    "an optimizer without a target": _changed(
        "_target_: torch.optim.SGD", "name: sgd", f"{CLASSIFIER}optimizer: found no _target_"
    ),
    "three betas": _changed(
        "Adam, lr: 1.0e-3",
        "Adam, lr: 1.0e-3, betas: [0.9, 0.99, 0.9]",
        "problems.reweight.optimizer.betas: found [0.9, 0.99, 0.9]; expected a list of 2",
    ),
    "a batch as a fraction": _changed(
        "train, batch_size: 100",
        "train, batch_size: 0.1",
        f"{CLASSIFIER}stream.batch_size: found 0.1; expected a whole",
    ),
    "a stream that is a split": _changed(
        "{split: train, batch_size: 100}", "train", f"{CLASSIFIER}stream: found 'train'; expected keys out of split"
    ),
    "hidden units that are no list": _classifier(
        "module: {hidden: 100}", f"{CLASSIFIER}module.hidden: found 100; expected a list of whole numbers"
    ),
    "noise in percent": _added(
        "data: {label_noise: {kind: uniform, rate: 40%}}",
        "data.label_noise.rate",
        "40%",
        "Set data.label_noise.rate=0.4",
    ),
    "splits as fractions": _added("data: {sizes: {train: 0.8}}", "data.sizes: found", "a mapping of whole numbers"),
    "splits larger than the data": _added(
        "data: {sizes: {train: 1700}}", "data.sizes asks for 2", "at most 1797", "Lower data.sizes.train"
    ),
    "another number of classes": _added("data: {num_classes: 5}", "data.num_classes=5; expected 10"),
    "tasks with data that has none": _classifier(
        "tasks: 4", f"{CLASSIFIER}loss: found a tensor of shape (100, 1, 8, 8) in a batch for 4 tasks", "remove tasks"
    ),
    "reset to another kind of module": _classifier(
        "reset_to: reweight", f"{CLASSIFIER}reset_to: found 'reweight'", "'layers.1.weight' is not there", "same module"
    ),
    "reset to itself": _classifier(
        "reset_to: classifier", f"{CLASSIFIER}reset_to: found 'classifier', the problem itself", "Write initial"
    ),
    "a rate that the problem itself gives": _changed(
        "lr: 0.01}",
        "lr: {problem: classifier}}",
        f"{LR}: found 'classifier', the problem whose optimizer this is; expected another problem",
        "graph.upper_to_lower.rate: [classifier]",
    ),
    "batches of another problem beside a stream": _classifier(
        "same_batch_as: reweight",
        f"{CLASSIFIER}same_batch_as: found 'reweight' beside a stream; expected one of the two",
        "Write problems.classifier.stream: null",
    ),
    "no data": _added("data: null", "data: found null; expected the node", "- override /data: digits"),
    "a name of 300 letters": _changed(
        "name: odd", f"name: {'a' * 300}", "name: found 300 characters, 'aaaaaaaaaaaaaaaaaaaa'...; expected at most 100"
    ),
    "a role of itself": _changed(
        "weigher: reweight}", "weigher: classifier}", "graph.upper_to_lower.reweight: nothing uses the edge"
    ),
    "the metrics of an upper problem": _changed(
        "problem: classifier, metrics",
        "problem: reweight, metrics",
        "evaluate.problem: mlotool.models",
        "128x8 and 1x100",
    ),
    "batches of each other": _classifier(
        "same_batch_as: classifier",
        f"{CLASSIFIER}same_batch_as: found 'classifier' beside a stream; expected",
        "Remove same_batch_as",
    ),
    "an upper problem that never steps": _classifier(
        "warmup_steps: 300",
        "warning: runner.max_ticks: found 2, while reweight waits for 301 steps of 'classifier'",
        "set runner.max_ticks=602",
        code=0,
        leaves=("run",),
    ),
    "a scheduler that ends before the run": _classifier(
        "scheduler: {_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: 0.1, total_steps: 1}",
        f"{CLASSIFIER}scheduler: torch.optim.lr_scheduler.OneCycleLR failed: ValueError: Tried to step 2 times",
        "runner.max_ticks",
        code=1,
        leaves=("run",),
    ),
    "a scheduler without its objective": _classifier(
        "scheduler: {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau}",
        f"{CLASSIFIER}scheduler: found ReduceLROnPlateau with scheduler_interval=step",
    ),
    "an objective with a condition": _changed(
        "objective: val/accuracy", "objective: val/accuracy > 90%", "found 'val/accuracy > 90%', which is not logged"
    ),
    "tasks that change between their steps": _builtin(
        "maml",
        "problems.learner.stream.repeat=3",
        says=("problems.learner.stream.repeat: found 3 with unroll_steps=5", "the tasks change", "repeat=5"),
        code=0,
        leaves=("run",),
    ),
    "a start from a solver that takes no steps": _builtin(
        "maml",
        "hypergradient=cg",
        says=("reset_to: 'meta' shapes 'learner' through its steps", "hypergradient: unrolled"),
    ),
    "an evaluation of a recipe that has none": _builtin(
        "maml",
        "evaluate={problem: learner, metrics: [mean_squared_error], splits: {val: 2}}",
        says=("analyses.val: found the name of a split",),
    ),
    "a learned start of another size": _builtin(
        "maml", "problems.learner.module.hidden=[20]", says=("reset_to: found 'meta'", "the same module")
    ),
    "tasks on two devices": _builtin("maml", "runner.devices=2", says=("problems.learner.tasks: found 16",)),
    "half precision through steps": _builtin("maml", "runner.precision=fp16", says=("an overflow skips", "bf16")),
    "a fixed rate in the place of a learned one": _builtin(
        "learned_lr",
        f"{LR}=0.1",
        says=("nothing uses the edge to 'classifier'", "or its optimizer or reset_to names it"),
    ),
    "a learned rate and a scheduler": _builtin(
        "learned_lr",
        f"+{CLASSIFIER}scheduler={{_target_: torch.optim.lr_scheduler.StepLR, step_size: 1}}",
        says=(f"{CLASSIFIER}scheduler: found", "since a problem sets hyperparameters"),
    ),
    "a learned rate for three of six parameters": _builtin(
        "learned_lr",
        "problems.rate.module.size=3",
        says=(f"{LR}: its problem's module gives shape (3,)", "Correct the module's size"),
        leaves=("run",),
    ),
    "images for a transformer": _builtin(
        "mwn_text",
        "data=digits_noisy",
        says=(
            "found ${data.vocabulary_size}, while the data has no vocabulary_size",
            "model@problems.classifier.module=",
        ),
    ),
    "more stages than layers": _builtin(
        "layerparallel_penalty",
        f"{CLASSIFIER}parallel.stages=100",
        says=("found 100 stages; expected at most 9", "Set stages=9"),
    ),
    "stored states of augmented samples": _builtin(
        "layerparallel_penalty", "data.augment=true", says=("parallel.variables: found stored", "variables=auxnet")
    ),
    "unrolled steps of layers in parallel": _builtin(
        "mwn_layerparallel", "hypergradient=unrolled", says=("needs the gradients of 'classifier'",)
    ),
    "shards below a hypergradient": _builtin(
        "mwn", f"{CLASSIFIER}shard=true", says=("shard: found shard with hypergradient; expected false",)
    ),
    "a hypergradient at the upper problem": _changed(
        "  reweight:\n    loss",
        "  reweight:\n    hypergradient: {_target_: mlotool.hypergradient.Unrolled}\n    loss",
        "problems.reweight.hypergradient: found one, while no problem reads the solution of 'reweight'",
        "Move it to problems.classifier.hypergradient.",
        code=0,
        leaves=("run",),
    ),
    "a solver's name for a node": _changed(
        "  reweight:\n    loss",
        "  reweight:\n    hypergradient: neumann\n    loss",
        "problems.reweight.hypergradient: found 'neumann'; expected a node",
        "`- /hypergradient@problems.reweight.hypergradient: neumann` in its defaults list",
    ),
    "a scheduler that waits for evaluations": _file(
        RECIPE.replace("splits: {val: 2, test: end}", "splits: {test: end}")
        .replace("objective: val", "objective: test")
        .replace(
            "SGD, lr: 0.01}",
            "SGD, lr: 1%}\n    scheduler: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 1, gama: 0.5}\n"
            "    scheduler_interval: evaluation",
        ),
        f"{LR}: found '1%'",
        "unknown keyword 'gama'",
        "Did you mean 'gamma'?",
    ),
    "a metric by its class": _with(
        "evaluate.metrics=[torchmetrics.Accuracy]",
        says=("evaluate.metrics: found 'torchmetrics.Accuracy'", "Did you mean 'accuracy'?"),
    ),
    "a patience longer than the run": Mistake(
        ("run", "odd.yaml", "runner.early_stopping_patience=3", "evaluate.splits.val=100"),
        ("warning: runner.early_stopping_patience: found 3 with evaluate.splits.val=100", "never stopped early"),
        0,
        {"odd.yaml": RECIPE},
        leaves=("run",),
    ),
    "edges both ways down": _changed(
        "upper_to_lower: {reweight: [classifier]}",
        "upper_to_lower: {reweight: [classifier], classifier: [reweight]}",
        "stands in graph.lower_to_upper.classifier as well; expected the two edges of a pair in opposite directions",
    ),
    "a tab": _file(RECIPE.replace("    stream: {split: meta", "\tstream: {split: meta"), "this is not YAML", "line 12"),
    "a bracket that is not closed": _file(RECIPE.replace("test: end}}", "test: end}"), "this is not YAML", "line 24"),
    "a fence of Markdown": _file(f"```yaml\n{RECIPE}```\n", "this is not YAML", "line 1"),
    "UTF-16": _file(RECIPE.encode("utf-16"), "odd.yaml: cannot be read", "expected a YAML text file"),
    "an empty file": _file("", "odd.yaml: found '' as the first line; expected '# @package _global_'"),
    "itself in its defaults": _file("# @package _global_\ndefaults: [odd, _self_]\n", "found 'odd' twice"),
    "defaults that are no list": _file(
        "# @package _global_\ndefaults: plain\n", "defaults: found a str; expected a list"
    ),
}
