"""Artifacts as files: what was saved comes back; what is not sound is refused before anything of it is used."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dlinfer
from dlinfer.errors import (
    ArtifactCorruptError,
    ArtifactError,
    ArtifactInputError,
    ArtifactKeyError,
    ArtifactNotFoundError,
    ArtifactStorageError,
    ArtifactVersionError,
    DlinferError,
)
from dlinfer.runtime.artifact.sealing import new_key
from tests.runtime.artifact.artifact_files import (
    ROWS,
    Head,
    Keeps,
    altered,
    compiled_head,
    old_archive,
    rows,
    same,
    saved,
    unpacked,
    use_stub,
    wanted,
)


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    return use_stub(monkeypatch)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        use_stub(patch)
        return saved(compiled_head()[1], tmp_path_factory.mktemp("good") / "a.dlinfer").read_bytes()


# --- what was saved comes back


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_one_file_runs_all_row_counts(tmp_path, count):
    head, artifact = compiled_head()
    session = dlinfer.load(saved(artifact, tmp_path / "a.dlinfer"))
    found = session.run({"x": rows(count)})
    same(found, head(rows(count)))


def test_a_path_a_string_and_every_kind_of_bytes_open_it(tmp_path, good):
    """From a file, from bytes."""
    path = tmp_path / "a.dlinfer"
    path.write_bytes(good)
    wanted = Head().eval()(rows(3))
    for origin in (path, str(path), good, bytearray(good), memoryview(good)):
        with dlinfer.load(origin) as session:
            same(session.run({"x": rows(3)}), wanted)


def test_equal_artifacts_make_equal_files(tmp_path, good):
    assert saved(compiled_head()[1], tmp_path / "b.dlinfer").read_bytes() == good


def test_weights_of_a_file_lie_in_its_mapping(tmp_path):
    """No second copy: what a session holds is the file's pages."""
    path = saved(compiled_head()[1], tmp_path / "a.dlinfer")
    session = dlinfer.load(path)
    session.setup()
    [[running]] = session._running.values()
    maps = [
        line.split()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.rstrip().endswith(str(path))
    ]
    spans = [tuple(int(end, 16) for end in parts[0].split("-")) for parts in maps]
    assert spans
    assert all(any(low <= one.data_ptr() < high for low, high in spans) for one in running.weights)


def test_tied_weights_and_entries_that_share_a_module_are_stored_once(tmp_path):
    wide = nn.Linear(256, 256)
    one, two = nn.Sequential(wide, nn.ReLU()).eval(), nn.Sequential(wide, nn.Tanh()).eval()
    x = torch.randn(3, 256)
    both = dlinfer.bundle({"relu": dlinfer.compile(one, (x,)), "tanh": dlinfer.compile(two, (x,))})
    path = saved(both, tmp_path / "both.dlinfer")
    alone = saved(both["relu"], tmp_path / "one.dlinfer")
    assert path.stat().st_size < alone.stat().st_size + 20_000  # a second copy would be 262,144 bytes more
    with dlinfer.load(path) as session:
        assert session.get_graph_names() == ["relu", "tanh"]
        [name] = session.model_input_shape_dict("relu")
        same(list(session.run({name: x}, "tanh").values()), [two(x)])
        same(list(session.run({name: x}, "relu").values()), [one(x)])


def test_a_written_buffer_is_each_sessions_own_and_the_file_keeps_the_first_state(tmp_path):
    path = saved(dlinfer.compile(Keeps().eval(), (rows(2), torch.tensor([0, 1]))), tmp_path / "a.dlinfer")
    before = path.read_bytes()
    ours, other = dlinfer.load(path), dlinfer.load(path)
    given = {"x": rows(2), "slots": torch.tensor([3, 4])}
    [first] = ours.run(given).values()
    [second] = ours.run(given | {"slots": torch.tensor([5, 6])}).values()
    same(second, first * 2)
    [fresh] = other.run(given).values()
    same(fresh, first)
    ours.reset()
    [again] = ours.run(given).values()
    same(again, first)
    assert path.read_bytes() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_dtype(tmp_path, dtype):
    linear = nn.Linear(4, 3).to(dtype).eval()
    x = torch.randn(2, 4).to(dtype)
    session = dlinfer.load(saved(dlinfer.compile(linear, (x,)), tmp_path / "a.dlinfer"))
    [found] = session.run({"input": x}).values()
    torch.testing.assert_close(found, linear(x))


