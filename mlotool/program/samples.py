"""Samples of a data set, and batches of them; what goes wrong says which sample."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from mlotool.core.arguments import FLAG, Rule, at_least, is_whole, require, require_all, shown
from mlotool.core.errors import ConfigError
from mlotool.core.user_code import Call, named, note

_RULES: Mapping[str, Rule] = {
    "batch_size": at_least(1),
    "repeat": at_least(1),
    "num_workers": at_least(0),
    "seed": Rule(is_whole, "a whole number"),
    "shuffle": FLAG,
    "drop_last": FLAG,
}


def read_sample(dataset: Any, index: int) -> Any:
    """Return one sample."""
    try:
        return dataset[index]
    except Exception as error:
        note(error, lambda: Call("data", whole(dataset), {"index": index}, "a sample", "Correct it, or its files."))
        raise


def collated(dataset: Any, samples: Sequence[Any]) -> Any:
    """Return samples as one batch."""
    if not samples:
        raise ConfigError(
            f"data: {named(whole(dataset))} gave no samples for a batch, where it had some before; expected a length "
            "that stays. Correct __len__."
        )
    try:
        return default_collate(list(samples))
    except Exception as error:
        note(error, lambda: _collation(dataset, samples))
        raise


def whole(dataset: Any) -> Any:
    """Return the data set that another one gives in another form: a Subset's, for one."""
    inner = getattr(dataset, "dataset", None)
    return dataset if inner is None else whole(inner)


def _collation(dataset: Any, samples: Sequence[Any]) -> Call:
    num_none = sum(each is None for each in samples)
    if num_none:
        return Call(
            "data",
            f"making a batch of {len(samples)} samples of {named(whole(dataset))}, {num_none} of which "
            f"{'are' if num_none > 1 else 'is'} None,",
            expected="a sample at every index",
            advice="Return one wherever __getitem__ ends, or raise an error there that says what is missing.",
        )
    first = _shapes(samples[0])
    other = next((each for each in samples if _shapes(each) != first), None)
    given = {"a sample": samples[0]} if other is None else {"a sample": samples[0], "another one": other}
    return Call(
        "data",
        f"making a batch of {len(samples)} samples of {named(whole(dataset))}",
        given,
        "tensors of one shape, numbers or texts, in dicts or tuples of one form",
        "Let the data set return tensors of one size: crop, pad, or transform them (ToTensor makes one of a picture).",
    )


def _shapes(value: Any) -> Any:
    """Return what has to be the same of all samples."""
    if isinstance(value, Mapping):
        return {key: _shapes(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_shapes(each) for each in value]
    return getattr(value, "shape", type(value))


def check_stream(dataset: Any, **settings: Any) -> None:
    """Refuse arguments of a stream that are of a wrong kind or out of range.

    Args:
        dataset: its data set.
        settings: the other arguments.

    Raises:
        ConfigError: with the first of them.
    """
    advice = "Give one with __len__ and __getitem__, such as torch.utils.data.TensorDataset(inputs, targets)."
    if isinstance(dataset, DataLoader):
        advice = "Give its data set: Stream(loader.dataset, batch_size=32)."
    require(_is_map_style(dataset), "stream.dataset", dataset, "a map-style data set", advice)
    if len(dataset) < 1:
        raise ConfigError(
            f"stream.dataset: found {shown(dataset)} of length 0; expected at least one sample. Correct the sizes of "
            "the data."
        )
    require_all("stream", settings, _RULES)


def _is_map_style(value: Any) -> bool:
    if isinstance(value, type | str | bytes | IterableDataset) or (isinstance(value, Tensor) and value.dim() == 0):
        return False
    # A dict of columns has no samples.
    is_numbered = not isinstance(value, Mapping) or 0 in value
    return (
        is_numbered and hasattr(value, "__len__") and (hasattr(value, "__getitem__") or hasattr(value, "__getitems__"))
    )
