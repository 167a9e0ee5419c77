"""Data of the user's, made into what the rest expects: checked, and with (input, target) pairs as dicts."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.core.user_code import Call, named, noted, user_code
from mlotool.folders.documents import leaves


class SharedData:
    """The data objects of the runs of one process, by the nodes that describe them.

    Data of mlotool's own classes are shared: what they draw comes from seeds of their own, and they stay as they were
    built. A user's class may keep something from sample to sample (a counter, a generator, a cache), by which one run
    would change what another one reads; so each run builds its own.

    Example:
        >>> shared = SharedData()
        >>> node = {"_target_": "mlotool.data.Digits", "seed": 0}
        >>> shared.of(node, None, list) is shared.of(dict(node), None, list)
        True
        >>> shared.of(node, None, list) is shared.of({**node, "seed": 1}, None, list)
        False
    """

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}
        # By the identity of what was built.
        self._kept: dict[int, KeptData] = {}

    def of(self, node: Mapping[str, Any], limit: int | None, make: Callable[[], Any]) -> Any:
        """Return the data object of a run.

        Args:
            node: that describes it, resolved, as plain values.
            limit: samples of each split, at most; None: all.
            make: builds it.
        """
        targets = [value for key, value in leaves(node) if key.rpartition(".")[2] == "_target_"]
        if not all(isinstance(target, str) and target.startswith("mlotool.") for target in targets):
            return make()
        key = json.dumps([node, limit])
        if key not in self._built:
            # Imported here: it needs torch.
            from mlotool.fusion.shared_batches import KeptData

            data = self._built[key] = make()
            self._kept[id(data)] = KeptData(data)
        return self._built[key]

    def evaluated(self, data: Any) -> Any:
        """Return data for the evaluations of one run, the batches of which are kept for the others that share it."""
        kept = self._kept.get(id(data))
        if kept is None:
            return data
        kept.num_readers += 1
        return kept


# 2^64 over the golden ratio: its multiples, modulo 2^64, are spread evenly and have no period.
_GOLDEN = 0x9E3779B97F4A7C15


class LimitedData:
    """A data object whose splits are cut down.

    Args:
        data: the whole.
        limit: samples of each split, at most.
    """

    def __init__(self, data: Any, limit: int) -> None:
        self._data = data
        self._limit = limit
        self._splits: dict[str, tuple[Any, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        """Return what else the whole has: `splits`, `num_classes`, ..."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._data, name)

    def split(self, name: str) -> Any:
        """Return one split, cut down."""
        whole = self._data.split(name)
        # One object for a split: by that, streams of several runs know that their samples are the same.
        if name not in self._splits or self._splits[name][0] is not whole:
            self._splits[name] = whole, limited(whole, self._limit)
        return self._splits[name][1]


class LimitedDataset:
    """Samples of a dataset, one out of each of as many equal parts: a split that is sorted by class keeps all of them.

    Which one of its part is taken varies from part to part. Samples at equal distances would be of one class where the
    labels alternate.

    Args:
        dataset: the whole.
        limit: number of samples to keep.
    """

    def __init__(self, dataset: Any, limit: int) -> None:
        self.dataset, self._limit = dataset, limit

    def __len__(self) -> int:
        return self._limit

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""
        return self.dataset[self._place(index)]

    def _place(self, index: int) -> int:
        if not 0 <= index < self._limit:
            raise IndexError(index)
        size, index = len(self.dataset), int(index)
        begin, end = index * size // self._limit, (index + 1) * size // self._limit
        return begin + ((index * _GOLDEN % 2**64) * (end - begin) >> 64)


class LimitedBatchDataset(LimitedDataset):
    """The same of a dataset that hands out whole batches."""

    @property
    def seeded(self) -> bool:
        """Whether `__getitems__` makes use of a seed."""
        return bool(getattr(self.dataset, "seeded", False))

    def __getitems__(self, indices: Any, **options: Any) -> Any:
        """Return a collated batch."""
        return self.dataset.__getitems__([self._place(int(index)) for index in indices], **options)

    def without_augmentation(self) -> "LimitedBatchDataset":
        """Return the same samples as they are."""
        plain = getattr(self.dataset, "without_augmentation", None)
        return self if plain is None else LimitedBatchDataset(plain(), self._limit)


def limited(dataset: Any, limit: int) -> Any:
    """Return a dataset cut down to `limit` samples; as it is where it has no more, or no length, which others tell."""
    # Imported here: it needs torch.
    from mlotool.problem.streams.batches import LoaderSamples

    if isinstance(dataset, LoaderSamples):
        return LoaderSamples(dataset.loader, limited(dataset.dataset, limit), names_pairs=dataset.names_pairs)
    try:
        size = len(dataset)
    except (TypeError, ValueError):
        return dataset
    if size <= limit:
        return dataset
    return (LimitedBatchDataset if hasattr(dataset, "__getitems__") else LimitedDataset)(dataset, limit)


