"""A config whose values are set in a copy is the one that Hydra composes."""

from typing import Any

import pytest
from omegaconf import DictConfig, ListConfig

from mlotool import config as configuration
from mlotool.config.variation import differing_values, varied

RATE = "problems.classifier.optimizer.lr"


def described(node: Any) -> Any:
    """Return all that tells one config from another: kinds, types, flags, references, values."""
    about = [type(node).__name__, node._metadata.ref_type, node._metadata.object_type, node._metadata.optional]
    about.append(dict(node._metadata.flags or {}))
    if isinstance(node, DictConfig | ListConfig) and not (
        node._is_none() or node._is_missing() or node._is_interpolation()
    ):
        keys = list(node) if isinstance(node, DictConfig) else range(len(node))
        return [*about, [(key, described(node._get_node(key))) for key in keys]]
    return [*about, node._value()]


CASES = [
    ("plain", (), (f"{RATE}=0.5",)),
    ("plain", (), (f"{RATE}=1e-3", "seed=7", "data.seed=3")),
    ("plain", ("data=digits_noisy",), ("seed=-4", "data.label_noise.rate=0.25")),
    ("plain", (f"{RATE}=0.3",), ("runner.max_ticks=7", "runner.num_threads=null", "runner.precision=bf16")),
    ("plain", (), ("problems.classifier.module.hidden=[4,5]", "problems.classifier.stream.shuffle=false")),
    ("plain", (), ("evaluate.metrics=[accuracy,f1]", "evaluate.splits.val=3", "objective=val/f1")),
    ("plain", (), ("+problems.classifier.optimizer.dampening=0.1", "++problems.classifier.optimizer.nesterov=true")),
    ("plain", (), ("objective='val/accuracy'", "resume='/a b/it\\'s'", "logger.project=3")),
    ("plain", (), ("problems.classifier.precision=fp16", "problems.classifier.tasks=2")),
    ("mwn", ("hypergradient=cg",), ("hypergradient.solver.max_iterations=3", "problems.reweight.optimizer.lr=1e-5")),
    ("mwn", ("problems.classifier.optimizer={_target_: torch.optim.Adam, lr: 0.1}",), ("seed=3",)),
    ("darts", (), ("seed=1", "problems.architecture.gradient_clip_norm=2", "problems.architecture.unroll_steps=2")),
    ("maml", (), ("seed=1", "problems.learner.tasks=4", "data.seed=5")),
    ("learned_lr", (), ("seed=9", "debug.limit_ticks=3")),
    ("domain_adaptation", ("debug=fast",), ("seed=9", "debug.limit_samples=30")),
]


@pytest.mark.parametrize(("recipe", "shared", "words"), CASES)
def test_values_in_a_copy_are_those_of_hydra(recipe: str, shared: tuple[str, ...], words: tuple[str, ...]) -> None:
    base = configuration.compose(recipe, shared)
    before = described(base)
    found = varied(base, words)
    assert found is not None
    assert described(found) == described(configuration.compose(recipe, [*shared, *words]))
    assert described(base) == before


@pytest.mark.parametrize(
    "word",
    [
        "data=mnist",
        "problems.classifier.optimizer={lr: 1}",
        "problems.classifier.optimizer=3",
        "problems.classifier.module.hidden=3",
        "problems.classifier.loss._target_=mlotool.losses.mean_squared_error",
        "evaluate.batch_size=3",
        "problems.other.tasks=3",
        "seed=${data.seed}",
        "data.seed='${seed}'",
        "seed=a",
        "problems.classifier.stream.batch=3",
        "seed=0,1",
        "~seed",
        "optimizer@problems.classifier.optimizer=adam",
        "hydra.job.name=a",
    ],
)
def test_what_is_more_than_a_value_is_left_to_hydra(word: str) -> None:
    base = configuration.compose("plain", ["evaluate=null", "objective=null"])
    jobs = [["+recipe=plain", word], ["+recipe=plain", "seed=5"]]
    is_left = varied(base, [word]) is None
    if "_target_" not in word and not word.startswith(("data=", "hydra.")):
        assert is_left
    else:
        # They are not asked for at all.
        other = [word.partition("=")[0] + "=other"]
        assert differing_values([jobs[0], [*jobs[0][:1], *other]]) == []


def test_only_what_differs_at_the_same_keys_is_set() -> None:
    seeds = [["+recipe=mwn", "seed=0", f"{RATE}=1"], ["+recipe=mwn", "seed=1", f"{RATE}=1"]]
    assert differing_values(seeds) == [1]
    assert differing_values([*seeds, ["+recipe=mwn", f"{RATE}=1", "seed=2"]]) == []
    assert differing_values([*seeds, ["+recipe=mwn", "seed=2"]]) == []
    assert differing_values([["+recipe=mwn", "seed=0"], ["+recipe=plain", "seed=1"]]) == [1]


@pytest.mark.parametrize(
    ("shared", "differs"),
    [
        ("problems.classifier.optimizer={lr: 2}", f"{RATE}={{}}"),
        (f"{RATE}=3", f"{RATE}={{}}"),
        ("~problems.classifier.optimizer", f"{RATE}={{}}"),
        ("optimizer@problems.classifier.optimizer.lr=x", f"{RATE}={{}}"),
        ("hydra.searchpath=[mine]", "seed={}"),
    ],
)
def test_a_key_that_another_word_changes_too_is_left_to_hydra(shared: str, differs: str) -> None:
    assert differing_values([[shared, differs.format(value)] for value in range(2)]) == []
