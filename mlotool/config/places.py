"""Where a key belongs that stands at the root of a config, or is called otherwise elsewhere. No torch."""

from mlotool.config.schema import keys_at

_NODES = (
    "runner",
    "evaluate",
    "logger",
    "sweep",
    "problems.<name>",
    "problems.<name>.stream",
    "graph",
)
_ELSEWHERE = {
    "lr": "problems.<name>.optimizer.lr",
    "learning_rate": "problems.<name>.optimizer.lr",
    "momentum": "problems.<name>.optimizer.momentum",
    "weight_decay": "problems.<name>.optimizer.weight_decay",
    "max_epochs": "runner.max_ticks",
    "epochs": "runner.max_ticks",
    "num_epochs": "runner.max_ticks",
    "max_steps": "runner.max_ticks",
    "steps": "runner.max_ticks",
    "train_iters": "runner.max_ticks",
    "patience": "runner.early_stopping_patience",
    "fast_dev_run": "debug=fast",
    "device": "runner.accelerator",
    "gpus": "runner.devices",
    "ckpt_path": "resume",
    "output_dir": "hydra.run.dir",
    "batch_size": "problems.<name>.stream.batch_size",
    "precision": "runner.precision",
    "trainer": "runner",
    "strategy": "runner.devices",
    "metric": "evaluate.metrics",
    "monitor": "objective",
    "solver": "hypergradient.solver",
    "n_trials": "sweep.num_trials",
    "config": "hypergradient",
}
"""Names of other programs' settings, and those that stand in several nodes."""


def place_of(key: str) -> str:
    """Return where a key is meant to stand; empty where nobody knows.

    Example:
        >>> place_of("max_ticks"), place_of("lr"), place_of("nothing")
        ('runner.max_ticks', 'problems.<name>.optimizer.lr', '')
    """
    name = key.lower()
    found = (f"{node}.{name}" for node in _NODES if name in keys_at(node.replace("<name>", "name")))
    return _ELSEWHERE.get(name) or next(found, "")
