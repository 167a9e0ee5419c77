"""The readers, on tiny data sets written in the published formats."""

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

from mlotool.core.errors import ConfigError
from mlotool.data import (
    CIFAR10,
    CIFAR100,
    MNIST,
    Clothing1M,
    ImageFolder,
    IndianPines,
    OfficeHome,
    SyntheticSpectra,
    TwoDomains,
)
from mlotool.data.image_data import ImageFiles

SIZES = {"train": 20, "val": 10, "test": 10}


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
    found = (sample["input"][0] * 0.3081 + 0.1307) * 255
    matches = [i for i, image in enumerate(test) if np.allclose(found.numpy(), image, atol=1e-3)]
    assert len(matches) == 1
    assert int(sample["target"]) == labels[matches[0]]


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
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    found = (sample["input"].numpy() * std[:, None, None] + mean[:, None, None]) * 255
    matches = [i for i, image in enumerate(test) if np.allclose(found, image, atol=1e-3)]
    assert len(matches) == 1
    assert int(sample["target"]) == matches[0] % 10


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


def test_cifar10_opens_no_pickle_with_another_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_cifar10(tmp_path, monkeypatch)
    monkeypatch.undo()
    monkeypatch.setattr(pickle, "load", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(ConfigError, match="CIFAR10 could not be read"):
        CIFAR10(str(tmp_path), SIZES)


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


def test_image_folder_scales_and_without_a_test_part_draws_test_from_train(image_root: Path) -> None:
    (image_root / "test").rename(image_root / "unused")
    data = ImageFolder(str(image_root), {"train": 24, "test": 6}, 2, [3, 4, 4])
    assert data.split("test")[0]["input"].shape == (3, 4, 4)


@pytest.mark.parametrize("reader", [MNIST, CIFAR10, CIFAR100])
def test_absent_files_are_named(tmp_path: Path, reader: type) -> None:
    with pytest.raises(ConfigError, match=r"data\.root=.*absent.*; expected .*; ?.*Set data\.root|data\.download=true"):
        reader(str(tmp_path / "absent"), SIZES)
    assert not (tmp_path / "absent").exists()


DOMAIN_SIZES = {"pretrain": 900, "finetune": 50, "meta": 50, "val": 197, "test": 600}


def pixels(data: TwoDomains, name: str) -> torch.Tensor:
    inputs = data.split(name).__getitems__(range(len(data.split(name))))["input"].squeeze(1)
    return ((inputs.double() * 0.3760 + 0.3053) * 16).round()


def test_each_digit_is_in_one_domain_and_used_once() -> None:
    data = TwoDomains(DOMAIN_SIZES)
    assert {name: len(data.split(name)) for name in data.splits} == DOMAIN_SIZES
    target = torch.cat([pixels(data, name) for name in data.splits[1:]]).rot90(2, dims=(1, 2))
    found = torch.cat([pixels(data, "pretrain"), target])
    assert sorted(found.flatten(1).tolist()) == sorted(torch.from_numpy(load_digits().data).tolist())
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
    _write(tmp_path, num_bands, corrected=num_bands == 200)
    data = IndianPines(str(tmp_path), SPECTRA_SIZES, image_shape=[num_bands])
    assert {name: len(data.split(name)) for name in data.splits} == SPECTRA_SIZES
    train = data.split("train").__getitems__(range(32))
    assert torch.bincount(train["target"]).tolist() == [2] * 16
    inputs = train["input"].double()
    assert inputs[:, 7].abs().max() == 0
    others = torch.arange(num_bands) != 7
    torch.testing.assert_close(inputs.mean(dim=0), torch.zeros(num_bands).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(inputs[:, others].std(dim=0, correction=0), torch.ones(num_bands - 1).double())


def test_pixels_keep_their_labels(tmp_path: Path) -> None:
    image, labels = _write(tmp_path)
    data = IndianPines(str(tmp_path), {"train": 96})
    batch = data.split("train").__getitems__(range(96))
    # All labelled pixels are there: sorted by their first band they are those of the file.
    pixels, kinds = image[labels > 0].astype(float), labels[labels > 0] - 1
    expected = (pixels[:, 0] - pixels[:, 0].mean()) / pixels[:, 0].std()
    order, found = np.argsort(expected), batch["input"][:, 0].argsort()
    np.testing.assert_allclose(batch["input"][found, 0], expected[order], atol=1e-5)
    assert batch["target"][found].tolist() == kinds[order].tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"indian_pines": np.array([[{"a": 1}, "os.system"]], dtype=object)}, "found .*cell.*; expected one array"),
        ({"a": np.zeros((2, 2, 3)), "b": np.zeros((2, 2, 3))}, "expected one array of numbers"),
        ({"indian_pines": np.zeros((2, 3))}, "expected one array of numbers with 3 axes"),
        ({"indian_pines": np.zeros((2, 2, 3), dtype=complex)}, "expected one array of numbers"),
        ({}, "expected one array of numbers"),
    ],
)
def test_files_that_hold_something_else_are_refused(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    _write(tmp_path)
    savemat(tmp_path / "Indian_pines.mat", content)
    with pytest.raises(ConfigError, match=message):
        IndianPines(str(tmp_path), SPECTRA_SIZES)


@pytest.mark.parametrize("content", [b"", b"no .mat file", b"MATLAB 5.0 MAT-file" + bytes(200)])
def test_broken_files_are_refused(tmp_path: Path, content: bytes) -> None:
    _write(tmp_path)
    (tmp_path / "Indian_pines_gt.mat").write_bytes(content)
    with pytest.raises(ConfigError, match=r"Indian_pines_gt\.mat(.* could not be read|.*; expected one array)"):
        IndianPines(str(tmp_path), SPECTRA_SIZES)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "touched",)

    _write(tmp_path)
    (tmp_path / "Indian_pines.mat").write_bytes(pickle.dumps(Touch()))
    with pytest.raises(ConfigError, match="could not be read"):
        IndianPines(str(tmp_path), SPECTRA_SIZES)
    assert not (tmp_path / "touched").exists()


def test_synthetic_spectra_are_smooth_and_standardised() -> None:
    data = SyntheticSpectra({"train": 320, "val": 64})
    train = data.split("train").__getitems__(range(320))
    assert (data.num_classes, data.image_shape, train["input"].dtype) == (16, (220,), torch.float32)
    assert torch.bincount(train["target"]).tolist() == [20] * 16
    torch.testing.assert_close(train["input"].mean(dim=0), torch.zeros(220), atol=1e-5, rtol=0)
    assert train["input"].diff(dim=1).abs().mean() < 0.5 * train["input"].abs().mean()
