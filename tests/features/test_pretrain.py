"""Pre-training: it learns, it can be stopped and resumed without a trace, and images may stay on the disk."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from helpers.images import CONV4, make_images
from metaleo._io.files import read_header, save_tree
from metaleo._io.run_log import read_metrics
from metaleo.cli import main
from metaleo.errors import BadInput, Interrupted
from metaleo.features import pretrain_run
from metaleo.features.backbone_files import load_backbone
from metaleo.features.pretrain import Batches, Pretraining, ahead, dials, split_training
from metaleo.features.pretrain_run import PretrainRun
from metaleo.features.recipes import RECIPES, PretrainConfig, Recipe, find_recipe

QUICK = Recipe("for tests", batch=16, steps=12, keep_prob=0.8, mixup=1.0, rotation=1.0, smoothing=0.1, average=0.9)


def make_run(folder, images=None, recipe=QUICK, reports=2, **changes):
    config = PretrainConfig("made up", CONV4, recipe, reports=reports, **changes)
    return PretrainRun(config, folder, make_images() if images is None else images)


def train(run):
    return run.train(lambda record: None, lambda step, rate: None)


@pytest.mark.parametrize(
    "since", [{"steps": "x"}, {"steps": True}, {"sums": []}, {"sums": {"loss": None}}, {"sums": {"loss": 10**400}}]
)
def test_a_damaged_state_is_refused_in_one_line(left_alone, tmp_path, since):
    save_tree(tmp_path / "state.safetensors", left_alone[1], {"kind": "pretraining", "since_report": since})
    with pytest.raises(BadInput, match=r"is a damaged file .since_report should be a number of steps and sums"):
        make_run(tmp_path).load()


def test_a_run_that_goes_on_elsewhere_says_so(left_alone, tmp_path):
    header = read_header(left_alone[0].folder / "state.safetensors")
    assert header["devices"] == jax.device_count()
    save_tree(tmp_path / "state.safetensors", left_alone[1], header | {"backend": "tpu"})
    with pytest.warns(UserWarning, match="begun with backend tpu and goes on with backend cpu: rounding differs"):
        make_run(tmp_path).load()


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory):
    """The end of a run that nobody disturbed."""
    run = make_run(tmp_path_factory.mktemp("left-alone"))
    return run, train(run)


def assert_same(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_resumed_run_ends_with_the_same_weights(left_alone, tmp_path):
    """Stopped after its first report, as by a kill: what it had reported is there, and the rest comes out the same."""

    class Killed(Exception):
        pass

    def kill(record):
        raise Killed

    with pytest.raises(Killed):
        make_run(tmp_path).train(kill, lambda step, rate: None)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [6]
    assert_same(train(make_run(tmp_path)), left_alone[1])
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [6, 12]
    ours, theirs = (read_metrics(place / "metrics.jsonl")[-1] for place in (tmp_path, left_alone[0].folder))
    assert ours | {"images_per_second": 0} == theirs | {"images_per_second": 0}
    networks = [load_backbone(place).trained for place in (tmp_path, left_alone[0].folder)]
    assert_same(*networks)


def test_a_signal_saves_between_two_reports(left_alone, tmp_path, monkeypatch):
    monkeypatch.setattr("metaleo.features.pretrain_run.LOOK", 4)
    run = make_run(tmp_path)

    def interrupt(step, rate):
        import signal

        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        run.train(lambda record: None, interrupt)
    assert int(run.load()[0].step) == 4
    assert_same(train(make_run(tmp_path)), left_alone[1])
    ours, theirs = (read_metrics(place / "metrics.jsonl") for place in (tmp_path, left_alone[0].folder))
    assert [record | {"images_per_second": 0} for record in ours] == [
        record | {"images_per_second": 0} for record in theirs
    ]


def test_a_kill_between_the_files_of_the_last_report_loses_nothing(left_alone, tmp_path, monkeypatch):
    """State and network are two files; there are two reports, and so four writes."""

    class Killed(Exception):
        pass

    writes = []

    def before(write):
        def counted(*given):
            writes.append(write)
            if len(writes) == 4:
                raise Killed
            write(*given)

        return counted

    with monkeypatch.context() as patch:
        for name in ("save_tree", "save_backbone"):
            patch.setattr(pretrain_run, name, before(getattr(pretrain_run, name)))
        with pytest.raises(Killed):
            train(make_run(tmp_path))
    train(make_run(tmp_path))
    assert_same(*(load_backbone(place).trained for place in (tmp_path, left_alone[0].folder)))


def test_streamed_images_give_the_same_weights(left_alone, tmp_path, monkeypatch):
    monkeypatch.setattr("metaleo.features.pretrain_run.memory_bytes", lambda: 0)
    run = make_run(tmp_path)
    assert run.batches().resident is None
    assert_same(train(run), left_alone[1])


@pytest.mark.slow
def test_it_learns_colours(tmp_path):
    recipe = Recipe("for tests", batch=16, steps=60, learning_rate=0.05, drops=(), keep_prob=1.0, colours=0.0)
    run = make_run(tmp_path, recipe=recipe, hold_out=0.25)
    train(run)
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert last["held_out_accuracy"] > 0.9
    assert last["accuracy"] > 0.8
    assert last["learning_rate"] == 0


def test_a_second_recipe_of_the_same_kind_compiles_nothing(left_alone, tmp_path, count_compilations):
    other = dataclasses.replace(QUICK, learning_rate=0.05, smoothing=0.2, mixup=0.5, l2=1e-3, least_area=0.5, steps=6)
    run = make_run(tmp_path, recipe=other)
    state = run.start()
    batch = next(iter(run.batches().start(0, 1)))
    with count_compilations() as compilations:
        run.work.step(state, *batch, run.key, dials(other, 0))
    assert compilations == []


def test_the_papers_schedules():
    paper = RECIPES["paper"]
    rates = {step: float(dials(paper, step).learning_rate) for step in (0, 2999, 3000, 5000, 7000, 8000, 9000, 9999)}
    factors = [rate / 0.1 for rate in rates.values()]
    np.testing.assert_allclose(factors, [1, 1, 0.2, 0.2**2, 0.2**3, 0.2**4, 0.2**5, 0.2**5], rtol=1e-5)
    assert (paper.batch, paper.steps, paper.l2, paper.keep_prob) == (1024, 10_000, 5e-4, 0.5)
    tiered = RECIPES["paper-tiered"]
    drops = [round(share * tiered.steps) for share in tiered.drops]
    assert (drops, tiered.steps) == ([20_000, 25_000, 30_000, 35_000, 40_000], 50_000)


def test_a_cosine_rises_and_falls():
    recipe = Recipe(steps=1000, learning_rate=0.1, drops=())
    rates = [float(dials(recipe, step).learning_rate) for step in range(1001)]
    assert rates[0] == 0
    assert math.isclose(max(rates), 0.1, rel_tol=1e-3)
    assert rates.index(max(rates)) == 50
    assert rates[1000] < 1e-8


def test_an_epoch_sees_every_image_once():
    images = make_images()
    split = split_training(images, 0.0, 0)
    batches = Batches(images, split.rows, split.labels, 16, 0, on_device=False)
    chosen = [each for each, _ in zip(batches.chosen(0), range(2 * batches.per_epoch), strict=False)]
    assert batches.per_epoch == 3
    epochs = [np.concatenate(chosen[:3]), np.concatenate(chosen[3:])]
    assert all(sorted(epoch) == list(range(48)) for epoch in epochs)
    assert list(epochs[0]) != list(epochs[1])
    np.testing.assert_array_equal(next(batches.chosen(4)), chosen[4])  # from any step on


def test_batches_carry_their_own_labels():
    images = make_images()
    split = split_training(images, 0.2, 0)
    for on_device in (True, False):
        batches = Batches(images, split.rows, split.labels, 16, 0, on_device)
        pixels, labels = next(iter(batches.start(0, 1)))
        rows = split.rows[next(batches.chosen(0))]
        np.testing.assert_array_equal(pixels, images.pixels[rows])
        np.testing.assert_array_equal(labels, images.labels[rows])


def test_what_is_held_out():
    images = make_images(each=20)
    split = split_training(images, 0.1, 0)
    assert list(np.bincount(split.labels[split.held_out])) == [2, 2, 2, 2]
    assert set(images.labels[split.rows]) == {0, 1, 2, 3}
    again, other = (split_training(images, 0.1, seed).held_out for seed in (0, 1))
    np.testing.assert_array_equal(again, split.held_out)
    assert not np.array_equal(other, split.held_out)
    assert not split_training(images, 0.0, 0).held_out.any()


def test_what_the_reader_says_reaches_the_trainer():
    def items():
        yield 1
        raise BadInput("the disk is gone")

    stream = ahead(items())
    assert next(stream) == 1
    with pytest.raises(BadInput, match="the disk is gone"):
        next(stream)
    assert list(ahead(iter(range(7)))) == list(range(7))


@pytest.mark.slow
def test_turns_are_labelled_as_they_are_turned():
    work = Pretraining(CONV4, 4, half=False, mirrors=False, turns=True)
    recipe = Recipe(least_area=1.0, colours=0.0, rotation=1.0)
    ramp = np.broadcast_to(np.arange(16, dtype=np.uint8)[None, None, :, None] * 15, (64, 16, 16, 3))
    values, quarters = work.augmented(jax.random.key(0), jnp.asarray(ramp), jax.tree.map(jnp.asarray, dials(recipe, 0)))
    assert set(np.asarray(quarters)) == {0, 1, 2, 3}
    rises = np.asarray(values[:, 8, 12, 0] - values[:, 8, 3, 0])  # left to right
    assert (rises[np.asarray(quarters) == 0] > 0).all()
    assert (rises[np.asarray(quarters) == 2] < 0).all()


def test_l2_pulls_weights_and_leaves_norms_alone():
    work = Pretraining(CONV4, 4, half=False)
    state = work.start(jax.random.key(0))
    before = jax.tree.map(np.array, state.network.classifier)
    images = make_images(classes=(4, 0, 0))
    settings = [dials(Recipe(l2=l2, drops=(), steps=10), 5) for l2 in (0.0, 0.5)]
    ends = [
        work.step(work.start(jax.random.key(0)), images.pixels[:16], images.labels[:16], jax.random.key(1), each)[0]
        for each in settings
    ]
    plain, decayed = (end.network.classifier for end in ends)
    rate = float(settings[0].learning_rate)
    np.testing.assert_allclose(
        decayed.backbone.stages[0].convolution.weight - plain.backbone.stages[0].convolution.weight,
        -rate
        * 1.9
        * 0.5
        * before.backbone.stages[0].convolution.weight,  # Nesterov's first step is (1 + 0.9) times the gradient
        rtol=1e-3,
        atol=1e-6,
    )
    np.testing.assert_array_equal(decayed.backbone.stages[0].norm.scale, plain.backbone.stages[0].norm.scale)


def test_unknown_names_are_listed():
    with pytest.raises(BadInput, match="unknown recipe 'good'; known are paper, "):
        find_recipe("good")


def test_a_loss_that_is_not_a_number_says_so(tmp_path):
    recipe = dataclasses.replace(QUICK, learning_rate=1e30)
    with pytest.raises(BadInput, match="the loss is NaN or Inf by step"):
        train(make_run(tmp_path, recipe=recipe))


# The commands


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Class folders under train/ and val/, as a person has them, with a file that is no image."""
    folder = tmp_path_factory.mktemp("photos")
    images = make_images(classes=(4, 5, 0), each=10)
    for row, label in enumerate(images.labels):
        place = folder / images.splits[label] / images.class_names[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images.pixels[row]).save(place / f"{row:03}.png")
    (folder / "train" / "class0" / "broken.jpg").write_bytes(b"nothing to see")
    return folder