def test_a_save_that_fails_leaves_the_old_file(tmp_path, good):
    path = tmp_path / "a.dlinfer"
    path.write_bytes(good)
    artifact = compiled_head()[1]
    artifact.stored = "it holds a secret"
    with pytest.raises(ArtifactStorageError, match="it holds a secret"):
        artifact.save(path)
    assert path.read_bytes() == good
    assert os.listdir(tmp_path) == ["a.dlinfer"]


def test_no_place_to_write(tmp_path):
    with pytest.raises(ArtifactNotFoundError, match="No such file"):
        compiled_head()[1].save(tmp_path / "missing" / "a.dlinfer")


def test_a_process_that_knows_nothing_of_the_module_runs_the_file(tmp_path, monkeypatch):
    """The whole of it: another process, another folder, the real engine, no class of the module."""
    monkeypatch.undo()
    head, artifact = compiled_head()
    path = saved(artifact, tmp_path / "a.dlinfer")
    np.save(tmp_path / "x.npy", rows(7).numpy())
    script = (
        "import sys, numpy, dlinfer\n"
        "with dlinfer.load(sys.argv[1]) as session:\n"
        "    found = session.run({'x': numpy.load('x.npy')})\n"
        "numpy.savez('found.npz', **found)\n"
        "assert not [name for name in sys.modules if name.startswith('tests')]\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(path)], check=False, cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    wanted = head(rows(7))
    with np.load(tmp_path / "found.npz") as found:
        assert set(found) == set(wanted)
        for name in found:
            torch.testing.assert_close(torch.from_numpy(found[name]), wanted[name])


# --- encrypted


def test_an_encrypted_artifact_opens_with_its_key_alone(tmp_path):
    head, artifact = compiled_head()
    key = new_key()
    path = saved(artifact, tmp_path / "a.dlinfer", key=key)
    plain = saved(artifact, tmp_path / "plain.dlinfer").read_bytes()
    words = (
        b"aten.layer_norm",
        b"aten::layer_norm",
        b"layer_norm",
    )  # four letters stand in some random bytes
    assert any(word in plain for word in words)
    assert not any(word in path.read_bytes() for word in words)
    with dlinfer.load(path, key=key) as session:
        same(session.run({"x": rows(3)}), head(rows(3)))
    for wrong in (None, new_key(), b"short", "unknown name"):
        with pytest.raises(ArtifactKeyError):
            dlinfer.load(path, key=wrong)


def test_a_plain_artifact_with_a_key_is_not_taken_for_an_encrypted_one(good):
    with pytest.raises(ArtifactError):
        dlinfer.load(good, key=new_key())


# --- what is not sound


def refused(data, error: type[ArtifactError] = ArtifactCorruptError, match=None):
    """Refused when it is loaded, or when it is set up; never run."""
    with pytest.raises(error, match=match):
        dlinfer.load(data).setup()


@pytest.mark.parametrize("age", [0, 3600], ids=["just written", "old"])
def test_a_file_that_is_written_into_before_set_up_is_refused(tmp_path, age):
    """Other weights of the same size, whatever the file's times were."""
    head, artifact = compiled_head()
    path = saved(artifact, tmp_path / "head.dlinfer")
    os.utime(path, (time.time() - age,) * 2)
    times = os.stat(path)
    session = dlinfer.load(path)
    weight = head.linear.weight.detach().numpy().tobytes()
    place = path.read_bytes().index(weight)
    with open(path, "r+b") as stream:
        stream.seek(place)
        stream.write(bytes(len(weight)))
    if not age:
        os.utime(
            path, ns=(times.st_atime_ns, times.st_mtime_ns)
        )  # within one step of the file system's clock
    with pytest.raises(ArtifactCorruptError, match="written into after it was loaded"):
        session.setup()


def test_a_file_that_is_cut_before_set_up_is_refused(tmp_path):
    path = saved(compiled_head()[1], tmp_path / "head.dlinfer")
    session = dlinfer.load(path)
    os.truncate(path, 100)
    with pytest.raises(ArtifactCorruptError, match="written into after it was loaded"):
        session.run({"x": rows(3)})


class OfConstants(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.arange(40_000.0).view(8, 5000)

    def forward(self, x):
        return x @ self.table


def test_a_file_whose_constants_are_cut_off_is_refused(tmp_path):
    """Reading there would end the process with SIGBUS."""
    path = saved(dlinfer.compile(OfConstants(), (rows(3),)), tmp_path / "constants.dlinfer")
    session = dlinfer.load(path)
    os.truncate(path, 100)
    with pytest.raises(ArtifactCorruptError, match="written into after it was loaded"):
        session.setup()


def test_the_file_of_shared_weights_is_looked_at_too(tmp_path):
    head, artifact = compiled_head()
    paths = [saved(artifact, tmp_path / name) for name in ("one.dlinfer", "other.dlinfer")]
    one, other = map(dlinfer.load, paths)
    one.share_weights_with(other)
    with open(paths[1], "r+b") as stream:
        weight = head.linear.weight.detach().numpy().tobytes()
        stream.seek(paths[1].read_bytes().index(weight))
        stream.write(bytes(len(weight)))
    with pytest.raises(ArtifactCorruptError, match="written into after it was loaded"):
        one.setup()


@pytest.mark.parametrize("how", ["saved", "deleted"])
def test_a_file_that_is_replaced_or_deleted_stays_for_those_that_loaded_it(tmp_path, how):
    path = saved(compiled_head()[1], tmp_path / "head.dlinfer")
    with dlinfer.load(path) as session:
        if how == "saved":
            saved(dlinfer.compile(Head(1).eval(), (rows(3),)), path)
        else:
            path.unlink()
        same(session.run({"x": rows(3)}), wanted(3))
        session.reset()
        same(session.run({"x": rows(3)}), wanted(3))


def test_no_file(tmp_path):
    with pytest.raises(ArtifactNotFoundError, match="No such file"):
        dlinfer.load(tmp_path / "nothing.dlinfer")


@pytest.mark.parametrize("data", [b"", b"x", b"PK\x03\x04", b"\x80\x04N.", b"<html>not found</html>"])
def test_what_is_no_artifact(data):
    refused(data)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_flipped_byte_is_noticed(good, data):
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    refused(bytes(bad), ArtifactError)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_file_that_ends_early_or_goes_on_is_noticed(good, data):
    cut = data.draw(st.integers(0, len(good) - 1))
    more = data.draw(st.binary(min_size=1, max_size=64))
    refused(good[:cut])
    refused(good + more)


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=12,
    ),
    st.data(),
)
def test_any_value_in_any_place_of_the_manifest_or_graph(good, junk, data):
    """A manifest with right digests that says anything: an error of ours, or an artifact that still is one."""
    members, _ = unpacked(good)
    assert members

    def change(manifest, graph):
        target = data.draw(st.sampled_from([manifest, graph]))
        while True:
            inner = sorted(target) if isinstance(target, dict) else range(len(target))
            name = data.draw(st.sampled_from(list(inner)))
            if isinstance(target[name], (dict, list)) and target[name] and data.draw(st.booleans()):
                target = target[name]
                continue
            target[name] = junk
            return

    bad = altered(good, change)
    with contextlib.suppress(DlinferError):
        dlinfer.load(bad).run({"x": rows(3)})


