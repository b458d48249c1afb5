"""The authors' embedding pickles are read, and nothing in a pickle is ever run.

Pickles are written here opcode by opcode where no pickler of today would write them.
"""

import pickle
import struct
import subprocess
import sys

import numpy as np
import pytest

from helpers.small import message
from metaleo.data import load_data
from metaleo.data.safe_unpickling import read_file

# A small assembler of pickles.


def py2_string(text: bytes) -> bytes:
    """BINSTRING: Python 2 wrote text and raw array content alike with it."""
    return b"T" + struct.pack("<i", len(text)) + text


def string(text: str) -> bytes:
    """BINUNICODE: a Python 3 string."""
    return b"X" + struct.pack("<i", len(text.encode())) + text.encode()


def integer(number: int) -> bytes:
    return b"J" + struct.pack("<i", number)


def sequence(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def mapping(**items: bytes) -> bytes:
    return b"}(" + b"".join(py2_string(name.encode()) + value for name, value in items.items()) + b"u"


def call(module: str, name: str, *arguments: bytes) -> bytes:
    return f"c{module}\n{name}\n".encode() + sequence(*arguments) + b"R"


def with_state(thing: bytes, *state: bytes) -> bytes:
    return thing + sequence(*state) + b"b"


def dtype(code: bytes) -> bytes:
    return call("numpy", "dtype", py2_string(code), integer(0), integer(1))


def array(kind: bytes, content: bytes, *shape: int) -> bytes:
    """An array as Python 2 wrote it."""
    blank = call("numpy.core.multiarray", "_reconstruct", b"cnumpy\nndarray\n", sequence(integer(0)), py2_string(b"b"))
    return with_state(blank, integer(1), sequence(*map(integer, shape)), kind, b"\x89", py2_string(content))


def float32_array(values: np.ndarray) -> bytes:
    native = with_state(
        dtype(b"f4"), integer(3), py2_string(b"<"), b"N", b"N", b"N", integer(-1), integer(-1), integer(0)
    )
    return array(native, values.astype("<f4").tobytes(), *values.shape)


def pickled(thing: bytes) -> bytes:
    return b"\x80\x02" + thing + b"."


# The authors' layout.

CLASSES = {"train": ("n01", "n02"), "val": ("n03",), "test": ("n04", "n05")}


def content(split: str) -> dict:
    """Three images of each class, the classes in turn; every embedding tells its split, class and image."""
    classes = CLASSES[split] * 3
    keys = [f"{1000 + i}-{name}-{name}_{i:08d}" for i, name in enumerate(classes)]
    embeddings = np.array([[list(CLASSES).index(split), int(name[1:]), i] for i, name in enumerate(classes)])
    return {
        "keys": keys,
        "labels": [int(name[1:]) for name in classes],
        "embeddings": embeddings.astype(np.float32),
    }


def write_folder(folder, dump):
    for split in CLASSES:
        (folder / f"{split}_embeddings.pkl").write_bytes(dump(content(split)))
    return folder


def assert_authors_layout(metaset):
    assert metaset.class_names == ("n01", "n02", "n03", "n04", "n05")
    assert metaset.splits == ("train", "train", "val", "test", "test")
    assert metaset.counts.tolist() == [3] * 5
    splits, classes, images = metaset.read(metaset.rows).reshape(5, 3, 3).transpose(2, 0, 1)
    np.testing.assert_array_equal(splits, np.repeat([[0], [0], [1], [2], [2]], 3, axis=1))
    np.testing.assert_array_equal(classes, np.repeat([[1], [2], [3], [4], [5]], 3, axis=1))
    np.testing.assert_array_equal(images, [[0, 2, 4], [1, 3, 5], [0, 1, 2], [0, 2, 4], [1, 3, 5]])


def test_pickles_of_python_2(tmp_path):
    def dump(fields):
        return pickled(
            mapping(
                keys=b"](" + b"".join(py2_string(key.encode()) for key in fields["keys"]) + b"e",
                labels=b"](" + b"".join(map(integer, fields["labels"])) + b"e",
                embeddings=float32_array(fields["embeddings"]),
            )
        )

    assert_authors_layout(load_data(write_folder(tmp_path, dump)))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("key_type", [str, str.encode, np.str_, np.bytes_], ids=["str", "bytes", "str_", "bytes_"])
def test_pickles_of_python_3(tmp_path, protocol, key_type):
    def dump(fields):
        keys = [key_type(key) for key in fields["keys"]]
        keys = np.array(keys) if isinstance(keys[0], np.generic) else keys
        return pickle.dumps(fields | {"keys": keys}, protocol)

    assert_authors_layout(load_data(write_folder(tmp_path, dump)))


@pytest.mark.parametrize("kind", [np.float64, np.float16, ">f4"])
def test_other_numbers_and_orders(tmp_path, kind):
    def dump(fields):
        return pickle.dumps(fields | {"embeddings": np.asfortranarray(fields["embeddings"]).astype(kind)}, 2)

    assert_authors_layout(load_data(write_folder(tmp_path, dump)))


def test_train_and_val_together(tmp_path):
    metaset = load_data(write_folder(tmp_path, pickle_as_authors)).subset("train+val")
    assert metaset.class_names == ("n01", "n02", "n03")
    assert metaset.splits == ("train", "train", "val")
    np.testing.assert_array_equal(metaset.read(metaset.rows)[:, 1], np.repeat([1, 2, 3], 3))


def pickle_as_authors(fields) -> bytes:
    return pickle.dumps(fields, 2)


def test_missing_split(tmp_path):
    write_folder(tmp_path, pickle_as_authors)
    (tmp_path / "val_embeddings.pkl").unlink()
    assert "has no val_embeddings.pkl" in message(lambda: load_data(tmp_path))


def test_class_in_two_files(tmp_path):
    write_folder(tmp_path, pickle_as_authors)
    (tmp_path / "val_embeddings.pkl").write_bytes(pickle_as_authors(content("train")))
    assert "class n01 is in two splits, train and val" in message(lambda: load_data(tmp_path))


def test_files_of_different_sizes(tmp_path):
    write_folder(tmp_path, pickle_as_authors)
    wide = content("val") | {"embeddings": np.ones((3, 7), np.float32)}
    (tmp_path / "val_embeddings.pkl").write_bytes(pickle_as_authors(wide))
    assert "different sizes" in message(lambda: load_data(tmp_path))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"keys": ["1-a-a_1"]},
        {"keys": ["no class in it"], "embeddings": np.ones((1, 2))},
        {"keys": ["1-a-a_1"], "embeddings": np.ones((2, 2))},
        {"keys": ["1-a-a_1"], "embeddings": np.ones(1)},
        {"keys": ["1-a-a_1"], "embeddings": "none"},
        {"keys": 1, "embeddings": np.ones((1, 2))},
    ],
    ids=["nothing", "no embeddings", "odd key", "too few keys", "one axis", "text", "number"],
)
def test_other_content(tmp_path, fields):
    path = tmp_path / "train_embeddings.pkl"
    path.write_bytes(pickle_as_authors(fields))
    assert str(path) in message(lambda: read_file(path))