if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mlotool.fusion.shared_batches import KeptData

_WANTED = (
    "splits (a tuple of names) and split(name), which returns a data set or a DataLoader (or a LightningDataModule)"
)


def built_data(build: Callable[[], Any], seed: int) -> Any:
    """Build a data object whose splits give dicts.

    What a class of the user's draws from global random numbers, such as a split of its samples, is the same in each run
    of one seed, and wherever that run's data are built again: on another rank, after it, for an evaluation.

    Args:
        build: calls the target of `data`.
        seed: of the config.

    Raises:
        ConfigError: it is no data object.
    """
    # Imported here, as elsewhere in this file: it needs torch.
    from mlotool.core.random_stream import own_random

    with own_random() as seeded:
        seeded(seed)
        data = build()
        if not hasattr(data, "split") and hasattr(data, "train_dataloader"):
            data = LoaderData(data)
    with user_code(ConfigError), noted(lambda: Call("data", data, expected=f"an object with {_WANTED}")):
        # A property may fail.
        missing = [name for name in ("splits", "split") if not hasattr(data, name)]
    if missing:
        raise ConfigError(f"data: {named(data)} has no {' and no '.join(missing)}; expected {_WANTED}. Add them.")
    is_right = isinstance(data.splits, tuple | list | dict | set | frozenset)
    if not is_right or not data.splits or not all(isinstance(name, str) for name in data.splits):
        what = f"{named(data)} has splits = {data.splits!r}"
        raise ConfigError(f"data: {what}; expected {_WANTED}. Write splits = ('train', 'val').")
    is_ours = type(data).__module__.startswith("mlotool.") and not isinstance(data, LoaderData)
    return data if is_ours else UserData(data, seed)


class NamedSplits:
    """Splits that a script gives by name.

    Args:
        splits: data sets by name.
    """

    def __init__(self, splits: Mapping[str, Any]) -> None:
        self.splits = tuple(splits)
        self._datasets = dict(splits)

    def split(self, name: str) -> Any:
        """Return one of them."""
        return self._datasets[name]


def given_data(data: Any, seed: int) -> Any:
    """Return what a script gives as data as a data object whose splits give dicts.

    Args:
        data: a mapping from names to data sets, or a data object.
        seed: of the run.

    Raises:
        ConfigError: it is neither.

    Example:
        >>> given_data({"val": [("picture", 3)]}, 0).split("val")[0]
        {'input': 'picture', 'target': 3, 'index': 0}
    """
    if isinstance(data, Mapping):
        return UserData(NamedSplits(data), seed)
    return built_data(lambda: data, seed)


# Data that tell what models are sized by, and where a config has it.
TELLING = "mlotool.data.Table"
TOLD = ("num_classes", "image_shape", "sizes")


def fill_data(config: "DictConfig") -> None:
    """Write into a config, in place, what its data tell and it leaves open, so that models can refer to it.

    Args:
        config: as it was composed.

    Raises:
        ConfigError: the data cannot be read.
    """
    from omegaconf import DictConfig, OmegaConf

    node = config.get("data")
    is_telling = isinstance(node, DictConfig) and node.get("_target_") == TELLING and not OmegaConf.missing_keys(node)
    if not is_telling or all(node.get(key) is not None for key in TOLD):
        return
    from mlotool.config.instantiate import instantiate

    data = instantiate("data", OmegaConf.to_container(node, resolve=True))
    for key in TOLD:
        node[key] = getattr(data, key)


class LoaderData:
    """A data object of the loaders of a LightningDataModule: the splits train, val and test, where it makes them.

    Args:
        module: has `train_dataloader`, and `val_dataloader`, `test_dataloader`, `prepare_data` and `setup` if it likes;
            the last two are called here, as a Trainer's `fit` and `test` would do.

    Raises:
        ConfigError: it makes no loader.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.splits = tuple(name for name in ("train", "val", "test") if _makes(module, f"{name}_dataloader"))
        if not self.splits:
            raise ConfigError(
                f"data: {named(module)} has no method that makes a loader; expected train_dataloader. Add it."
            )
        with user_code(ConfigError), noted(lambda: Call("data", module, {}, "that its data are ready", "Correct it.")):
            if hasattr(module, "prepare_data"):
                module.prepare_data()
            for stage in ("fit", "test") if hasattr(module, "setup") else ():
                if stage == "fit" or "test" in self.splits:
                    module.setup(stage)

    def __getattr__(self, name: str) -> Any:
        """Return what else the module has: `num_classes`, ..."""
        if name.startswith("__") or name == "_module":
            raise AttributeError(name)
        return getattr(self._module, name)

    def split(self, name: str) -> Any:
        """Return the loader of a split."""
        loader = getattr(self._module, f"{name}_dataloader")()
        is_only = isinstance(loader, list | tuple) and len(loader) == 1
        return loader[0] if is_only else loader


def _makes(module: Any, method: str) -> bool:
    """Say whether a LightningDataModule has a method of its own; Lightning's raises an error."""
    home = getattr(getattr(module, method, None), "__module__", None) or ""
    is_own = method in vars(module) or home.partition(".")[0] not in ("pytorch_lightning", "lightning")
    return hasattr(module, method) and is_own


