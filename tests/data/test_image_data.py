import pytest
import torch
from sklearn.datasets import load_digits

from mlotool.core.errors import ConfigError
from mlotool.data import Digits, long_tail_counts
from mlotool.data.digits import read_digits

SIZES = {"train": 1000, "meta": 100, "val": 200, "test": 497}


def test_digits_are_scikit_learns_and_each_is_used_once() -> None:
    data = Digits(SIZES)
    assert data.splits == ("train", "meta", "val", "test")
    assert (data.num_classes, data.image_shape) == (10, (1, 8, 8))
    batches = [data.split(name).__getitems__(range(SIZES[name])) for name in data.splits]
    inputs = torch.cat([batch["input"] for batch in batches]).squeeze(1)
    assert inputs.mean().abs() < 1e-3
    assert (inputs.std() - 1).abs() < 1e-3
    found = ((inputs.double() * 0.3760 + 0.3053) * 16).round()
    assert sorted(found.flatten(1).tolist()) == sorted(torch.from_numpy(load_digits().data).tolist())


def test_the_seed_makes_another_data_set() -> None:
    first, again, other = (Digits(SIZES, seed=seed).split("meta")[0]["input"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_only_train_has_the_long_tail() -> None:
    plain, data = Digits(SIZES), Digits(SIZES, imbalance_factor=20)
    expected = long_tail_counts(torch.bincount(plain.split("train").target), 20.0)
    assert torch.equal(torch.bincount(data.split("train").target), expected)
    for name in ("meta", "val", "test"):
        assert torch.equal(data.split(name).target, plain.split(name).target)


def test_only_train_is_corrupted_and_keeps_its_clean_labels() -> None:
    plain, data = Digits(SIZES), Digits(SIZES, label_noise={"kind": "uniform", "rate": 0.4})
    train = data.split("train")
    assert train.clean_target is not None
    assert torch.equal(train.clean_target, plain.split("train").target)
    assert (train.target != train.clean_target).float().mean() == pytest.approx(0.36, abs=0.05)
    assert torch.equal(train[7]["clean_target"], train.clean_target[7])
    for name in ("meta", "val", "test"):
        assert data.split(name).clean_target is None
        assert "clean_target" not in data.split(name)[0]


def test_noise_comes_after_the_long_tail() -> None:
    train = Digits(SIZES, imbalance_factor=20, label_noise={"kind": "flip", "rate": 0.3}).split("train")
    assert train.clean_target is not None
    assert len(train) == len(train.clean_target) == len(Digits(SIZES, imbalance_factor=20).split("train"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 9}, r"data\.num_classes=9; expected 10.* Set data\.num_classes=10\."),
        ({"image_shape": (8, 8)}, r"data\.image_shape=\[8, 8\]; expected \[1,8,8\].* Set data\.image_shape=\[1,8,8\]"),
        ({"sizes": {"train": 1798}}, r"1798 samples \(train: 1798\); expected .* at most 1797"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Digits(**({"sizes": SIZES} | options))


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no split 'valid'; expected one of train, meta, val, test\. Did you mean"):
        Digits(SIZES).split("valid")


def test_digits_are_parsed_once_and_are_each_readers_own() -> None:
    first, again = read_digits(), read_digits()
    assert torch.equal(first.images, again.images)
    assert isinstance(first.images, torch.Tensor) and isinstance(again.images, torch.Tensor)
    first.images.zero_()
    assert again.images.any() and read_digits().images.any()