@pytest.mark.parametrize("share", [0, 0.3, 0.9])
def test_truncated_pickle(tmp_path, share):
    path = tmp_path / "train_embeddings.pkl"
    whole = pickle_as_authors(content("train"))
    path.write_bytes(whole[: int(share * len(whole))])
    assert str(path) in message(lambda: read_file(path))


# Pickles that would do harm: each makes a file when an ordinary unpickler reads it.


def attacks(target) -> dict[str, bytes]:
    python = f"open({str(target)!r}, 'w').close()"
    shell = string(f"touch {target}")
    return {
        "os.system": call("os", "system", shell),
        "posix.system": call("posix", "system", shell),
        "eval": call("builtins", "eval", string(python)),
        "exec": call("builtins", "exec", string(python)),
        "python 2 eval": call("__builtin__", "eval", string(python)),
        "subprocess": call("subprocess", "call", b"](" + string("touch") + string(str(target)) + b"e"),
        "numpy.testing": call("numpy.testing._private.utils", "runstring", string(python), b"}"),
        "numpy.f2py": call("numpy.f2py.crackfortran", "myeval", string(f"{python} or 1")),
        "INST opcode": b"(" + shell + b"ios\nsystem\n",
        "OBJ opcode": b"(cbuiltins\nexec\n" + string(python) + b"o",
        "STACK_GLOBAL opcode": string("os") + string("system") + b"\x93" + sequence(shell) + b"R",
    }