def test_another_artifacts_manifest(good, tmp_path):
    """Swapped manifests: the digests of one file do not cover the members of another."""
    other = saved(dlinfer.compile(nn.Linear(8, 2).eval(), (rows(3),)), tmp_path / "b.dlinfer").read_bytes()
    ours, theirs = (json.dumps(unpacked(one)[1], separators=(",", ":")).encode() for one in (good, other))
    assert ours in good
    refused(good.replace(ours, theirs[: len(ours)].ljust(len(ours))), match="was altered")


def test_a_tensor_that_is_larger_than_the_file(good):
    def change(manifest, graph):
        manifest["tensors"][0]["sizes"] = [1 << 40]
        manifest["tensors"][0]["strides"] = [1]

    refused(altered(good, change))


def test_an_op_that_is_not_on_the_list(good):
    """Only ops of torch and dlinfer are called, however a graph spells another function."""
    for name in ("builtins.exec", "os.system", "aten::_pickle", "torch.load", "c10d::send"):

        def change(manifest, graph, name=name):
            node = next(item for item in graph["nodes"] if "call" in item or "op" in item)
            node["call" if "call" in node else "op"] = name

        refused(altered(good, change))


def test_a_file_of_an_earlier_release():
    refused(old_archive(), ArtifactVersionError, "needs the format of dlinfer 0.4")


