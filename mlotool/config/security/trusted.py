"""Which targets a config may name. `_target_` is code, so trust is a list of exact names, never a prefix.

`torchvision.datasets.folder.os.system` and `torch.nn.modules.module.torch.load` resolve: what a package's modules can
reach is everything.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlotool.config.schema import is_identifier
from mlotool.config.security.remembered import Place, read_places
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean, is_command_line
from mlotool.core.settings import targets
from mlotool.core.user_code import add_user_package, nearby, user_frame
from mlotool.folders.documents import leaves

# fmt: off
# Without SparseAdam, which wants sparse gradients.
OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD",
)
SCHEDULERS = (
    "ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR",
    "ExponentialLR", "LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "SequentialLR",
    "StepLR",
)
MODULES = (
    "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AvgPool1d", "AvgPool2d", "BatchNorm1d", "BatchNorm2d", "Bilinear",
    "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "Dropout", "Dropout1d", "Dropout2d",
    "ELU", "Embedding", "EmbeddingBag", "Flatten", "GELU", "GLU", "GRU", "GroupNorm", "Hardtanh", "Identity",
    "InstanceNorm1d", "InstanceNorm2d", "LSTM", "LayerNorm", "LeakyReLU", "Linear", "LogSigmoid", "LogSoftmax",
    "MaxPool1d", "MaxPool2d", "Mish", "MultiheadAttention", "PReLU", "RMSNorm", "RNN", "ReLU", "ReLU6", "SELU",
    "Sequential", "SiLU", "Sigmoid", "Softmax", "Softplus", "Softsign", "Tanh", "TransformerDecoder",
    "TransformerDecoderLayer", "TransformerEncoder", "TransformerEncoderLayer", "Unflatten", "Upsample",
    "ZeroPad2d",
)
# They take a list of modules, by position.
CONTAINERS = ("torch.nn.Sequential",)
# Inside a loss of the user's, say as its criterion.
LOSS_MODULES = (
    "BCELoss", "BCEWithLogitsLoss", "CosineEmbeddingLoss", "CrossEntropyLoss", "GaussianNLLLoss",
    "HingeEmbeddingLoss", "HuberLoss", "KLDivLoss", "L1Loss", "MSELoss", "MarginRankingLoss",
    "MultiLabelMarginLoss", "MultiMarginLoss", "NLLLoss", "PoissonNLLLoss", "SmoothL1Loss", "SoftMarginLoss",
    "TripletMarginLoss",
)
# fmt: on


_CALLBACKS = "DeviceStatsMonitor EarlyStopping LearningRateMonitor ModelCheckpoint ModelSummary RichModelSummary Timer"
# Lightning's other callbacks: what they do that a run of several problems cannot take. What to do instead.
_UNFIT = {
    "BackboneFinetuning ModelPruning": "changes an optimizer's parameters. Set lr: 0 for a group of parameters instead",
    "BatchSizeFinder LearningRateFinder": "lets Lightning take steps. Sweep stream.batch_size or optimizer.lr instead",
    "EMAWeightAveraging StochasticWeightAveraging WeightAveraging": "copies a whole run. Write your own callback",
    "GradientAccumulationScheduler": "changes Lightning's steps. Set problems.<name>.accumulate_batches instead",
    "LambdaCallback ThroughputMonitor": "takes functions, which YAML cannot hold. Write your own callback",
    "OnExceptionCheckpoint": "saves in the middle of a tick. Set runner.checkpoint_seconds for a newer last.ckpt",
    "RichProgressBar TQDMProgressBar": "counts chunks of ticks. Set runner.progress_bar=true, which counts ticks",
    "SpikeDetection": "watches a single loss. Write your own callback, whose `outputs` have '<problem>/loss'",
}
# Loggers that send nothing away: a recipe may name them, while the others are the command line's.
FILE_LOGGERS = ("pytorch_lightning.loggers.CSVLogger", "pytorch_lightning.loggers.TensorBoardLogger")
_UPLOADING = tuple(f"pytorch_lightning.loggers.{name}" for name in ("CometLogger", "MLFlowLogger", "WandbLogger"))
# By kind of node, the packages whose targets fit there: each marks them with `@target` where it defines them.
_HOMES = {
    "data": ("mlotool.data",),
    "module": ("mlotool.models", "mlotool.spaces"),
    "loss": ("mlotool.losses",),
    "analysis": ("mlotool.losses",),
    "metric": ("mlotool.losses",),
    "hypergradient": ("mlotool.hypergradient",),
    "solver": ("mlotool.hypergradient",),
    "trajectory": ("mlotool.hypergradient",),
    "parallel": ("mlotool.layerparallel.auxiliary", "mlotool.layerparallel.multigrid"),
    "mutator": ("mlotool.spaces",),
    "predicate": ("mlotool.spaces",),
}
_NAMES = {
    "optimizer": tuple(f"torch.optim.{name}" for name in OPTIMIZERS),
    "scheduler": tuple(f"torch.optim.lr_scheduler.{name}" for name in SCHEDULERS),
    "module": tuple(f"torch.nn.{name}" for name in (*MODULES, *LOSS_MODULES)),
    "callback": tuple(f"pytorch_lightning.callbacks.{name}" for name in _CALLBACKS.split()),
    "logger": (*FILE_LOGGERS, *_UPLOADING),
}
KINDS = tuple(dict.fromkeys((*_NAMES, *_HOMES)))
_NEVER = {"mlotool", "torch", "torchvision", "pytorch_lightning", "numpy", "hydra", "omegaconf", "yaml", "builtins"}
# The packages that this process trusts, each with the folder in which it was found; None: in memory alone.
_packages: dict[str, str | None] = {}
# Those of them that no command line and no code has named here, but the user's own settings.
_recalled: set[str] = set()
_say: Callable[[str], object] | None = None


def trust(package: str) -> None:
    """Let configs name whatever a package of the user's defines, for this process; the working directory is searched.

    Only the command line or code calls this; a recipe cannot.

    Args:
        package: the name of a top-level package or module, such as `mymodels`.

    Raises:
        ConfigError: there is no such package, or it is not the user's to trust (`os`, `torch`, ...).
    """
    _check_name(package, _trusting)
    is_in_memory = package in sys.modules and _package_place(package) is None
    place = None if is_in_memory else find_package(package, _trusting)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    _packages[package] = None if place is None else str(place.folder)
    _recalled.discard(package)
    add_user_package(package)


def find_package(package: str, said: Callable[[str], str]) -> Place:
    """Return where a package of the user's lies: on the import path, or else in the working directory.

    Args:
        package: its name.
        said: returns what the user has written, or should have, of a name.

    Raises:
        ConfigError: there is no such package, or it is not the user's to trust (`os`, `torch`, ...).
    """
    _check_name(package, said)
    place = _package_place(package)
    if place is None:
        siblings = [path.stem for path in Path.cwd().iterdir() if path.suffix == ".py" or path.is_dir()]
        raise ConfigError(
            f"{said(package)}: there is no such package in {Path.cwd()} or on the import path; expected a folder with "
            f"an __init__.py, or a .py file.{did_you_mean(package, siblings)} Correct the name, or make the file."
        )
    return place


def _check_name(package: str, said: Callable[[str], str]) -> None:
    if not is_identifier(package) or not _is_foreign(package):
        top = re.split(r"[./\\]", package)[0]
        raise ConfigError(
            f"{said(package)}: expected the top-level name of a package of yours, of letters, digits and '_', that is "
            "not a name of Python or of a package that mlotool uses. Write "
            f"{said(top if is_identifier(top) and _is_foreign(top) else 'mymodels')}."
        )


def _package_place(package: str) -> Place | None:
    """Return where a top-level package or module lies; nothing is imported."""
    try:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            # A folder without __init__.py, before which Python takes a package further down the import path.
            spec = PathFinder.find_spec(package, [str(Path.cwd())])
    except (ImportError, ValueError):
        return None
    is_file = spec is not None and spec.origin is not None and spec.origin.endswith(".py")
    return Place.of(Path(str(spec.origin))) if spec is not None and is_file else None


def recall_trust(say: Callable[[str], object]) -> None:
    """Let the packages count from now on that the user's settings name (`mlotool trust`), each in its own place.

    One is trusted where a recipe first names it, and `say` is told so in a line. Only the command line calls this.
    """
    global _say
    _say = say


def _recall(package: str) -> bool:
    """Trust a package that the user's settings name, where Python would take it from the very place that they have."""
    if _say is None or not is_identifier(package) or not _is_foreign(package):
        return False
    place = _package_place(package)
    if place is None or place not in read_places().get(package, ()):
        return False
    # Not the working directory, as for --trust, which may be a stranger's: the package's own folder.
    if str(place.folder) not in sys.path:
        sys.path.append(str(place.folder))
    _packages[package] = str(place.folder)
    _recalled.add(package)
    add_user_package(package)
    _say(f"trusting {package} in {place.folder}, as `mlotool trust` has remembered")
    return True


