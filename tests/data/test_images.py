"""Images and spectra: the readers, on tiny data sets in the published formats; splits, long tails, wrong labels."""

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from scipy.io import savemat
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

from mlotool.core.errors import ConfigError
from mlotool.data import (
    CIFAR10,
    CIFAR100,
    MNIST,
    Clothing1M,
    CropAndFlip,
    Digits,
    ImageFolder,
    IndianPines,
    InMemoryDataset,
    Normalization,
    OfficeHome,
    SyntheticSpectra,
    TwoDomains,
    corrupt_labels,
    long_tail_counts,
    long_tail_indices,
    split_indices,
)
from mlotool.data.image_data import AugmentedCopies, ImageFiles

SIZES = {"train": 20, "val": 10, "test": 10}


def place(sample: torch.Tensor, images: np.ndarray, mean: float | list[float], std: float | list[float]) -> int:
    """Return the number of the one image (c, h, w) that the sample is, normalised."""
    mean, std = (np.reshape(each, (-1, 1, 1)) for each in (mean, std))
    [number] = [
        i for i, image in enumerate(images) if np.allclose((sample.numpy() * std + mean) * 255, image, atol=1e-3)
    ]
    return number


def _write_mnist(root: Path, prefix: str, images: np.ndarray, labels: np.ndarray) -> None:
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    header = struct.pack(">IIII", 0x0803, *images.shape)
    (raw / f"{prefix}-images-idx3-ubyte").write_bytes(header + images.tobytes())
    (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x0801, len(labels)) + labels.tobytes())


def test_mnist(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    labels = np.arange(30, dtype=np.uint8) % 10
    train, test = (generator.integers(0, 256, (n, 28, 28), dtype=np.uint8) for n in (30, 20))
    _write_mnist(tmp_path, "train", train, labels)
    _write_mnist(tmp_path, "t10k", test, labels[:20])
    data = MNIST(str(tmp_path), SIZES)
    assert {name: len(data.split(name)) for name in data.splits} == SIZES
    sample = data.split("test")[3]
    assert sample["input"].shape == data.image_shape == (1, 28, 28)
    assert int(sample["target"]) == labels[place(sample["input"], test, 0.1307, 0.3081)]


def _write_cifar10(root: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Write files in CIFAR-10's format and return the test images (n, 3, 32, 32)."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    generator = np.random.default_rng(0)
    labels = [i % 10 for i in range(20)]
    for name in ("data_batch_1", "data_batch_2", "test_batch"):
        pixels = generator.integers(0, 256, (20, 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": labels}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))
    # These are not the published files, so their checksums are not the published ones either.
    reader = torchvision.datasets.CIFAR10
    monkeypatch.setattr(reader, "train_list", [["data_batch_1", None], ["data_batch_2", None]])
    monkeypatch.setattr(reader, "test_list", [["test_batch", None]])
    monkeypatch.setattr(reader, "meta", reader.meta | {"md5": None})
    return pixels.reshape(20, 3, 32, 32)


def test_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = _write_cifar10(tmp_path, monkeypatch)
    data = CIFAR10(str(tmp_path), SIZES)
    assert {name: len(data.split(name)) for name in data.splits} == SIZES
    assert [data.split(name).seeded for name in data.splits] == [True, False, False]
    sample = data.split("test")[0]
    assert sample["input"].shape == data.image_shape == (3, 32, 32)
    number = place(sample["input"], test, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])
    assert int(sample["target"]) == number % 10
    # With other checksums no pickle is opened.
    monkeypatch.undo()
    monkeypatch.setattr(pickle, "load", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(ConfigError, match="CIFAR10 could not be read"):
        CIFAR10(str(tmp_path), SIZES)


def test_cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (200, 3072), dtype=np.uint8)
    content = {"data": pixels, "fine_labels": [i % 100 for i in range(200)], "coarse_labels": [0] * 200}
    for name in ("train", "test"):
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(i) for i in range(100)]}))
    with pytest.raises(ConfigError, match="CIFAR100 could not be read"):
        CIFAR100(str(tmp_path), {"train": 100})
    reader = torchvision.datasets.CIFAR100
    monkeypatch.setattr(reader, "train_list", [["train", None]])
    monkeypatch.setattr(reader, "test_list", [["test", None]])
    monkeypatch.setattr(reader, "meta", reader.meta | {"md5": None})
    sizes = {"train": 100, "meta": 100, "test": 200}
    data = CIFAR100(str(tmp_path), sizes, None, imbalance_factor=1, augment=False)
    assert data.num_classes == 100
    assert torch.bincount(data.split("meta").target).tolist() == [1] * 100
    images = {tuple(row): i % 100 for i, row in enumerate(pixels.tolist())}
    test = data.split("test")
    assert [images[tuple(image)] for image in test.images.flatten(1).tolist()] == test.target.tolist()


