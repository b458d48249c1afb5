"""Images of every kind become the same numbers, from every source; what is broken is named in one line."""

import json
import os
import struct
import zlib

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from helpers.disks import files_no_larger_than
from helpers.small import message
from metaleo.cli.pack import Pack
from metaleo.features import images as module
from metaleo.features.datasets import open_images
from metaleo.features.images import ImageFiles, TurnedImages, check_image_classes, decode, pack

SIDE = 8
ORANGE = (250, 120, 10)


def picture(seed=0, width=SIDE, height=SIDE) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def plain(mode: str, colour) -> Image.Image:
    return Image.new(mode, (SIDE, SIDE), colour)


def decoded(tmp_path, image: Image.Image, suffix="png", channels=3, side=SIDE, **options) -> np.ndarray:
    image.save(tmp_path / f"image.{suffix}", **options)
    return decode(str(tmp_path / f"image.{suffix}"), side, channels).astype(int)


def write(path, seed=0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(seed).save(path)


def class_folders(folder, classes, images=3) -> None:
    """Images by class; every one is another."""
    for position, name in enumerate(classes):
        for number in range(images):
            write(folder / name / f"{number}.png", 100 * position + number)


# One image.


def test_an_image_of_the_right_size_is_unchanged(tmp_path):
    np.testing.assert_array_equal(decoded(tmp_path, picture()), np.asarray(picture()))


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("L", 77, (77, 77, 77)),
        ("1", 1, (255, 255, 255)),
        ("RGBA", (*ORANGE, 255), ORANGE),
        ("RGBA", (*ORANGE, 0), (255, 255, 255)),
        ("RGBA", (0, 100, 200, 128), (127, 177, 227)),
        ("LA", (0, 51), (204, 204, 204)),
        ("I;16", 257 * 200, (200, 200, 200)),
        ("I;16", 65535, (255, 255, 255)),
    ],
)
def test_modes(tmp_path, mode, colour, expected):
    assert np.abs(decoded(tmp_path, plain(mode, colour)) - expected).max() <= 1


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("I", 257 * 50, 50),
        ("F", 0.2, 51),
        ("F", 200.0, 200),
        ("CMYK", (0, 0, 0, 155), 100),
        ("LAB", (255, 128, 128), 255),
    ],
)
def test_modes_of_tiff(tmp_path, mode, colour, expected):
    assert np.abs(decoded(tmp_path, plain(mode, colour), "tif") - expected).max() <= 1


def test_palette(tmp_path):
    image = plain("RGB", ORANGE).quantize(4)
    assert image.mode == "P"
    np.testing.assert_array_equal(decoded(tmp_path, image)[0, 0], ORANGE)


def test_transparent_palette(tmp_path):
    image = plain("P", 0)
    image.putpalette([*ORANGE, 1, 2, 3])
    image.paste(1, (0, 0, SIDE, 4))
    pixels = decoded(tmp_path, image, transparency=0)
    np.testing.assert_array_equal(pixels[0, 0], (1, 2, 3))
    np.testing.assert_array_equal(pixels[-1, 0], (255, 255, 255))


@pytest.mark.parametrize("channels", [1, 3])
def test_cmyk_jpeg(tmp_path, channels):
    pixels = decoded(tmp_path, plain("CMYK", (255, 0, 0, 0)), "jpg", channels)
    assert np.abs(pixels - ([179] if channels == 1 else [0, 255, 255])).max() <= 3


def test_sixteen_bits_are_scaled_and_not_cut_off(tmp_path):
    ramp = np.linspace(0, 65535, SIDE * SIDE).astype(np.uint16).reshape(SIDE, SIDE)
    pixels = decoded(tmp_path, Image.fromarray(ramp))
    assert np.abs(pixels[..., 0] - ramp / 257).max() <= 0.5