def named_packages(values: Any) -> list[str]:
    """Return the trusted packages of the user's that plain values name as targets."""
    targets = [value for key, value in leaves(values) if key.rpartition(".")[2] == "_target_"]
    return sorted({name.partition(".")[0] for name in targets if is_of_user(name)})


def trust_all(packages: Iterable[str]) -> None:
    """Trust each of these packages.

    Raises:
        ConfigError: as `trust`; or `packages` is a text, of which each letter would be one.
    """
    if isinstance(packages, str):
        raise ConfigError(f"trust: found '{packages}'; expected a list of names. Write trust=['{packages}'].")
    for package in packages:
        trust(package)


def _trusting(package: str) -> str:
    return f"--trust {package}" if is_command_line() else f"trust=['{package}']"


def trusted_packages() -> dict[str, str | None]:
    """Return the user's packages that this process was told to trust, each with the folder in which it lies.

    Another process looks up by itself what the user's settings name.
    """
    return {package: folder for package, folder in sorted(_packages.items()) if package not in _recalled}


@lru_cache(maxsize=16)
def trusted_names(kind: str | None = None) -> tuple[str, ...]:
    """Return the names that may stand as `_target_`; of one kind of node (none for `nothing`), or of all."""
    if kind is None:
        return tuple(dict.fromkeys(name for every in KINDS for name in trusted_names(every)))
    for home in _HOMES.get(kind, ()):
        import_module(home)
    return (*targets(kind), *_NAMES.get(kind, ()))


