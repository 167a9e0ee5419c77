"""Samples of a data set, and batches of them; what goes wrong says which sample."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate

from mlotool.core.errors import ConfigError
from mlotool.core.user_code import Call, named, note


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