def test_sixteen_bit_colour(tmp_path):
    """Pillow does not write it: this is the PNG format by hand."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    row = b"\0" + struct.pack(">3H", 65535, 257 * 100, 0) * SIDE
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 16, 2, 0, 0, 0))
    content = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(row * SIDE)) + chunk(b"IEND", b"")
    (tmp_path / "deep.png").write_bytes(content)
    np.testing.assert_array_equal(decode(str(tmp_path / "deep.png"), SIDE, 3)[3, 3], (255, 100, 0))


def test_floats_of_any_range(tmp_path):
    values = np.linspace(-3, 900, SIDE * SIDE, dtype=np.float32).reshape(SIDE, SIDE)
    values[0, 1] = np.nan
    pixels = decoded(tmp_path, Image.fromarray(values), "tif")
    assert (pixels[0, 0, 0], pixels[-1, -1, 0]) == (0, 255)


def test_exif_orientation(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    pixels = decoded(tmp_path, picture(), exif=exif)
    np.testing.assert_array_equal(pixels, np.rot90(np.asarray(picture()), -1))


def test_centre_of_a_wide_and_of_a_tall_image(tmp_path):
    wide = picture(0, 14, SIDE)
    np.testing.assert_array_equal(decoded(tmp_path, wide), np.asarray(wide)[:, 3:11])
    tall = picture(0, SIDE, 11)
    np.testing.assert_array_equal(decoded(tmp_path, tall), np.asarray(tall)[1:9])


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_fine_patterns_become_grey(tmp_path, suffix):
    """Without antialiasing they would become black or white."""
    checks = np.indices((256, 300)).sum(0) % 2 * 255
    pixels = decoded(tmp_path, Image.fromarray(checks.astype(np.uint8)), suffix)
    assert np.abs(pixels - 127.5).max() < 8


def test_small_images_grow(tmp_path):
    assert np.abs(decoded(tmp_path, Image.new("RGB", (3, 2), ORANGE)) - ORANGE).max() <= 1


def test_grey(tmp_path):
    assert decoded(tmp_path, plain("RGB", (255, 0, 0)), channels=1).tolist() == np.full((SIDE, SIDE, 1), 76).tolist()


# Images that cannot be read.


@pytest.fixture
def damaged(tmp_path):
    """Four files of a class that are no images, and one that is."""
    folder = tmp_path / "damaged" / "class"
    for name in ("good.png", "cut.jpg"):
        folder.mkdir(parents=True, exist_ok=True)
        picture(1, 64, 64).save(folder / name)
    content = (folder / "cut.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(content[: len(content) // 2])
    (folder / "empty.png").touch()
    (folder / "text.jpg").write_text("no image at all")
    (folder / "gone.png").symlink_to(folder / "nowhere.png")
    return folder.parent


def test_unreadable_images_are_black_and_named(damaged):
    images = open_images(damaged, SIDE)
    pixels, readable = images.read(slice(None))
    assert [name for name, good in zip(images.names, readable, strict=True) if good] == ["class/good.png"]
    assert not pixels[~readable].any()
    assert pixels[readable].any()
    assert images.unreadable.keys() == {"class/cut.jpg", "class/empty.png", "class/text.jpg", "class/gone.png"}
    assert "truncated" in images.unreadable["class/cut.jpg"]
    assert images.unreadable["class/text.jpg"] == "not an image"
    assert images.unreadable["class/gone.png"] == "No such file or directory"


def test_an_image_of_too_many_pixels(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_PIXELS", 63)
    class_folders(tmp_path, ["a"], 1)
    images = open_images(tmp_path, SIDE)
    assert not images.read(slice(None))[1].any()
    assert images.unreadable == {"a/0.png": "8 × 8 pixels are too many"}


# Class folders.


def test_class_folders(tmp_path):
    class_folders(tmp_path, ["dog", "ant"])
    write(tmp_path / "ant" / "deeper" / "x.JPEG")
    (tmp_path / "ant" / "notes.txt").touch()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "dog" / "round").symlink_to(tmp_path / "dog")  # in circles
    images = open_images(tmp_path)
    assert (images.side, images.channels, len(images)) == (84, 3, 7)
    assert images.class_names == ("ant", "dog")
    assert images.splits == ("train", "train")
    assert images.counts.tolist() == [4, 3]
    assert images.names[:4] == ["ant/0.png", "ant/1.png", "ant/2.png", "ant/deeper/x.JPEG"]


def test_class_folders_in_split_folders(tmp_path):
    for split, classes in {"test": ["e"], "train": ["b", "a"], "val": ["c"]}.items():
        class_folders(tmp_path / split, classes)
    images = open_images(tmp_path, SIDE)
    assert images.class_names == ("a", "b", "c", "e")
    assert images.splits == ("train", "train", "val", "test")
    np.testing.assert_array_equal(images.read(np.array([0]))[0][0], np.asarray(picture(100)))
    assert images.describe() == "4 classes (2 train, 1 val, 1 test), 3 images each, 12 in all, 8 × 8 pixels"


def test_subset(tmp_path):
    for split, name in {"train": "a", "val": "b", "test": "c"}.items():
        class_folders(tmp_path / split, [name])
    images = open_images(tmp_path, SIDE)
    part = images.subset("train+test")
    assert part.class_names == ("a", "c")
    assert part.splits == ("train", "test")
    assert part.labels.tolist() == [0, 0, 0, 1, 1, 1]
    again = part.subset("test")
    assert again.names == ["c/0.png", "c/1.png", "c/2.png"]
    np.testing.assert_array_equal(again.read(slice(1, None))[0], images.read(np.array([7, 8]))[0])
    assert len(images.subset("train").subset("test")) == 0
    assert "unknown split 'dev'" in message(lambda: images.subset("train+dev"))


def test_a_class_in_two_split_folders(tmp_path):
    for split in ("train", "val"):
        class_folders(tmp_path / split, ["a"])
    assert "class a is in two splits, train and val" in message(lambda: open_images(tmp_path))


def test_folders_without_classes_or_images(tmp_path):
    assert "holds no class folders" in message(lambda: open_images(tmp_path))
    write(tmp_path / "loose.png")
    assert "holds no class folders" in message(lambda: open_images(tmp_path))
    class_folders(tmp_path, ["a"])
    (tmp_path / "b").mkdir()
    assert f"{tmp_path / 'b'} holds no images" in message(lambda: open_images(tmp_path))


def test_a_class_with_one_image(tmp_path):
    class_folders(tmp_path, ["a"], 2)
    class_folders(tmp_path, ["lonely"], 1)
    images = open_images(tmp_path)
    check_image_classes(images, 1)
    assert message(lambda: check_image_classes(images, 2)) == "class lonely has 1 image; at least 2 are needed"


@pytest.mark.parametrize("source", ["nowhere", "nowhere.csv", "imagenet21k:x", "README.md"])
def test_unknown_sources(source):
    assert "NAME:FOLDER with NAME one of miniimagenet, tieredimagenet" in message(lambda: open_images(source))


def test_senseless_sizes(tmp_path):
    assert "at least 1 pixel" in message(lambda: open_images(tmp_path, 0))
    assert "not 4" in message(lambda: open_images(tmp_path, None, 4))


# CSV files.


def csv_folder(folder, lines, images=("a1.png", "a2.png", "b1.png")):
    for seed, name in enumerate(images):
        write(folder / name, seed)
    (folder / "all.csv").write_text("\n".join(lines))
    return folder / "all.csv"


LINES = ("filename,label,split", "a1.png,a,train", "b1.png,b,test", "a2.png,a,train")


@pytest.mark.parametrize("place", ["", "images/", "images/deep/er/"])
def test_csv(tmp_path, place):
    path = csv_folder(tmp_path, LINES, [place + name for name in ("a1.png", "a2.png", "b1.png")])
    images = open_images(path, SIDE)
    assert isinstance(images, ImageFiles)
    assert images.names == ["a1.png", "b1.png", "a2.png"]
    assert images.class_names == ("a", "b")
    assert images.splits == ("train", "test")
    assert images.labels.tolist() == [0, 1, 0]
    np.testing.assert_array_equal(images.read(slice(None))[0][1], np.asarray(picture(2)))


def test_csv_files_of_ravi_and_larochelle(tmp_path):
    for split in ("train", "val", "test"):
        write(tmp_path / "images" / split / f"{split}1.png")
        (tmp_path / f"{split}.csv").write_text(f"filename,label\n{split}1.png,class of {split}\n")
    images = open_images(tmp_path, SIDE)
    assert images.class_names == ("class of train", "class of val", "class of test")
    assert images.splits == ("train", "val", "test")
    assert open_images(tmp_path / "val.csv", SIDE).splits == ("val",)


def test_csv_without_splits(tmp_path):
    path = csv_folder(tmp_path, ["label, filename", "a, a1.png"])
    assert open_images(path).splits == ("train",)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["file,label", "a1.png,a"], "has no column 'filename': it begins with 'file,label'"),
        (["filename,class", "a1.png,a"], "has no column 'label'"),
        (["a1.png,a"], "has no column 'filename'"),
        ([], "has no column 'filename'"),
        (["filename,label"], "lists no images"),
        (["filename,label", "a1.png"], "line 2: a line needs a filename and a label"),
        (["filename,label,split", "a1.png,a,dev"], "line 2: unknown split 'dev'"),
        (["filename,label,split", "a1.png,a,"], "line 2: unknown split ''"),
        (
            ["filename,label,split", "a1.png,a,train", "a2.png,a,val"],
            "class a is in two splits, train and val (a2.png)",
        ),
        (
            ["filename,label", "a1.png,a", "x.png,a", "y.png,b"],
            "2 of its 3 images are missing, the first x.png; put them",
        ),
        (["filename,label", "a1.png,a", "a1.png,b"], "line 3: a1.png stands in line 2 already"),
    ],
)
def test_wrong_csv(tmp_path, lines, expected):
    path = csv_folder(tmp_path, lines)
    text = message(lambda: open_images(path))
    assert expected in text


def test_csv_that_is_none(tmp_path):
    path = csv_folder(tmp_path, [])
    path.write_bytes(b"filename,label\n\xff\xfe,x")
    assert "is not a CSV file" in message(lambda: open_images(path))


def test_two_files_of_one_name(tmp_path):
    path = csv_folder(tmp_path, ["filename,label", "x.png,a"], ["p/x.png", "q/x.png"])
    assert "2 files called x.png" in message(lambda: open_images(path))
    path.write_text("filename,label\np/x.png,a\nq/x.png,b\n")
    assert open_images(path).class_names == ("a", "b")


# Packed files.


@pytest.fixture
def some(tmp_path):
    """Two classes of three images, in two splits."""
    class_folders(tmp_path / "some" / "train", ["a"])
    class_folders(tmp_path / "some" / "test", ["é\n\udcff"])
    return open_images(tmp_path / "some", SIDE)


def assert_same(one, other) -> None:
    assert one.class_names == other.class_names
    assert one.splits == other.splits
    assert list(one.names) == list(other.names)
    assert one.describe() == other.describe()
    np.testing.assert_array_equal(one.labels, other.labels)
    for mine, yours in zip(one.read(slice(None)), other.read(slice(None)), strict=True):
        np.testing.assert_array_equal(mine, yours)


@pytest.mark.parametrize("slab", [1, 2, 4, 100])
def test_round_trip(some, tmp_path, monkeypatch, slab):
    monkeypatch.setattr(module, "SLAB", slab)
    done = []
    packed = pack(some, tmp_path / "packed.safetensors", done.append)
    assert done == [*range(slab, 6, slab), 6]
    assert packed.source == "some"
    assert_same(packed, some)
    assert_same(open_images(tmp_path / "packed.safetensors"), some)
    assert_same(packed.subset("test"), some.subset("test"))


@pytest.mark.parametrize("channels", [1, 3])
def test_odd_sizes(tmp_path, channels):
    class_folders(tmp_path / "some", ["a", "b"])
    images = open_images(tmp_path / "some", 5, channels)
    assert_same(pack(images, tmp_path / "packed.safetensors"), images)


def test_others_can_read_a_packed_file(some, tmp_path):
    pack(some, tmp_path / "packed.safetensors")
    arrays = safetensors.numpy.load_file(tmp_path / "packed.safetensors")
    np.testing.assert_array_equal(arrays["images"], some.read(slice(None))[0])
    np.testing.assert_array_equal(arrays["labels"], some.labels)


def test_a_packed_file_is_mapped(some, tmp_path):
    assert isinstance(pack(some, tmp_path / "packed.safetensors").pixels, np.memmap)


def test_a_packed_file_may_be_packed_over_itself(some, tmp_path):
    packed = pack(some, tmp_path / "packed.safetensors")
    assert_same(pack(packed, tmp_path / "packed.safetensors"), some)


def test_unreadable_images_are_left_out(damaged, tmp_path):
    class_folders(damaged, ["another"], 2)
    images = open_images(damaged, SIDE)
    packed = pack(images, tmp_path / "packed.safetensors")
    assert packed.names == ["another/0.png", "another/1.png", "class/good.png"]
    assert packed.labels.tolist() == [0, 0, 1]
    np.testing.assert_array_equal(packed.read(slice(None))[0], images.read(np.array([0, 1, 5]))[0])


def test_a_class_of_unreadable_images(some, damaged, tmp_path):
    (damaged / "class" / "good.png").unlink()
    images = open_images(damaged, SIDE)
    text = message(lambda: pack(images, tmp_path / "packed.safetensors"))
    assert "no image of class class could be read (class/cut.jpg: " in text
    assert not list(tmp_path.glob("*packed*"))


def test_names_too_long_for_a_header_become_numbers(some, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_HEADER", 100)
    packed = pack(some, tmp_path / "packed.safetensors")
    assert packed.names == ["0", "1", "2", "3", "4", "5"]


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("before", [None, b"what was there"])
def test_a_pack_that_is_interrupted_leaves_what_was_there(some, tmp_path, monkeypatch, before):
    monkeypatch.setattr(module, "SLAB", 2)
    path = tmp_path / "out" / "packed.safetensors"
    path.parent.mkdir()
    if before:
        path.write_bytes(before)

    def stop(done):
        if done == 4:
            (temporary,) = set(path.parent.iterdir()) - {path}
            assert "not a file of packed images" in message(lambda: module.read_packed(temporary))
            raise Interrupted

    with pytest.raises(Interrupted):
        pack(some, path, stop)
    assert [entry.read_bytes() for entry in path.parent.iterdir()] == ([before] if before else [])


def test_a_disk_that_becomes_full(some, tmp_path):
    with files_no_larger_than(1000):
        text = message(lambda: pack(some, tmp_path / "out" / "packed.safetensors"))
    assert "cannot write" in text
    assert "File too large" in text
    assert not os.listdir(tmp_path / "out")


def test_a_disk_that_is_full(some, tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    text = message(lambda: pack(some, tmp_path / "out" / "packed.safetensors"))
    assert "packed.safetensors: it needs 0.0 GB, and 0.0 GB are free there" in text
    assert not os.listdir(tmp_path / "out")


@pytest.mark.parametrize("share", [0, 0.001, 0.2, 0.6, 0.999])
def test_truncated_packed_file(some, tmp_path, share):
    path = tmp_path / "packed.safetensors"
    pack(some, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert f"{path} is truncated or not a file of packed images" in message(lambda: open_images(path))


def save_packed(path, images=None, labels=None, **changes):
    """A file as another program might write it."""
    images = np.zeros((2, 4, 4, 3), np.uint8) if images is None else images
    labels = np.array([0, 1], np.int32) if labels is None else labels
    strings = {"format": "1", "class_names": '["a","b"]', "split": '["train","test"]', "names": "[]"} | changes
    safetensors.numpy.save_file({"images": images, "labels": labels}, path, strings)
    return path


def test_a_packed_file_of_others(tmp_path):
    images = open_images(save_packed(tmp_path / "x.safetensors"))
    assert (images.side, images.channels, images.splits, images.names) == (4, 3, ("train", "test"), ["0", "1"])


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "2"},
        {"class_names": '["a"]'},
        {"class_names": "a, b"},
        {"split": '["train","dev"]'},
        {"split": '["train"]'},
        {"names": '["one"]'},
        {"labels": np.array([0, 2], np.int32)},
        {"labels": np.array([0, -1], np.int32)},
        {"labels": np.array([0, 1, 1], np.int32)},
        {"labels": np.array([0, 1], np.float32)},
        {"images": np.zeros((2, 4, 4, 3), np.int8)},
        {"images": np.zeros((2, 4, 5, 3), np.uint8)},
        {"images": np.zeros((2, 4, 4, 2), np.uint8)},
        {"images": np.zeros((2, 48), np.uint8)},
    ],
)
def test_other_safetensors(tmp_path, changes):
    path = save_packed(tmp_path / "x.safetensors", **changes)
    assert "not a file of packed images" in message(lambda: open_images(path))


def test_another_size_than_that_of_the_file(some, tmp_path):
    pack(some, tmp_path / "packed.safetensors")
    assert len(open_images(tmp_path / "packed.safetensors", SIDE, 3)) == 6
    assert "holds images of 8 × 8 pixels" in message(lambda: open_images(tmp_path / "packed.safetensors", 9))
    assert "and 3 channels" in message(lambda: open_images(tmp_path / "packed.safetensors", None, 1))


# Turned images.


def test_turned_classes(some):
    turned = TurnedImages.of(some)
    assert (len(turned), len(turned.class_names)) == (24, 8)
    assert turned.class_names[2] == "a@90"
    assert turned.subset("test").counts.tolist() == [3] * 4
    pixels, readable = turned.read(np.array([1, 7, 13, 19]))
    assert readable.all()
    for turn in range(4):
        np.testing.assert_array_equal(pixels[turn], np.rot90(pixels[0], turn))


def test_turned_images_that_cannot_be_read(damaged):
    turned = TurnedImages.of(open_images(damaged, SIDE))
    assert turned.read(slice(None))[1].sum() == 4
    assert turned.unreadable["class/text.jpg@90"] == "not an image"


# The command.


def test_command(damaged, tmp_path, capsys):
    class_folders(damaged, ["another"])
    out = tmp_path / "packed.safetensors"
    Pack(str(damaged), out, side=SIDE, json=True).run()
    printed = capsys.readouterr()
    assert "left out class/text.jpg: not an image" in printed.err
    assert "4 images could not be read" in printed.err
    result = json.loads(printed.out)
    assert (result["images"], result["classes"]["train"], len(result["unreadable"])) == (4, 2, 4)
    assert len(open_images(out)) == 4

    assert "exists; replace it with overwrite=True" in message(Pack(str(damaged), out).run)
    Pack(str(damaged), out, side=6, overwrite=True).run()
    assert open_images(out).side == 6
    assert "must end in .safetensors" in message(Pack(str(damaged), tmp_path / "x.npz").run)


def test_command_that_is_interrupted(tmp_path, capsys, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    class_folders(tmp_path / "some", ["a"])
    monkeypatch.setattr(ImageFiles, "fetch", interrupt)
    with pytest.raises(SystemExit) as stopped:
        Pack(str(tmp_path / "some"), tmp_path / "packed.safetensors").run()
    assert stopped.value.code == 130
    assert "was not written" in "".join(capsys.readouterr().err.split("\n")).replace("  ", " ")
    assert os.listdir(tmp_path) == ["some"]
