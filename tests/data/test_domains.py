"""Data with two domains, and photographs with two kinds of labels."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from mlotool.core.errors import ConfigError
from mlotool.data import Clothing1M, OfficeHome, TwoDomains
from mlotool.data.image_data import ImageFiles

SIZES = {"pretrain": 900, "finetune": 50, "meta": 50, "val": 197, "test": 600}


def pixels(data: TwoDomains, name: str) -> torch.Tensor:
    inputs = data.split(name).__getitems__(range(len(data.split(name))))["input"].squeeze(1)
    return ((inputs.double() * 0.3760 + 0.3053) * 16).round()


def test_each_digit_is_in_one_domain_and_used_once() -> None:
    data = TwoDomains(SIZES)
    assert {name: len(data.split(name)) for name in data.splits} == SIZES
    target = torch.cat([pixels(data, name) for name in data.splits[1:]]).rot90(2, dims=(1, 2))
    found = torch.cat([pixels(data, "pretrain"), target])
    assert sorted(found.flatten(1).tolist()) == sorted(torch.from_numpy(load_digits().data).tolist())
    domains = [data.split(name).extra["domain"].unique().tolist() for name in data.splits]
    assert domains == [[0], [1], [1], [1], [1]]
    assert torch.bincount(data.split("finetune").target).tolist() == [5] * 10


@pytest.mark.parametrize("shift", ["turn", "invert", "noise"])
def test_some_of_the_source_may_be_of_the_target_domain(shift: str) -> None:
    plain, data = TwoDomains(SIZES, shift=shift), TwoDomains(SIZES, shift=shift, target_share=0.2)
    domain = data.split("pretrain").extra["domain"]
    assert int(domain.sum()) == 180
    assert torch.bincount(data.split("pretrain").target[domain == 1], minlength=10).min() >= 16
    assert torch.equal(data.split("pretrain").target, plain.split("pretrain").target)
    before, after = pixels(plain, "pretrain"), pixels(data, "pretrain")
    assert torch.equal(before[domain == 0], after[domain == 0])
    moved = {"turn": before.rot90(2, dims=(1, 2)), "invert": 16 - before}
    if shift == "noise":
        assert (after - before)[domain == 1].std() > 2
        assert 0 <= after.min() < after.max() <= 16
    else:
        assert torch.equal(after[domain == 1], moved[shift][domain == 1])
    batch = data.split("pretrain").__getitems__([3, 1])
    assert torch.equal(batch["domain"], domain[[3, 1]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shift": "rotate"}, r"shift: found 'rotate'; expected one of turn, invert, noise"),
        ({"target_share": 1.5}, r"target_share: found 1\.5; expected a number"),
        ({"sizes": {"train": 5}}, r"the split 'train'; expected some of pretrain, finetune"),
        ({"sizes": {"pretrain": 1797}}, r"data\.sizes\.pretrain=1797; expected a number from 0 to 1796"),
        ({"sizes": {"pretrain": 1000, "test": 798}}, r"asks for 798 samples .* at most 797"),
    ],
)
def test_domains_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TwoDomains(**({"sizes": SIZES} | options))


@pytest.fixture
def office(tmp_path: Path) -> Path:
    """Domains differ in red, classes in green."""
    for red, domain in ((50, "Art"), (100, "Clipart"), (150, "Product"), (200, "Real World")):
        for green, name in ((0, "Alarm_Clock"), (200, "Bike")):
            (tmp_path / domain / name).mkdir(parents=True)
            for i in range(10):
                Image.new("RGB", (9, 7), (red, green, 0)).save(tmp_path / domain / name / f"{i:05}.jpg", quality=100)
    return tmp_path


OFFICE_SIZES = {"pretrain": 10, "finetune": 8, "meta": 2, "val": 6, "test": 4}


@pytest.mark.parametrize(
    ("source", "target", "reds"), [("Art", "Clipart", (50, 100)), ("RealWorld", "Product", (200, 150))]
)
def test_officehome(office: Path, source: str, target: str, reds: tuple[int, int]) -> None:
    data = OfficeHome(str(office), OFFICE_SIZES, source, target, num_classes=2, image_shape=[3, 8, 8], augment=False)
    assert {name: len(data.split(name)) for name in data.splits} == OFFICE_SIZES
    for name in data.splits:
        dataset = data.split(name)
        assert isinstance(dataset.images, torch.Tensor)
        expected = torch.tensor(reds[0] if name == "pretrain" else reds[1]).expand(len(dataset)).float()
        mean = dataset.images.float().mean(dim=(2, 3))
        torch.testing.assert_close(mean[:, 0], expected, atol=3.0, rtol=0)  # JPEG is lossy
        torch.testing.assert_close(mean[:, 1], 200.0 * dataset.target, atol=3.0, rtol=0)


def test_officehome_decodes_late_and_augments_what_is_trained_on(office: Path) -> None:
    data = OfficeHome(str(office), OFFICE_SIZES, num_classes=2, image_shape=[3, 8, 8], max_memory_gb=0)
    paths = [path for name in data.splits for path in data.split(name).images.paths]
    assert isinstance(data.split("test").images, ImageFiles)
    assert len(set(paths)) == sum(OFFICE_SIZES.values())
    assert [data.split(name).seeded for name in data.splits] == [True, True, False, False, False]
    assert data.split("pretrain").__getitems__([0, 1], seed=0)["input"].shape == (2, 3, 8, 8)


def test_officehome_that_is_not_there_is_named(office: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.root=.*absent: OfficeHome has no folder .*Art; .*Download .*set data\.root"
    ):
        OfficeHome(str(office / "absent"), OFFICE_SIZES)
    with pytest.raises(ConfigError, match=r"target: found 'Cliparts'; expected one of Art, .* Did you mean 'Clipart'"):
        OfficeHome(str(office), OFFICE_SIZES, target="Cliparts")
    (office / "Clipart" / "Bike").rename(office / "Clipart" / "Bed")
    with pytest.raises(ConfigError, match="the classes Bed, Bike are only in one of them"):
        OfficeHome(str(office), OFFICE_SIZES)


@pytest.fixture
def clothing(tmp_path: Path) -> Path:
    """Two classes, the green ones with label 1; the first noisy label is wrong."""
    parts = {"noisy_train": 12, "clean_train": 8, "clean_val": 6, "clean_test": 6}
    labels: dict[str, list[str]] = {"noisy": [], "clean": []}
    for part, num_images in parts.items():
        keys = [f"images/{i % 3}/{part}/{i},{i}.jpg" for i in range(num_images)]
        for i, key in enumerate(keys):
            (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (0, 200 * (i % 2), 0)).save(tmp_path / key, quality=100)
            labels[part.partition("_")[0]].append(f"{key} {1 if part == 'noisy_train' and i == 0 else i % 2}")
        (tmp_path / f"{part}_key_list.txt").write_text("\n".join(keys) + "\n")
    for kind, lines in labels.items():
        (tmp_path / f"{kind}_label_kv.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


CLOTHING_SIZES = {"train": 12, "meta": 6, "val": 6, "test": 4}


@pytest.mark.parametrize("in_annotations", [False, True])
def test_clothing1m(clothing: Path, in_annotations: bool) -> None:
    if in_annotations:
        (clothing / "annotations").mkdir()
        for path in list(clothing.glob("*.txt")):
            path.rename(clothing / "annotations" / path.name)
    data = Clothing1M(str(clothing), CLOTHING_SIZES, num_classes=2, image_shape=[3, 8, 8])
    assert {name: len(data.split(name)) for name in data.splits} == CLOTHING_SIZES
    assert [data.split(name).seeded for name in data.splits] == [True, False, False, False]
    for name in data.splits:
        is_green = data.split(name).images[:, 1].float().mean(dim=(1, 2)) > 100
        assert int((data.split(name).target != is_green).sum()) == (1 if name == "train" else 0)


def test_clothing1m_that_is_not_there_is_named(clothing: Path) -> None:
    with pytest.raises(ConfigError, match=r"Clothing1M has no file .*noisy_label_kv\.txt; expected .*set data\.root"):
        Clothing1M(str(clothing / "absent"), CLOTHING_SIZES)
    (clothing / "noisy_label_kv.txt").write_text("")
    with pytest.raises(
        ConfigError, match=r"noisy_train_key_list\.txt names images/0/noisy_train/0,0\.jpg, which noisy_label"
    ):
        Clothing1M(str(clothing), CLOTHING_SIZES)
