"""What makes each recipe small enough for a test, on data that are there."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

import mlotool

RECIPES = sorted(path.stem for path in (Path(__file__).parents[1] / "recipes").glob("*.yaml"))
CELLS = [f"problems.classifier.module.base.{size}" for size in ("num_cells=3", "width=4")]
# A cell of one node has two edges, of four nodes fourteen, and each edge has all operations.
SEARCH = ["problems.classifier.module.base.num_nodes=1", "debug.limit_ticks=2"]
SHALLOW = ["problems.classifier.module.depth=8"]
# A penalty for states of the paper's size.
PARALLEL = ["problems.classifier.parallel.beta=1"]
# On CIFAR-10 at the size of their paper; what of it is too much for a test is made smaller.
SMALLER = {
    "data_poisoning_paper": ["problems.classifier.module.depth=8", "problems.poison.module.num_samples=50"],
    "darts_evaluate_paper": CELLS,
    "darts_paper": [*CELLS, *SEARCH],
    "label_correction_paper": [],
    "mwn_cifar10": ["problems.classifier.module.depth=8"],
    "layerparallel_imagenet_paper": [
        *(*PARALLEL, "debug.limit_ticks=2", "problems.classifier.stream.num_workers=0"),
        "problems.classifier.module.name=resnet18",
    ],
    "layerparallel_resnet_paper": [
        *("problems.classifier.module.depth=14", "problems.classifier.parallel.auxnet.depth=8", *PARALLEL)
    ],
    "layerparallel_wrn_paper": [
        *(f"problems.classifier.{node}.widen_factor=1" for node in ("module", "parallel.auxnet")),
        *("problems.classifier.module.depth=16", "problems.classifier.parallel.auxnet.depth=10", *PARALLEL),
    ],
}
SHORT = ["data.length=16", "data.sizes={train: 16, meta: 8, val: 8, test: 8}"]
EPISODES = ["data.length=16", "data.sizes={train: 16, val: 4, test: 4}"]


def narrow(*names: str) -> list[str]:
    """Return what makes the decoders of problems narrow."""
    return [f"problems.{name}.{size}" for name in names for size in ("width=16", "hidden=32", "num_heads=2")]


def other_model(problem: str, option: str) -> list[str]:
    """Return what puts a model of ours in the place of one of Hugging Face, whose packages need not be there."""
    deleted = ("config", *(["lora"] if problem == "model" else []))
    return [f"model@problems.{problem}.module={option}", *(f"~problems.{problem}.module.{key}" for key in deleted)]


# On data that has to be downloaded, or more of it than a test needs: on the embedded one here, with a model for it.
ELSEWHERE = {
    **{f"layerparallel_{name}": SHALLOW for name in ("imagenet", "lagrangian", "penalty")},
    "darts": [*SEARCH, *CELLS, *(f"problems.{name}.stream.batch_size=16" for name in ("architecture", "classifier"))],
    "domain_adaptation_paper": [
        *("data=two_domains", "data.sizes={pretrain: 80, finetune: 20, meta: 0, val: 20, test: 20}"),
        *(f"model@problems.{name}.module=resnet8" for name in ("reweight", "finetune", "pretrain.module")),
        *(f"problems.{name}.optimizer.groups=[]" for name in ("reweight", "finetune", "pretrain")),
        *("problems.finetune.loss.free=[]", "problems.pretrain.loss.free=[]"),
        *(f"problems.{name}.stream.num_workers=0" for name in ("reweight", "finetune", "pretrain")),
    ],
    # On a small model and short texts.
    **{name: [*SHORT, *narrow("model.module")] for name in ("lm_data_mixture", "lm_learning_rate", "lm_plain")},
    "lm_lora_data_mixture": [*SHORT, *other_model("model", "decoder"), *narrow("model.module")],
    "lm_loss_weighting": [*SHORT, *narrow("model.module", "weigher.module.decoder")],
    "lm_maml": [*EPISODES, *narrow("meta.module", "learner.module")],
    "lm_plain_start": [*EPISODES, *narrow("meta.module")],
    "lm_learning_rate_paper": [
        *(*SHORT, "model@problems.model.module=decoder", "problems.rate.module.size=14", *narrow("model.module"))
    ],
    "lm_loss_weighting_paper": [
        *SHORT,
        *(f"model@problems.{node}=decoder" for node in ("weigher.module.decoder", "model.module")),
        *narrow("weigher.module.decoder", "model.module"),
    ],
    "lm_maml_paper": [
        *(*SHORT, *(f"model@problems.{name}.module=decoder" for name in ("meta", "learner"))),
        *narrow("meta.module", "learner.module"),
    ],
    "text_cleaning": other_model("classifier", "text_transformer"),
    "mwn_text_paper": [
        *("data=synthetic_text", "~data.tokenizer", "model@problems.classifier.module=text_transformer"),
        "problems.classifier.accumulate_batches=2",
    ],
}
CIFAR = [name for name in RECIPES if "cifar10" in name or name in SMALLER]


def small(recipe: str, image_folder: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Return the config of a recipe with what makes it small.

    Args:
        recipe: its name.
        image_folder: the fixture of that name.
        overrides: more words of a command line.
    """
    words = ["debug=fast", "debug.limit_ticks=2", "logger=csv", "runner.progress_bar=false"]
    if recipe in CIFAR:
        sizes = "{train: 50, meta: 10, val: 10, test: 20}"
        words += ["data=cifar10_folder_longtailed", f"data.root={image_folder}", f"data.sizes={sizes}"]
        words += ["data.imbalance_factor=5", "data.image_shape=[3,8,8]"]
    return mlotool.compose(recipe, [*words, *SMALLER.get(recipe, []), *ELSEWHERE.get(recipe, []), *overrides])