@pytest.fixture
def image_root(tmp_path: Path) -> Path:
    for part, num_images in (("train", 15), ("test", 5)):
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for i in range(num_images):
                suffix = "png" if i % 2 else "jpg"
                Image.new("RGB", (8, 6), (100 * label, 10 * i, 0)).save(folder / f"{i:04}.{suffix}", quality=100)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    return tmp_path


@pytest.mark.parametrize("max_memory_gb", [4.0, 0.0])
def test_image_folder(image_root: Path, max_memory_gb: float) -> None:
    data = ImageFolder(str(image_root), SIZES, 2, [3, 6, 8], max_memory_gb=max_memory_gb, mean=[0] * 3, std=[1] * 3)
    assert {name: len(data.split(name)) for name in data.splits} == SIZES
    assert isinstance(data.split("train").images, ImageFiles if max_memory_gb == 0 else torch.Tensor)
    batch = data.split("train").__getitems__([0, 5, 6])
    assert batch["input"].shape == (3, 3, 6, 8)
    red = batch["input"][:, 0].mean(dim=(1, 2)) * 255
    torch.testing.assert_close(red, 100.0 * batch["target"], atol=2.0, rtol=0)  # JPEG is lossy
    # It scales, and without a test part draws test from train.
    (image_root / "test").rename(image_root / "unused")
    data = ImageFolder(str(image_root), {"train": 24, "test": 6}, 2, [3, 4, 4])
    assert data.split("test")[0]["input"].shape == (3, 4, 4)


@pytest.mark.parametrize("reader", [MNIST, CIFAR10, CIFAR100])
def test_absent_files_are_named(tmp_path: Path, reader: type) -> None:
    with pytest.raises(ConfigError, match=r"data\.root=.*absent.*; expected .*; ?.*Set data\.root|data\.download=true"):
        reader(str(tmp_path / "absent"), SIZES)
    assert not (tmp_path / "absent").exists()


DOMAIN_SIZES = {"pretrain": 900, "finetune": 50, "meta": 50, "val": 197, "test": 600}


def pixels(data: Digits | TwoDomains, name: str) -> torch.Tensor:
    inputs = data.split(name).__getitems__(range(len(data.split(name))))["input"].squeeze(1)
    return ((inputs.double() * 0.3760 + 0.3053) * 16).round()


def assert_all_digits(found: torch.Tensor) -> None:
    assert sorted(found.flatten(1).tolist()) == sorted(torch.from_numpy(load_digits().data).tolist())


def test_each_digit_is_in_one_domain_and_used_once() -> None:
    data = TwoDomains(DOMAIN_SIZES)
    assert {name: len(data.split(name)) for name in data.splits} == DOMAIN_SIZES
    target = torch.cat([pixels(data, name) for name in data.splits[1:]]).rot90(2, dims=(1, 2))
    assert_all_digits(torch.cat([pixels(data, "pretrain"), target]))
    domains = [data.split(name).extra["domain"].unique().tolist() for name in data.splits]
    assert domains == [[0], [1], [1], [1], [1]]
    assert torch.bincount(data.split("finetune").target).tolist() == [5] * 10


@pytest.mark.parametrize("shift", ["turn", "invert", "noise"])
def test_some_of_the_source_may_be_of_the_target_domain(shift: str) -> None:
    plain, data = TwoDomains(DOMAIN_SIZES, shift=shift), TwoDomains(DOMAIN_SIZES, shift=shift, target_share=0.2)
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
    data = OfficeHome(str(office), OFFICE_SIZES, source, target, 2, [3, 8, 8], augment=False)
    assert {name: len(data.split(name)) for name in data.splits} == OFFICE_SIZES
    for name in data.splits:
        dataset = data.split(name)
        assert isinstance(dataset.images, torch.Tensor)
        expected = torch.tensor(reds[0] if name == "pretrain" else reds[1]).expand(len(dataset)).float()
        mean = dataset.images.float().mean(dim=(2, 3))
        torch.testing.assert_close(mean[:, 0], expected, atol=3.0, rtol=0)  # JPEG is lossy
        torch.testing.assert_close(mean[:, 1], 200.0 * dataset.target, atol=3.0, rtol=0)


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


SPECTRA_SIZES = {"train": 32, "val": 16, "test": 32}