def split_of(key: str, data: Any, name: str, *, is_streamed: bool = False) -> Any:
    """Return a split of the data, of which a stream can be made.

    Args:
        key: where the split is named.
        data: the data object.
        name: of the split.
        is_streamed: for a stream, which takes what can only be read in an order of its own too.

    Raises:
        ConfigError: there is no such split, it is no data set of the kind that is needed, or empty.
    """
    # Imported here: it needs torch.
    from mlotool.problem.streams.batches import LoaderSamples, check_dataset, is_iterable

    if name not in data.splits:
        raise ConfigError(
            f"{key}: found '{name}'; expected a split of the data: {', '.join(map(str, data.splits))}."
            f"{did_you_mean(name, data.splits)} Correct {key}."
        )
    with user_code(ConfigError):
        dataset = data.split(name)
    theirs = dataset.dataset if isinstance(dataset, NamedSamples | NamedIterable | LoaderSamples) else dataset
    if is_streamed and is_iterable(theirs):
        return dataset
    has_collate = isinstance(dataset, LoaderSamples) and dataset.collate_fn is not None
    with user_code(ConfigError), noted(lambda: Call(key, f"the length of {named(theirs)}", advice="Correct __len__.")):
        check_dataset(theirs, f"{key}={name}", has_collate=has_collate)
    return dataset


class UserData:
    """A data object of the user's.

    Args:
        data: the object; what else it has stays (`num_classes`, ...).
        seed: of what its `split` draws.
    """

    def __init__(self, data: Any, seed: int) -> None:
        self._data = data
        self._seed = seed

    def __getattr__(self, name: str) -> Any:
        """Return what else it has: `splits`, `num_classes`, ..."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._data, name)

    def split(self, name: str) -> Any:
        """Return one split, with pairs as dicts."""
        from mlotool.core.random_stream import own_random

        call = Call("data", self._data, {"split": name}, "a data set", "Correct the data set or its files.")
        # Splits of one drawn order stay disjoint, as it is the same order in each call.
        with noted(lambda: call), own_random() as seeded:
            seeded(self._seed)
            dataset = self._data.split(name)
        from torch.utils.data import DataLoader

        from mlotool.problem.streams.batches import LoaderSamples, is_iterable

        if isinstance(dataset, DataLoader):
            return LoaderSamples(dataset, names_pairs=True)
        if is_iterable(dataset):
            return NamedIterable(dataset)
        if _is_pair_of_tensors(dataset):
            # The same batches, each of which is read at once.
            from mlotool.data.splits import InMemoryTensors

            inputs, targets = dataset.tensors
            return InMemoryTensors({"input": inputs, "target": targets})
        # A Subset's `__getitems__` returns samples too.
        is_plain = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not hasattr(dataset, "shape")
        has_batches = hasattr(type(dataset), "__getitems__") and not type(dataset).__module__.startswith("torch.")
        return NamedSamples(dataset) if is_plain and not has_batches else dataset


class _Wrapped:
    """A data set in another form, which has all else that the given one has: `clean_target`, `set_epoch`, ...

    Args:
        dataset: the given one.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class NamedSamples(_Wrapped):
    """A data set whose (input, target) pairs come as `{input, target, index}`, as those of torchvision do not.

    Args:
        dataset: map-style; other samples than pairs stay as they are.

    Example:
        >>> NamedSamples([("picture", 3)])[0]
        {'input': 'picture', 'target': 3, 'index': 0}
    """

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""
        sample = self.dataset[index]
        return {"input": sample[0], "target": sample[1], "index": index} if _is_pair(sample) else sample


class NamedIterable(_Wrapped):
    """The same of a data set that can only be read in its own order, and knows no index.

    Args:
        dataset: iterable; other samples than pairs stay as they are.

    Example:
        >>> next(iter(NamedIterable([("picture", 3)])))
        {'input': 'picture', 'target': 3}
    """

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples."""
        for sample in self.dataset:
            yield {"input": sample[0], "target": sample[1]} if _is_pair(sample) else sample


def _is_pair(sample: Any) -> bool:
    return isinstance(sample, tuple | list) and len(sample) == 2 and not hasattr(sample, "_fields")


def _is_pair_of_tensors(dataset: Any) -> bool:
    """Say whether a data set is torch's own of two tensors, and nothing else."""
    kind = type(dataset)
    is_torchs = (kind.__module__, kind.__name__) == ("torch.utils.data.dataset", "TensorDataset")
    # What is sparse, or has a gradient, has messages of its own where samples are collated.
    return (
        is_torchs
        and len(dataset.tensors) == 2
        and all(str(tensor.layout) == "torch.strided" and not tensor.requires_grad for tensor in dataset.tensors)
    )