def trust_fault(key: str, name: Any, kind: str | None = None) -> str | None:
    """Return what is wrong with a target's name, or None. Nothing is imported.

    Args:
        key: the place, e.g. `problems.classifier.module`.
        name: the value of its `_target_`.
        kind: of the node, one of KINDS; `nothing` where no node belongs; None for any.
    """
    if is_of_user(name):
        return None
    # One kind after the other: what is not asked for need not be imported.
    if isinstance(name, str) and any(name in trusted_names(every) for every in (KINDS if kind is None else (kind,))):
        return None
    options = trusted_names(kind)
    # One that only looks like another shows itself: a Cyrillic o is '\\u043e'.
    name = name if not isinstance(name, str) or (name.isascii() and name.isprintable()) else ascii(name)[1:-1]
    hint = "" if kind is None else _hint(str(name), options)
    if kind == "nothing":
        return f"{key}._target_: found '{name}'; expected plain values here, not a node with a _target_. Remove it."
    short = str(name).removeprefix("pytorch_lightning.callbacks.")
    if unfit := [why for names, why in _UNFIT.items() if kind == "callback" and short in names.split()]:
        return f"{key}._target_: found '{name}', which {unfit[0]}."
    package = foreign_package(name)
    advice = "Correct the name." if package is None else how_to_trust(package)
    what = f"no {kind}" if name in trusted_names() else "not trusted"
    return f"{key}._target_: found '{name}', which is {what}; expected one of {_examples(options)}.{hint} {advice}"