def _write(folder: Path, num_bands: int = 220, corrected: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Write 10 x 12 pixels, 96 with a label, and return image and labels."""
    generator = np.random.default_rng(0)
    labels = np.zeros(120, dtype=np.uint8)
    labels[:96] = np.arange(96) % 16 + 1
    labels = generator.permutation(labels).reshape(10, 12)
    image = generator.integers(955, 9605, (10, 12, num_bands), dtype=np.uint16)
    image[:, :, 7] = 1000  # a band that says nothing
    suffix = "_corrected" if corrected else ""
    savemat(folder / f"Indian_pines{suffix}.mat", {f"indian_pines{suffix}": image}, do_compression=True)
    savemat(folder / "Indian_pines_gt.mat", {"indian_pines_gt": labels}, do_compression=True)
    return image, labels


@pytest.mark.parametrize("num_bands", [220, 200])
def test_indian_pines_are_the_labelled_pixels(tmp_path: Path, num_bands: int) -> None:
    image, labels = _write(tmp_path, num_bands, corrected=num_bands == 200)
    data = IndianPines(str(tmp_path), SPECTRA_SIZES, image_shape=[num_bands])
    assert {name: len(data.split(name)) for name in data.splits} == SPECTRA_SIZES
    train = data.split("train").__getitems__(range(32))
    assert torch.bincount(train["target"]).tolist() == [2] * 16
    inputs = train["input"].double()
    assert inputs[:, 7].abs().max() == 0
    others = torch.arange(num_bands) != 7
    torch.testing.assert_close(inputs.mean(dim=0), torch.zeros(num_bands).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(inputs[:, others].std(dim=0, correction=0), torch.ones(num_bands - 1).double())
    # All labelled pixels are there, with their labels.
    batch = IndianPines(str(tmp_path), {"train": 96}, image_shape=[num_bands]).split("train").__getitems__(range(96))
    pixels = image[labels > 0].astype(float)
    expected = torch.from_numpy((pixels - pixels.mean(0)) / np.maximum(pixels.std(0), 1e-9))
    distance, places = torch.cdist(batch["input"].double(), expected).min(dim=1)
    assert distance.max() < 1e-3
    assert sorted(places.tolist()) == list(range(96))
    assert batch["target"].tolist() == (labels[labels > 0][places.numpy()].astype(int) - 1).tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"indian_pines": np.array([[{"a": 1}, "os.system"]], dtype=object)}, "found .*cell.*; expected one array"),
        ({"a": np.zeros((2, 2, 3)), "b": np.zeros((2, 2, 3))}, "expected one array of numbers"),
        ({"indian_pines": np.zeros((2, 3))}, "expected one array of numbers with 3 axes"),
        ({"indian_pines": np.zeros((2, 2, 3), dtype=complex)}, "expected one array of numbers"),
        (pickle.dumps({"indian_pines": np.zeros((10, 12, 220))}), r"Indian_pines\.mat.* could not be read"),
        (b"no .mat file", r"Indian_pines\.mat.* could not be read"),
        (b"MATLAB 5.0 MAT-file" + bytes(200), r"Indian_pines\.mat(.* could not be read|.*; expected one array)"),
    ],
)
def test_files_that_hold_something_else_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    _write(tmp_path)
    if isinstance(content, bytes):
        (tmp_path / "Indian_pines.mat").write_bytes(content)
    else:
        savemat(tmp_path / "Indian_pines.mat", content)
    with pytest.raises(ConfigError, match=message):
        IndianPines(str(tmp_path), SPECTRA_SIZES)


def test_synthetic_spectra_are_smooth_and_standardised() -> None:
    data = SyntheticSpectra({"train": 320, "val": 64})
    train = data.split("train").__getitems__(range(320))
    assert (data.num_classes, data.image_shape, train["input"].dtype) == (16, (220,), torch.float32)
    assert torch.bincount(train["target"]).tolist() == [20] * 16
    torch.testing.assert_close(train["input"].mean(dim=0), torch.zeros(220), atol=1e-5, rtol=0)
    assert train["input"].diff(dim=1).abs().mean() < 0.5 * train["input"].abs().mean()


DIGIT_SIZES = {"train": 1000, "meta": 100, "val": 200, "test": 497}


def test_digits_are_scikit_learns_and_each_is_used_once() -> None:
    data = Digits(DIGIT_SIZES)
    assert data.splits == ("train", "meta", "val", "test")
    assert (data.num_classes, data.image_shape) == (10, (1, 8, 8))
    inputs = torch.cat([data.split(name).__getitems__(range(DIGIT_SIZES[name]))["input"] for name in data.splits])
    assert inputs.mean().abs() < 1e-3
    assert (inputs.std() - 1).abs() < 1e-3
    assert_all_digits(torch.cat([pixels(data, name) for name in data.splits]))


def test_only_train_is_corrupted_after_its_long_tail_and_keeps_its_clean_labels() -> None:
    every, noise = Digits(DIGIT_SIZES), {"kind": "uniform", "rate": 0.4}
    plain = Digits(DIGIT_SIZES, imbalance_factor=20)
    expected = long_tail_counts(torch.bincount(every.split("train").target), 20.0)
    assert torch.equal(torch.bincount(plain.split("train").target), expected)
    data = Digits(DIGIT_SIZES, imbalance_factor=20, label_noise=noise)
    train = data.split("train")
    assert train.clean_target is not None
    assert torch.equal(train.clean_target, plain.split("train").target)
    assert (train.target != train.clean_target).float().mean() == pytest.approx(0.36, abs=0.05)
    assert torch.equal(train[7]["clean_target"], train.clean_target[7])
    for name in ("meta", "val", "test"):
        assert torch.equal(data.split(name).target, every.split(name).target)
        assert data.split(name).clean_target is None
        assert "clean_target" not in data.split(name)[0]


@pytest.fixture
def dataset() -> InMemoryDataset:
    images = torch.randint(0, 256, (6, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return InMemoryDataset(
        images,
        torch.arange(6),
        Normalization([0.4, 0.5, 0.6], [0.1, 0.2, 0.3]),
        clean_target=torch.arange(6) % 2,
        augmentation=CropAndFlip(padding=2),
    )


@pytest.mark.parametrize("indices", [[4, 1], torch.tensor([4, 1])])
def test_batches_are_collated_and_normalised(dataset: InMemoryDataset, indices: list[int] | torch.Tensor) -> None:
    batch = dataset.without_augmentation().__getitems__(indices)
    labels = dict.fromkeys(("target", "index", "clean_target"), torch.int64)
    assert {name: values.dtype for name, values in batch.items()} == {"input": torch.float32, **labels}
    assert batch["target"].tolist() == batch["index"].tolist() == [4, 1]
    assert batch["clean_target"].tolist() == [0, 1]
    for channel, (mean, std) in enumerate([(0.4, 0.1), (0.5, 0.2), (0.6, 0.3)]):
        expected = (dataset.images[[4, 1], channel].double() / 255 - mean) / std
        torch.testing.assert_close(batch["input"][:, channel].double(), expected, atol=1e-5, rtol=0)


def test_a_data_loader_takes_the_batches_and_a_seeded_one_leaves_the_global_generator_alone(
    dataset: InMemoryDataset,
) -> None:
    loader = DataLoader(dataset, batch_size=4, collate_fn=lambda batch: batch)
    assert [batch["target"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]
    before = torch.get_rng_state()
    dataset.__getitems__([0, 1], seed=3)
    assert torch.equal(before, torch.get_rng_state())


def test_crops_and_flips_are_those_of_the_padded_image() -> None:
    images = torch.arange(1, 2 * 3 * 5 * 4 + 1).reshape(2, 3, 5, 4)
    padded = torch.zeros(2, 3, 9, 8, dtype=images.dtype)
    padded[:, :, 2:7, 2:6] = images
    seen = set()
    for seed in range(200):
        augmented = CropAndFlip(padding=2)(images, torch.Generator().manual_seed(seed))
        for n in range(2):
            matches = [
                (dy, dx, flip)
                for dy in range(5)
                for dx in range(5)
                for flip in (False, True)
                if torch.equal(augmented[n], _crop(padded[n], dy, dx, flip))
            ]
            assert len(matches) == 1
            seen.add(matches[0])
    assert len(seen) == 50  # 400 draws reach each of the 5 x 5 x 2 cases


def test_digits_are_augmented_in_train_alone_by_the_seed() -> None:
    sizes = {"train": 30, "val": 10}
    plain, augmented = Digits(sizes), Digits(sizes, augment=True)
    assert augmented.split("train").seeded
    assert not augmented.split("val").seeded
    assert not plain.split("train").seeded
    first, again, other = (augmented.split("train").__getitems__(range(30), seed=seed)["input"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, plain.split("train").__getitems__(range(30))["input"])


def copied_dataset(num_copies: int = 3) -> InMemoryDataset:
    images = torch.randint(0, 256, (6, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    augmentation = AugmentedCopies(CropAndFlip(padding=2), num_copies)
    return InMemoryDataset(images, torch.arange(6), Normalization([0.5], [0.5]), augmentation=augmentation)


def test_a_copy_is_the_same_image_in_every_batch() -> None:
    """As many different images of each sample as there are copies, and all of them come."""
    found: dict[tuple[int, int], torch.Tensor] = {}
    for seed in range(30):
        order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))[:4]
        batch = copied_dataset().__getitems__(order, seed=100 + seed)
        assert batch["index"].tolist() == order.tolist()
        for picture, index, copy in zip(batch["input"], order.tolist(), batch["copy"].tolist(), strict=True):
            assert torch.equal(found.setdefault((index, copy), picture), picture)
    assert set(found) == {(index, copy) for index in range(6) for copy in range(3)}
    assert len({tuple(picture.flatten().tolist()) for picture in found.values()}) == 18


@pytest.mark.parametrize(("kind", "rate"), [("uniform", 0.0), ("uniform", 0.4), ("uniform", 1.0), ("flip", 0.4)])
def test_noise_goes_to_all_classes_or_to_one_other(kind: Any, rate: float) -> None:
    target = torch.arange(20000) % 10
    noisy, again, other = (corrupt_labels(target, 10, kind=kind, rate=rate, seed=seed) for seed in (0, 0, 1))
    transitions = torch.bincount(target * 10 + noisy, minlength=100).reshape(10, 10) / 2000
    expected = rate / 10 * torch.ones(10, 10) + (1 - rate) * torch.eye(10)
    if kind == "flip":
        assert (transitions > 0).sum(dim=1).tolist() == [2] * 10
        expected = torch.where(transitions.diagonal().diag() > 0, 1 - rate, rate * (transitions > 0))
    torch.testing.assert_close(transitions, expected, atol=0.045, rtol=0)  # 4 sigma of 2000 draws at p = 0.4
    assert torch.equal(noisy, again)
    assert torch.equal(noisy, other) is (rate == 0)


SPLIT_SIZES = {"train": 120, "meta": 20, "val": 40}


@pytest.mark.parametrize("seed", [0, 1])
def test_splits_are_disjoint_and_stratified_exactly_where_the_classes_are_balanced(seed: int) -> None:
    split_target = torch.arange(200) % 4
    splits = split_indices(split_target, SPLIT_SIZES, seed=seed)
    assert len(torch.cat(list(splits.values())).unique()) == sum(SPLIT_SIZES.values())
    for name, indices in splits.items():
        assert torch.bincount(split_target[indices]).tolist() == [SPLIT_SIZES[name] // 4] * 4
    assert not torch.equal(splits["train"], split_indices(split_target, SPLIT_SIZES, seed=2)["train"])
    # The size of train leaves the others alone.
    small = split_indices(split_target, SPLIT_SIZES | {"train": 10}, seed=seed)
    assert torch.equal(small.pop("train"), splits["train"][:10])
    assert all(torch.equal(indices, splits[name]) for name, indices in small.items())


def test_splits_are_stratified_to_one_sample_where_they_are_not() -> None:
    split_target = torch.repeat_interleave(torch.arange(3), torch.tensor([500, 37, 163]))
    for name, indices in split_indices(split_target, {"train": 400, "val": 100, "test": 200}, seed=2).items():
        expected = torch.tensor([500, 37, 163]) * len(indices) / 700
        assert ((torch.bincount(split_target[indices]) - expected).abs() <= 1).all(), name


@pytest.mark.parametrize(
    ("available", "imbalance_factor", "expected"),
    [
        *(
            ([5000] * 10, factor, [5000, *[int(5000 * factor ** (-c / 9)) for c in range(1, 9)], rarest])
            for factor, rarest in ((10.0, 500), (50.0, 100), (200.0, 25))
        ),
        # Cui et al. 2019 and those after them: 12,406 images.
        ([5000] * 10, 100.0, [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]),
        # What is whole stays whole in floating point.
        ([1024] * 11, 1024.0, [2**power for power in range(10, -1, -1)]),
        # It asks for no more than there is.
        ([100, 40, 100], 4.0, [80, 40, 20]),
    ],
)
def test_long_tail_counts_are_the_formula(available: list[int], imbalance_factor: float, expected: list[int]) -> None:
    assert long_tail_counts(torch.tensor(available), imbalance_factor).tolist() == expected


def test_long_tail_indices_keep_the_first_of_each_class() -> None:
    split_target = torch.tensor([1, 0, 0, 1, 0, 0, 1, 1])
    assert long_tail_indices(split_target, 2, 4.0).tolist() == [0, 1, 2, 4, 5]


def _crop(image: torch.Tensor, dy: int, dx: int, flip: bool) -> torch.Tensor:
    crop = image[:, dy : dy + 5, dx : dx + 4]
    return crop.flip(-1) if flip else crop