def test_another_format(good):
    def change(manifest, graph):
        manifest["format"] = 99

    refused(altered(good, change), ArtifactVersionError, "format 99")


class Fused(nn.Module):
    """A model with two of dlinfer's ops."""

    def forward(self, x, weight):
        return dlinfer.ops.silu_mul(dlinfer.ops.rms_norm(x, weight, 1e-6), x)


@pytest.fixture
def fused(tmp_path) -> bytes:
    dlinfer.compile(Fused().eval(), (torch.randn(3, 8), torch.randn(8))).save(tmp_path / "fused.dlinfer")
    return (tmp_path / "fused.dlinfer").read_bytes()


def test_the_versions_of_dlinfers_ops_are_kept_and_fit(fused):
    members, manifest = unpacked(fused)
    graph = json.loads(members[manifest["stages"][0]["graph"]])
    assert graph["ops"] == {"rms_norm": 1, "silu_mul": 1}
    dlinfer.load(fused)


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (
            {"rms_norm": 2, "silu_mul": 1},
            r"dlinfer's op 'rms_norm' in version 2, but this installation has 1\.",
        ),
        (
            {"rms_norm": 1, "silu_mul": 0},
            r"dlinfer's op 'silu_mul' in version 0, but this installation has 1\.",
        ),
    ],
)
def test_an_op_of_another_version_is_refused_by_name(fused, versions, message):
    def change(manifest, graph):
        graph["ops"] = versions

    refused(altered(fused, change), ArtifactVersionError, message)


def test_an_op_that_came_later_is_refused_by_name(fused):
    def change(manifest, graph):
        next(item for item in graph["nodes"] if item["call"] == "dlinfer::rms_norm")["call"] = (
            "dlinfer::norm_of_2027"
        )

    refused(
        altered(fused, change),
        ArtifactVersionError,
        r"'norm_of_2027' in version 1, but this installation has no such op",
    )


def test_a_graph_that_says_nothing_of_versions_is_of_the_first_ones(fused, monkeypatch):
    def change(manifest, graph):
        del graph["ops"]

    dlinfer.load(altered(fused, change))
    monkeypatch.setattr(dlinfer.ops.rms_norm, "version", 2)
    refused(
        altered(fused, change), ArtifactVersionError, "'rms_norm' in version 1, but this installation has 2"
    )


def test_an_engine_that_is_not_here(good, monkeypatch):
    def change(manifest, graph):
        manifest["stages"][0]["engine"] = "warpdrive"

    monkeypatch.undo()
    with pytest.raises(DlinferError, match="warpdrive"):
        dlinfer.load(altered(good, change)).setup()


def test_symbols_keep_their_bounds(good):
    session = dlinfer.load(good)
    assert session.signature().inputs[0].bounds == ((1, 16), (8, 8))
    assert ROWS.__name__ == "rows"
    with pytest.raises(ArtifactInputError, match=r"1\.\.16"):
        session.run({"x": rows(17)})
