"""What `layerparallel.accuracy` trains: data sets and networks, and the rows of its tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

PARALLEL = "problems.classifier.parallel"
AUGMENTED = ", augmented"
BACKPROPAGATION, DATA_PARALLEL = "backpropagation", "data parallel, 2 ranks"
LONG = 9
"""So many times the ticks has a long run: 300 epochs on MNIST."""
LONG_SUFFIX = f", {LONG} times the ticks"


@dataclass(frozen=True)
class Row:
    """One line of a table: how a network is trained.

    Args:
        name: of the line.
        settings: of `Auxiliary`; None: backpropagation through the whole network.
        is_augmented: whether images are cropped (and on CIFAR-10 flipped) at random.
        num_ranks: processes that divide each batch.
        length: how many times the ticks of the others.
    """

    name: str
    settings: tuple[str, ...] | None = None
    is_augmented: bool = False
    num_ranks: int = 1
    length: int = 1

    def config(self, data: "Data", ticks: int, seed: int, root: str | None) -> list[str]:
        """Return the overrides of the recipe that make this run."""
        return [
            *self.overrides(data),
            *([] if root is None else [f"data.root={root}"]),
            f"data.augment={self.is_augmented}",
            f"runner.max_ticks={ticks}",
            f"problems.classifier.scheduler.T_max={ticks}",
            f"seed={seed}",
            *([f"{PARALLEL}=null"] if self.settings is None else map(_override, self.settings)),
            "logger=csv",
        ]

    def overrides(self, data: "Data") -> list[str]:
        """Return those of the recipe that the data set and its augmentation make."""
        return [*data.overrides, *(data.augmented if self.is_augmented else ())]


@dataclass(frozen=True)
class Data:
    """A data set with the network that is trained on it.

    Args:
        ticks: of a run.
        overrides: of the recipe layerparallel_penalty.
        augmented: further ones, of the rows with augmented images.
        stored: settings of stored variables between two stages.
        stored_of_more: those between more stages.
        stored_for_long: those between more stages of the long runs.
        networks: settings of AuxNet, and of ReAuxNet.
        chain: further ones of AuxNet.
        lagrangian: settings of stored variables with multipliers.
        cuts: by K, the layers that begin the later stages, where the times are of another cut than the default one.
        is_augmented: whether the networks' rows are.
        has_batch_norm: without it, data-parallel ranks compute backpropagation's gradient and have no row.
        num_points: of a curve.
    """

    ticks: int
    overrides: tuple[str, ...]
    augmented: tuple[str, ...] = ()
    stored: tuple[str, ...] = ("beta=10",)
    stored_of_more: tuple[str, ...] = ("beta=10", "lambda_steps=3")
    stored_for_long: tuple[str, ...] = ("beta=10", "lambda_steps=3")
    networks: tuple[str, ...] = ("auxnet_lr=3e-3", "beta=1", "auxnet_blocks=3")
    chain: tuple[str, ...] = ()
    lagrangian: tuple[str, ...] = ("beta=10", "lambda_rate=0.3")
    cuts: Mapping[int, str] = field(default_factory=dict)
    is_augmented: bool = True
    has_batch_norm: bool = True
    num_points: int = 25


DATA = {
    "digits": Data(240, ("data=digits",)),
    "mnist": Data(
        500,
        ("data=mnist", "data.sizes={train: 1500, val: 2000, test: 2000}", "problems.classifier.module.width=4"),
        networks=("auxnet_lr=3e-3", "beta=1"),
        cuts={2: "[stages.0.1]"},
    ),
    "cifar10": Data(
        1000,
        ("data=cifar10_folder", "data.sizes={train: 2500, val: 2000, test: 4000}", "data.image_shape=[3,16,16]"),
        augmented=(
            "problems.classifier.optimizer._target_=torch.optim.Adam",
            "problems.classifier.optimizer.lr=5e-3",
            "~problems.classifier.optimizer.momentum",
        ),
        stored_of_more=("beta={start: 3.0,factor: 1.08,every: 20,maximum: 1000.0}", "lambda_steps=3"),
        networks=(
            "auxnet_lr={start: 4e-3,factor: 0.9,every: 40}",
            "beta=2",
            "auxnet_blocks=3",
            "distillation_steps=2",
        ),
        chain=("auxnet_gradient=chain",),
        num_points=10,
    ),
    "mlp": Data(
        658,
        (
            "data=mnist",
            "data.sizes={train: 3000, val: 2000, test: 2000}",
            "model@problems.classifier.module=mlp",
            "problems.classifier.module.hidden=[2048,2048,2048,2048]",
            "problems.classifier.stream.batch_size=32",
            "problems.classifier.optimizer.lr=0.02",
        ),
        stored=("beta=1000",),
        lagrangian=("beta=1000",),
        networks=("auxnet_lr=3e-4", "beta=100", "auxnet_blocks=1"),
        cuts={2: "[layers.5]"},
        is_augmented=False,
        has_batch_norm=False,
        num_points=14,
    ),
}
ADAM = "auxnet_optimizer=adam"
STAGES = (2, 3)
BETAS = (0.1, 1, 10, 100)
RATES = ("[0.1,0.1]", "[0.5,0.5]", "[0.05,1]", "[0.3,1]", "[0.7,1]", "[1,1]", "auto")
"""Of stored variables between three stages, beside the default."""


def main_rows(data: Data, stages: Sequence[int] = STAGES) -> Iterator[Row]:
    """Yield the rows that every table has: backpropagation, data parallel, and each method by the number of stages."""
    for is_augmented in sorted({False, data.is_augmented}):
        suffix = AUGMENTED if is_augmented else ""
        yield Row(BACKPROPAGATION + suffix, None, is_augmented)
        if data.has_batch_norm:
            yield Row(DATA_PARALLEL + suffix, None, is_augmented, num_ranks=2)
    suffix = AUGMENTED if data.is_augmented else ""
    for count in stages:
        own = (f"stages={count}", *([f"cut={data.cuts[count]}"] if count in data.cuts else []))
        penalty = data.stored if count == 2 else data.stored_of_more
        yield Row(f"stored, penalty, K={count}", (*own, "variables=stored", "method=penalty", *penalty))
        yield Row(f"stored, lagrangian, K={count}", (*own, "variables=stored", "method=lagrangian", *data.lagrangian))
        # Between two stages both are one network from the inputs, and train alike to the bit.
        for name, variables in (("AuxNet", "auxnet"), ("ReAuxNet", "recursive"))[: 1 if count == 2 else 2]:
            settings = (*own, f"variables={variables}", ADAM, *data.networks, *(data.chain if name == "AuxNet" else ()))
            yield Row(f"{name}{suffix}, K={count}", settings, data.is_augmented)


def long_rows(data: Data, stages: Sequence[int] = STAGES) -> Iterator[Row]:
    """Yield those that show what time alone does: backpropagation and stored variables, for LONG times the ticks."""
    wanted = (BACKPROPAGATION, *(f"stored, penalty, K={count}" for count in stages))
    for row in main_rows(replace(data, stored_of_more=data.stored_for_long), stages):
        if row.name in wanted:
            yield Row(row.name + LONG_SUFFIX, row.settings, length=LONG)


def further_rows() -> Iterator[Row]:
    """Yield those of tables of their own: rates between three stages, and betas of networks of one block."""
    for rate in RATES:
        settings = ("stages=3", "variables=stored", "method=penalty", "beta=10", f"lambda_rate={rate}")
        yield Row(f"stored, penalty, K=3, rate={rate}", settings)
    for beta in BETAS:
        yield Row(
            f"AuxNet of a block, augmented, K=2, beta={beta}",
            ("stages=2", "variables=auxnet", ADAM, "auxnet_lr=3e-3", f"beta={beta}"),
            True,
        )


def _override(setting: str) -> str:
    # The recipe has the first four of these; the others are new keys.
    known = ("stages=", "variables=", "method=", "beta=")
    return f"{'' if setting.startswith(known) else '+'}{PARALLEL}.{setting}"