def foreign_package(name: Any) -> str | None:
    """Return the package of a target that may be code of the user's and is not trusted; None for another one."""
    package = str(name).partition(".")[0]
    is_yours = isinstance(name, str) and "." in name and is_identifier(package) and _is_foreign(package)
    return package if is_yours and not is_of_user(name) else None


def how_to_trust(package: str) -> str:
    """Return what to do to let a recipe use a package of the user's, and that one of its name is trusted elsewhere."""
    places = read_places().get(package, []) if _say is not None else []
    elsewhere = f" `mlotool trust` has remembered another {package}, in {places[0].folder}." if places else ""
    return f"For code of yours: {_trusting(package)}.{elsewhere}"


def is_of_user(name: Any) -> bool:
    """Say whether a target is of a package that the user trusts."""
    package = str(name).partition(".")[0]
    return isinstance(name, str) and "." in name and (package in _packages or _recall(package))


def resolve(key: str, name: str) -> Any:
    """Import a trusted target, and make sure that it is what its name says.

    Raises:
        ConfigError: it is not trusted, is not there, or is another package's under this name.
    """
    fault = trust_fault(key, name)
    if fault:
        raise ConfigError(fault)
    target: Any = None
    for module, attributes in _splits(name):
        try:
            target = import_module(module)
        except KeyboardInterrupt:
            raise
        # SystemExit and asyncio.CancelledError are no Exceptions.
        except BaseException as error:
            if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
                continue
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise ConfigError(
                f"{key}._target_: importing '{module}' failed{_at(error)}: {reason}; expected a module that imports. "
                "Correct the module, or install what is missing."
            ) from error
        for attribute in attributes:
            target = getattr(target, attribute, None)
        break
    home, package = getattr(target, "__module__", None) or "", name.partition(".")[0]
    if not callable(target) or home.partition(".")[0] != package:
        what = "nothing callable" if not callable(target) else f"code of {home}"
        raise ConfigError(
            f"{key}._target_: found '{name}', which is {what}; expected a class or function that {package} itself "
            "defines. Correct the name."
        )
    return target


def _at(error: BaseException) -> str:
    """Return where in the user's files an import has failed."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {nearby(error.filename)}, line {error.lineno}"
    frame = user_frame(error)
    return "" if frame is None else f" at {nearby(frame.filename)}, line {frame.lineno}"


def _splits(name: str) -> Iterator[tuple[str, list[str]]]:
    parts = name.split(".")
    for index in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:index]), parts[index:]


def _is_foreign(package: str) -> bool:
    return package not in _NEVER and package not in sys.stdlib_module_names


def _hint(name: str, options: tuple[str, ...]) -> str:
    """Suggest by the last component: `torch.` in common makes no name close."""
    short = name.rpartition(".")[2]
    maker = "mlotool.models.torchvision_model"
    if name.startswith("torchvision.models.") and maker in options:
        return f" For it write {{_target_: {maker}, name: {short}, num_classes: .., image_shape: ..}}."
    near = get_close_matches(short, sorted({option.rpartition(".")[2] for option in options}), n=1)
    homes = [option for option in options if option.rpartition(".")[2] in near]
    return f" Did you mean '{get_close_matches(name, homes, n=1, cutoff=0.0)[0]}'?" if homes else ""


def _examples(options: tuple[str, ...]) -> str:
    if not options:
        return "the functions of a package of yours"
    return ", ".join(options) if len(options) <= 12 else f"{', '.join(options[:8])}, ... ({len(options)} names)"
