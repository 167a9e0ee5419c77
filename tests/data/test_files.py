"""The readers, on tiny data sets written in the published formats."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from mlotool.core.errors import ConfigError
from mlotool.data import CIFAR10, CIFAR100, MNIST, ImageFolder
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
    data = CIFAR100(str(tmp_path), {"train": 100, "meta": 100, "test": 200}, imbalance_factor=1, augment=False)
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


def test_image_folder_takes_each_file_once(image_root: Path) -> None:
    data = ImageFolder(str(image_root), SIZES, 2, [3, 6, 8], max_memory_gb=0)
    paths = [path for name in data.splits for path in data.split(name).images.paths]
    assert len(set(paths)) == sum(SIZES.values())
    assert all("test" in path.parts for path in data.split("test").images.paths)


def test_image_folder_scales_and_without_a_test_part_draws_test_from_train(image_root: Path) -> None:
    (image_root / "test").rename(image_root / "unused")
    data = ImageFolder(str(image_root), {"train": 24, "test": 6}, 2, [3, 4, 4])
    assert data.split("test")[0]["input"].shape == (3, 4, 4)


def test_image_folder_with_other_classes_in_test_is_refused(image_root: Path) -> None:
    (image_root / "test" / "dog").rename(image_root / "test" / "hound")
    with pytest.raises(ConfigError, match="the classes dog, hound are only in one of train/ and test/"):
        ImageFolder(str(image_root), SIZES, 2, [3, 6, 8])


@pytest.mark.parametrize("reader", [MNIST, CIFAR10, CIFAR100])
def test_absent_files_are_named(tmp_path: Path, reader: type) -> None:
    with pytest.raises(ConfigError, match=r"data\.root=.*absent.*; expected .*; ?.*Set data\.root|data\.download=true"):
        reader(str(tmp_path / "absent"), SIZES)
    assert not (tmp_path / "absent").exists()


def test_an_absent_image_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.root=.*absent.* has no class folders; expected .*Set data\.root"):
        ImageFolder(str(tmp_path / "absent"), SIZES, 2, [3, 6, 8])