SETTINGS = (
    "--backbone",
    "conv-4",
    "--width",
    "4",
    "--side",
    "16",
    "--batch",
    "16",
    "--reports",
    "2",
    "--hold-out",
    "0.1",
)


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    main(["pretrain", "--images", str(photos), *SETTINGS, "--steps", "8", "--out", str(folder)])
    return folder


def test_pretrain_tells_what_it_did(photos, trained, capsys):
    records = read_metrics(trained / "metrics.jsonl")
    assert [record["step"] for record in records] == [4, 8]
    for name in ("loss", "accuracy", "held_out_accuracy", "centroid_1shot", "centroid_5shot", "images_per_second"):
        assert records[-1][name] is not None
    main(["pretrain", "--resume", "--out", str(trained), "--json"])  # it is done: nothing more happens
    output = capsys.readouterr()
    assert json.loads(output.out)["last"]["step"] == 8
    assert "metaleo embed" in output.err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--images", "nowhere"], "nowhere"),
        ([], "--images is needed"),
        (["--images", "PHOTOS", "--recipe", "good"], "unknown recipe 'good'; known are paper"),
        (["--images", "PHOTOS", "--backbone", "vgg"], "unknown backbone 'vgg'; known are wrn-28-10"),
        (
            ["--images", "PHOTOS", "--backbone", "wrn-16-4", "--depth", "12"],
            "--depth 12 of a wide residual network must be 6n + 4",
        ),
        (["--images", "PHOTOS", "--steps", "0"], "--steps 0 must be at least 1"),
        (["--images", "PHOTOS", "--steps", "5", "--epochs", "5"], "--steps and --epochs say the same"),
        (["--images", "PHOTOS", "--keep-prob", "0"], "--keep-prob 0.0 must be from 0.01 to 1"),
        (["--images", "PHOTOS", "--hold-out", "1"], "--hold-out 1.0 must be from 0 to 0.9"),
        (["--images", "PHOTOS", "--out", "TRAINED"], "continue it with --resume or replace it with --overwrite"),
        (["--resume"], "--resume needs --out"),
        (["--resume", "--out", "nowhere"], "is not the configuration of a pre-training run"),
    ],
)
def test_bad_input_is_one_line(arguments, line, photos, trained, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {"PHOTOS": str(photos), "TRAINED": str(trained)}
    with pytest.raises(SystemExit) as stopped:
        main(["pretrain", *(places.get(each, each) for each in arguments)])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert line in error
    assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_class_with_one_image_is_named(tmp_path, capsys):
    for name, count in (("cat", 3), ("dog", 1)):
        (tmp_path / name).mkdir()
        for index in range(count):
            Image.new("RGB", (20, 20)).save(tmp_path / name / f"{index}.png")
    with pytest.raises(SystemExit):
        main(["pretrain", "--images", str(tmp_path), *SETTINGS, "--out", str(tmp_path / "run")])
    assert "dog" in capsys.readouterr().err
