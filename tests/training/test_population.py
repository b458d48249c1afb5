"""Lanes: filled up, spread over devices and hosts, and the same numbers whichever way."""

import json
import os
import socket
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from helpers.small import make_metaset
from metaleo.data import save_data
from metaleo.training.population import gather_to_host, map_replicas, replicas_for, shard_replicas


def test_filling_replicas_are_not_gathered():
    tree = {"a": jnp.arange(3.0), "b": np.arange(6).reshape(3, 2)}
    replicas = shard_replicas(tree, 5)
    assert replicas["a"].tolist() == [0, 1, 2, 2, 2]
    back = gather_to_host(replicas, 3)
    np.testing.assert_array_equal(back["a"], tree["a"])
    np.testing.assert_array_equal(back["b"], tree["b"])
    assert replicas_for(3) == 3


@pytest.mark.parametrize("replicas", [1, 3])
def test_side_by_side_is_each_alone(replicas):
    add = map_replicas(lambda x, y: {"sum": x + y}, replicas, (0, None))
    np.testing.assert_array_equal(add(jnp.arange(float(replicas)), jnp.float32(2))["sum"], np.arange(replicas) + 2)


TRAIN = (
    "train", "--data", "features.npz", "--learner", "meta-sgd", "--way", "3", "--query", "4", "--steps", "20",
    "--validate-every", "5", "--validation-tasks", "20", "--seeds", "3", "--json",
)  # fmt: skip
SEARCH = (
    "search", "--data", "features.npz", "--learner", "meta-sgd", "--way", "3", "--trials", "4", "--replicas", "2",
    "--steps", "8", "--halvings", "1", "--validate-every", "2", "--validation-tasks", "20", "--json",
)  # fmt: skip


def start(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "metaleo.cli", *arguments],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def output(*processes):
    """What the first process prints, once all have ended well."""
    said = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, said, strict=True):
        assert process.returncode == 0, errors
    assert all(not out for out, _ in said[1:])
    return json.loads(said[0][0])


def two_devices():
    return {"JAX_NUM_CPU_DEVICES": "2"}


def two_hosts(*arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    common = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    return [start(*arguments, **common, JAX_PROCESS_ID=str(i)) for i in range(2)]


@pytest.mark.slow
def test_two_devices_and_two_hosts_train_as_one_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_data(make_metaset(images=24), "features.npz")
    alone = output(start(*TRAIN, "--out", "alone"))["seeds"]
    devices = output(start(*TRAIN, "--out", "devices", **two_devices()))["seeds"]
    hosts = output(*two_hosts(*TRAIN, "--out", "hosts"))["seeds"]
    for other in (devices, hosts):
        for one, two in zip(alone, other, strict=True):
            assert one["seed"] == two["seed"]
            assert one["step"] == two["step"] == 20
            assert one["validation_accuracy"] == pytest.approx(two["validation_accuracy"], abs=2e-3)
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("alone", "devices", "hosts")]
    assert len(lines[0]) == len(lines[1]) == len(lines[2]) == 3 * 4
    for one, two, three in zip(*(map(json.loads, part) for part in lines), strict=True):
        assert one["query_loss"] == pytest.approx(two["query_loss"], rel=1e-4)
        assert two == three  # the same program on each device

    # a run that was begun on two devices goes on with one, if that is settled
    more = output(start("train", "--resume", "--out", "devices", "--steps", "25", "--json"))["seeds"]
    assert [seed["step"] for seed in more] == [25, 25, 25]


@pytest.mark.slow
def test_a_run_goes_on_with_the_number_of_devices_it_was_begun_with(tmp_path, monkeypatch):
    """One that no machine would choose, and yet the same bits as without a stop."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    save_data(make_metaset(images=24), "features.npz")
    output(start(*TRAIN, "--seeds", "1", "--out", "whole", JAX_NUM_CPU_DEVICES="3"))
    output(start(*TRAIN, "--seeds", "1", "--out", "cut", "--steps", "10", JAX_NUM_CPU_DEVICES="3"))
    resume = [sys.executable, "-m", "metaleo.cli", "train", "--resume", "--out", "cut", "--steps", "20"]
    done = subprocess.run(resume, check=True, capture_output=True, text=True)
    assert "was begun with" not in done.stderr
    states = [(tmp_path / name / "state.safetensors").read_bytes() for name in ("whole", "cut")]
    assert states[0] == states[1]


@pytest.mark.slow
def test_two_hosts_search_as_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_data(make_metaset(images=24), "features.npz")
    alone = output(start(*SEARCH, "--out", "alone"))
    hosts = output(*two_hosts(*SEARCH, "--out", "hosts"))
    for one, two in zip(alone, hosts, strict=True):
        assert (one["trial"], one["draw"]) == (two["trial"], two["draw"])
        assert one["accuracy"] == pytest.approx(two["accuracy"], abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("learner", ["leo", "meta-sgd"])
def test_a_single_run_is_shared_out_among_devices(learner, tmp_path, monkeypatch):
    """Training, validation and test: the same tasks and the same noise, whoever computes them."""
    monkeypatch.chdir(tmp_path)
    save_data(make_metaset(images=24), "features.npz")
    train = (
        "train", "--data", "features.npz", "--learner", learner, "--way", "3", "--query", "4", "--steps", "12",
        "--validate-every", "6", "--validation-tasks", "20", "--json",
    )  # fmt: skip
    for devices in ("1", "2"):
        output(start(*train, "--out", devices, JAX_NUM_CPU_DEVICES=devices))
    one, two = ((tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("1", "2"))
    for line, other in zip(map(json.loads, one), map(json.loads, two), strict=True):
        assert line == pytest.approx(other, rel=2e-3, abs=1e-5)
    evaluate = "evaluate", "1", "--data", "features.npz", "--tasks", "40", "--json"
    alone, shared = (output(start(*evaluate, JAX_NUM_CPU_DEVICES=devices)) for devices in ("1", "2"))
    for measure in ("accuracy", "nll"):
        assert alone["models"][0][measure] == pytest.approx(shared["models"][0][measure], abs=1e-4)


def test_cores_become_devices_unless_they_are_settled(tmp_path):
    """In processes of their own: devices are settled once."""
    count = "from metaleo._jax.devices import use_all_cores; use_all_cores(); import jax; print(jax.device_count())"

    def devices(**environment):
        settled = {"JAX_NUM_CPU_DEVICES", "JAX_COORDINATOR_ADDRESS"}
        clean = {name: value for name, value in os.environ.items() if name not in settled}
        return int(subprocess.check_output([sys.executable, "-c", count], env=clean | environment, cwd=tmp_path))

    assert devices() == min(len(os.sched_getaffinity(0)), 4)
    assert devices(JAX_NUM_CPU_DEVICES="3") == 3
    assert devices(XLA_FLAGS="--xla_force_host_platform_device_count=5") == 5