@pytest.mark.parametrize("name", attacks("target"))
@pytest.mark.parametrize("place", ["whole", "keys", "embeddings"])
def test_nothing_is_run(tmp_path, name, place):
    target, path = tmp_path / "harm", tmp_path / "train_embeddings.pkl"
    attack = attacks(target)[name]
    good = {"keys": b"](" + py2_string(b"1-a-a_1") + b"e", "embeddings": float32_array(np.ones((1, 2)))}
    path.write_bytes(pickled(attack if place == "whole" else mapping(**good | {place: attack})))

    assert "which no array needs" in message(lambda: read_file(path))
    assert not target.exists()


@pytest.mark.parametrize("name", attacks("target"))
def test_the_attacks_are_real(tmp_path, name):
    """Else the test above would show nothing."""
    target = tmp_path / "harm"
    pickle.loads(pickled(attacks(target)[name]))
    assert target.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("numpy", "ndarray.__class__"),
        ("numpy", "load"),
        ("numpy", "matrix"),
        ("numpy.core.multiarray", "_reconstruct.__globals__"),
        ("numpy._core.multiarray", "fromfile"),
        ("numpy.core.multiarray.numpy", "ndarray"),
        ("_codecs", "lookup"),
        ("codecs", "encode"),
    ],
)
def test_names_near_the_admitted_ones(tmp_path, module, name):
    path = tmp_path / "train_embeddings.pkl"
    path.write_bytes(b"\x80\x04" + string(module) + string(name) + b"\x93.")
    assert f"it refers to {module}.{name}" in message(lambda: read_file(path))


class Harm:
    """Runs a command when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return pickle.loads, (pickled(attacks(self.target)["eval"]),)


@pytest.mark.parametrize("protocol", range(6))
def test_array_of_objects(tmp_path, protocol):
    target, path = tmp_path / "harm", tmp_path / "train_embeddings.pkl"
    objects = np.array([[1.0, Harm(target)]], object)
    path.write_bytes(pickle.dumps({"keys": ["1-a-a_1"], "embeddings": objects}, protocol))
    assert "not a pickle of embeddings that can be trusted" in message(lambda: read_file(path))
    assert not target.exists()


def test_array_of_harmless_objects(tmp_path):
    path = tmp_path / "train_embeddings.pkl"
    fields = {"keys": ["1-a-a_1"], "embeddings": np.array([[1.0, 2.0]], object)}
    path.write_bytes(pickle_as_authors(fields))
    assert "array of Python objects" in message(lambda: read_file(path))


def test_ndarray_is_not_called(tmp_path):
    """ndarray(shape, dtype) makes arrays of objects and of whatever the memory held."""
    path = tmp_path / "train_embeddings.pkl"
    embeddings = call("numpy", "ndarray", sequence(integer(1), integer(2)), string("O"))
    path.write_bytes(pickled(mapping(keys=b"](" + py2_string(b"1-a-a_1") + b"e", embeddings=embeddings)))
    assert "not a pickle of embeddings that can be trusted" in message(lambda: read_file(path))


def test_fields_outside_of_the_array(tmp_path):
    """A dtype's state can place a field far beyond the array; in a process of its own, as it may crash."""
    fields = b"}(" + string("a") + sequence(dtype(b"f8"), integer(2**30)) + b"u"
    outside = with_state(
        dtype(b"V8"),
        integer(3),
        string("|"),
        b"N",
        sequence(string("a")),
        fields,
        integer(8),
        integer(1),
        integer(0),
    )
    path = tmp_path / "train_embeddings.pkl"
    keys = b"](" + py2_string(b"1-a-a_1") + py2_string(b"2-b-b_1") + b"e"
    path.write_bytes(pickled(mapping(keys=keys, embeddings=array(outside, b"x" * 16, 2))))
    program = f"import pathlib, metaleo.data.safe_unpickling as p; p.read_file(pathlib.Path({str(path)!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "BadInput" in done.stderr, f"it ended with {done.returncode}"


