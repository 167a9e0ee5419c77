"""Every recipe runs; one of them, written as Python, takes the same steps."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.utils import save_image

import mlotool
from mlotool import Graph, Identity, Implicit, Problem, Program, Schedule, Stream
from mlotool.config import build, derived_seed
from mlotool.losses import cross_entropy, reweighted_cross_entropy
from mlotool.models import MLP, WeightNet

RECIPES = sorted(path.stem for path in (Path(__file__).parents[1] / "recipes").glob("*.yaml"))
CELLS = ["problems.classifier.module.num_cells=3", "problems.classifier.module.width=4"]
# Cells of two nodes have a third of the edges of four, and each edge has all operations.
SEARCH = [*(f"problems.{name}.module.num_nodes=2" for name in ("architecture", "classifier")), "debug.limit_ticks=2"]
# A penalty for states of the paper's size.
PARALLEL = ["problems.classifier.parallel.beta=1"]
# On CIFAR-10 at the size of their paper; what of it is too much for a test is made smaller.
SMALLER = {
    "data_poisoning_paper": ["problems.classifier.module.depth=8", "problems.poison.module.num_samples=50"],
    "darts_evaluate_paper": CELLS,
    "darts_paper": [*CELLS, *SEARCH],
    "label_correction_paper": [],
    "layerparallel_imagenet_paper": [*PARALLEL, "debug.limit_ticks=2", "problems.classifier.stream.num_workers=0"],
    "layerparallel_resnet_paper": [
        *("problems.classifier.module.depth=14", "problems.classifier.parallel.auxnet.depth=8", *PARALLEL)
    ],
    "layerparallel_wrn_paper": [
        *(f"problems.classifier.{node}.widen_factor=1" for node in ("module", "parallel.auxnet")),
        *("problems.classifier.module.depth=16", "problems.classifier.parallel.auxnet.depth=10", *PARALLEL),
    ],
}
SHORT = ["data.length=32", "data.sizes={train: 50, meta: 10, val: 10, test: 20}"]
# On data that has to be downloaded; on the embedded one here, with a model for it.
ELSEWHERE = {
    "darts": [*SEARCH, *(f"problems.{name}.stream.batch_size=16" for name in ("architecture", "classifier"))],
    "domain_adaptation_paper": [
        *("data=two_domains", "data.sizes={pretrain: 80, finetune: 20, meta: 0, val: 20, test: 20}"),
        *(f"model@problems.{name}.module=resnet8" for name in ("reweight", "finetune", "pretrain.module")),
        *(f"problems.{name}.optimizer.groups=[]" for name in ("reweight", "finetune", "pretrain")),
        *("problems.finetune.loss.free=[]", "problems.pretrain.loss.free=[]"),
        *(f"problems.{name}.stream.num_workers=0" for name in ("reweight", "finetune", "pretrain")),
    ],
    # On a small model and short texts.
    "lm_learning_rate_paper": [*SHORT, "model@problems.model.module=decoder", "problems.rate.module.size=14"],
    "lm_loss_weighting_paper": [
        *SHORT,
        *(f"model@problems.{node}=decoder" for node in ("weigher.module.decoder", "model.module")),
    ],
    "lm_maml_paper": [*SHORT, *(f"model@problems.{name}.module=decoder" for name in ("meta", "learner"))],
    "mwn_text_paper": ["data=synthetic_text", "~data.tokenizer", "model@problems.classifier.module=text_transformer"],
}
# Both have the radius of the DARTS paper, meant for its images; of a few that are noise, eight pixels wide, the cells'
# batch statistics bend at every radius, and the warning knows no better one.
BENDS = pytest.mark.filterwarnings(
    "ignore:problems.classifier.hypergradient.radius. finite differences at a radius of 1.0e-02 "
    ".*Choose product. reverse.$"
)
CIFAR = [name for name in RECIPES if "cifar10" in name or name in SMALLER]


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes of CIFAR-10's layout, a few images each."""
    root = tmp_path_factory.mktemp("images")
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 8), ("test", 2)):
        for label in range(10):
            folder = root / part / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                save_image(torch.rand(3, 32, 32, generator=generator), folder / f"{number}.png")
    return root


# At its start a network may have negative curvature, which a solver says once.
@pytest.mark.filterwarnings("ignore:The ConjugateGradient solve at problem 'learner'")
# Another version of Python has other text.
@pytest.mark.filterwarnings("ignore:data.sha256")
@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=BENDS) if name in ("darts", "darts_paper") else name for name in RECIPES]
)
def test_every_recipe_runs(recipe: str, tmp_path: Path, image_folder: Path) -> None:
    overrides = ["debug=fast", "logger=csv", "runner.progress_bar=false"]
    if recipe in CIFAR:
        sizes = "{train: 50, meta: 10, val: 10, test: 20}"
        overrides += ["data=cifar10_folder_longtailed", f"data.root={image_folder}", f"data.sizes={sizes}"]
        overrides += ["data.imbalance_factor=5", "data.image_shape=[3,8,8]"]
    overrides += SMALLER.get(recipe, []) + ELSEWHERE.get(recipe, [])
    result = mlotool.run(mlotool.compose(recipe, overrides), output_dir=tmp_path / "run")
    steps = {key: value for key, value in result.metrics.items() if key.endswith("/step")}
    assert min(steps.values()) >= 1, "a problem never stepped"
    assert any(key.startswith("test/") for key in result.metrics)
    assert result.checkpoint is not None


def test_a_recipe_as_a_dozen_lines_of_python() -> None:
    config = mlotool.compose("mwn", ["debug.limit_warmup_steps=2", "logger=csv"])
    built = build(config)
    expected = _losses(Schedule(built.program))

    def seeded(name: str, make: type[nn.Module], *args: object) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(0, "module", name))
            return make(*args)

    def stream(name: str, split: str) -> Stream:
        return Stream(built.data.split(split), 100, seed=derived_seed(0, "stream", name))

    reweight = Problem(
        "reweight",
        seeded("reweight", WeightNet, 100),
        cross_entropy,
        roles={"model": "classifier"},
        stream=stream("reweight", "meta"),
        optimizer=partial(torch.optim.Adam, lr=1e-3),
    )
    classifier = Problem(
        "classifier",
        seeded("classifier", MLP, (1, 8, 8), 10, (128, 128)),
        partial(reweighted_cross_entropy, normalize=False),
        roles={"model": "classifier", "weigher": "reweight"},
        stream=stream("classifier", "train"),
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=5e-3),
        hypergradient=Implicit(Identity(), product="finite_difference"),
        warmup_steps=2,
    )
    graph = Graph({"reweight": ["classifier"]}, {"classifier": ["reweight"]})
    found = _losses(Schedule(Program([reweight, classifier], graph)))
    # The recipe's optimizers are fused, which rounds in another order.
    assert [each.keys() for each in found] == [each.keys() for each in expected]
    assert all(each == pytest.approx(wanted, rel=1e-5) for each, wanted in zip(found, expected, strict=True))


def _losses(schedule: Schedule) -> list[dict[str, float]]:
    return [{name: float(step.loss) for name, step in schedule.tick().items()} for _ in range(6)]