# Pickles that would take all memory or all time; in a process of their own, under a limit of both.

SHARED = b"]q\x000" + b"](h\x00h\x00eq\x000" * 60 + b"h\x00"  # 2 ** 60 lists, of 60
TUPLES = b"K\x00q\x000" + b"".join(b"h\x00h\x00\x86q\x000" for _ in range(60)) + b"h\x00"
NEST = b"]" * 200_000 + b"a" * 199_999
TEXT = py2_string(b"x" * 10_000_000) + b"q\x010"
ENCODED = b"](" + (b"c_codecs\nencode\nh\x01U\x06latin1\x86R") * 1000 + b"e"
ARRAY = array(dtype(b"i1"), bytes(100_000), 100_000) + b"q\x00"
CLASS = py2_string(b"1-" + b"x" * 500_000 + b"-") + b"q\x010"
ROWS = array(dtype(b"i1"), bytes(2000), 2000, 1)
BOMBS = {
    "an index of the memo": b"Nr\xff\xff\xff\x7f",
    "a bytearray": b"\x96" + struct.pack("<Q", 2**35),
    "shared lists as keys": mapping(keys=SHARED, embeddings=b"N"),
    "shared lists as embeddings": mapping(keys=b"]", embeddings=SHARED),
    "tuples as a key": b"}" + TUPLES + b"Ns",
    "a set of tuples": b"\x8f(" + TUPLES + b"\x90",
    "nested lists": mapping(keys=NEST, embeddings=b"N"),
    "a text encoded again and again": TEXT + mapping(keys=ENCODED, embeddings=b"N"),
    "an array repeated": mapping(keys=b"]", embeddings=ARRAY + b"](" + b"h\x00" * 10_000 + b"e"),
    "a class repeated": CLASS + mapping(keys=b"](" + b"h\x01" * 2000 + b"e", embeddings=ROWS),
    "a long number": b"\x8b" + struct.pack("<i", 3_000_000) + b"\x7f" * 3_000_000,
}


@pytest.mark.parametrize("reader", ["metaleo.data.safe_unpickling.read_file", "metaleo.features.pickled.read_pickle"])
def test_bombs(tmp_path, reader):
    """All in one process, which has a gigabyte and a minute."""
    for number, content in enumerate(BOMBS.values()):
        (tmp_path / f"{number:02}.pkl").write_bytes(pickled(content))
    module, _, name = reader.rpartition(".")
    program = f"""
import pathlib, resource, {module}
size = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**30,) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
for path in sorted(pathlib.Path({str(tmp_path)!r}).iterdir()):
    try:
        {module}.{name}(path)
        print(path.stem, "harmless")
    except {module}.BadInput as error:
        print(path.stem, "refused" if not isinstance(error.__cause__, MemoryError) else "too large", error)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("most", peak)
"""
    before = "import resource, metaleo.features.pickled; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    base = int(subprocess.run([sys.executable, "-c", before], capture_output=True, text=True, check=True).stdout)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    *lines, most = done.stdout.splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(len(BOMBS))), done
    assert all(line.split()[1] == "refused" for line in lines[1:]), done
    assert lines[0].split()[1] in ("refused", "harmless"), done  # None, which images may be
    assert int(most.split()[1]) < base + 200_000  # kilobytes


def test_stand_ins_cannot_be_changed(tmp_path):
    path = tmp_path / "train_embeddings.pkl"
    for target in (b"c_codecs\nencode\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"cnumpy\ndtype\n"):
        changes = b"}" + string("__defaults__") + sequence(integer(1)) + b"s"
        path.write_bytes(pickled(target + b"N" + changes + b"\x86b"))
        assert "it changes what is no array" in message(lambda: read_file(path))


def test_one_line_of_a_name_of_two(tmp_path):
    path = tmp_path / "train_embeddings.pkl"
    path.write_bytes(b"\x80\x04" + string("os\nx") + string("a\n" * 1000) + b"\x93.")
    assert len(message(lambda: read_file(path))) < 400
