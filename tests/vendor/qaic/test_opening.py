"""Session is the entry point; an .onnx is compiled, a QPC is opened, the rest is refused."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

import dlinfer.vendor.qaic
from dlinfer.vendor.qaic import Session
from dlinfer.vendor.qaic.errors import (
    QaicCompileError,
    QaicModelError,
    QaicRunError,
    QaicUnavailableError,
)
from tests.vendor.qaic import models

DATA = np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)
BATCH = {"batch": 2}


def close(output: np.ndarray) -> bool:
    # float32 sums of 8 products against float64.
    return output.dtype == np.float32 and np.allclose(output, models.oracle(DATA), rtol=1e-5, atol=1e-6)


def test_session_makes_sessions_for_both_backends(linear, stand_in):
    """By position or keyword, a str or a Path; the object has every documented call."""
    made = [
        Session(str(linear), backend="onnxruntime"),
        Session(model_path=linear, backend="aic", onnx_define_symbol=BATCH),
    ]
    calls = (
        "backend_options update_backend_options model_input_shape_dict model_output_shape_dict setup reset run "
        "get_metrics print_metrics print_profile_data run_benchmark"
    ).split()
    for session in made:
        assert isinstance(session, dlinfer.vendor.qaic.Session)
        assert all(callable(getattr(session, name)) for name in calls)
        assert close(session.run({"data": DATA})["output"])


def test_an_onnx_is_compiled_when_the_session_is_made(linear, stand_in, tmp_path):
    Session(linear, onnx_define_symbol=BATCH, output_dir=tmp_path / "new" / "qpc", convert_to_fp16=True)
    qpc = json.loads((tmp_path / "new" / "qpc" / "programqpc.bin").read_text())
    assert qpc["arguments"][0] == f"-m={linear}"
    assert {"-aic-hw", "-aic-hw-version=2.0", "-compile-only", "-convert-to-fp16"} <= set(qpc["arguments"])
    name, asked = stand_in.CALLS[-1]
    assert (name, asked["model_path"]) == ("Session", str(tmp_path / "new" / "qpc" / "programqpc.bin"))


def test_without_output_dir_the_qpc_lives_as_long_as_the_session(linear, stand_in):
    session = Session(linear, onnx_define_symbol=BATCH)
    path = Path(stand_in.CALLS[-1][1]["model_path"])
    assert path.is_file()
    del session
    assert not path.exists()


def test_compiling_again_replaces_the_qpc_and_nothing_else(linear, stand_in, tmp_path):
    for cores in (1, 2):
        Session(linear, onnx_define_symbol=BATCH, output_dir=tmp_path, aic_num_cores=cores)
        (tmp_path / "mine.txt").write_text("kept")
    assert "-aic-num-cores=2" in (tmp_path / "programqpc.bin").read_text()
    assert (tmp_path / "mine.txt").read_text() == "kept"
    assert not list(tmp_path.glob(".compiling-*"))


def test_onnxruntime_compiles_when_the_session_is_made(linear, tmp_path):
    Session(linear, backend="onnxruntime", onnx_define_symbol=BATCH, output_dir=tmp_path / "made")
    compiled = tmp_path / "made" / "linear.compiled.onnx"
    again = Session(compiled, backend="onnxruntime")
    assert again.model_input_shape_dict()["data"][0] == (2, 8)
    assert close(again.run({"data": DATA})["output"])


def test_a_model_without_sdk_says_what_is_missing_and_what_to_do(linear, without_sdk):
    with pytest.raises(QaicUnavailableError) as caught:
        Session(linear)
    said = str(caught.value)
    assert f"compile {str(linear)!r} for backend 'aic'" in said
    assert "the Python package qaic is not installed" in said
    assert "the compiler (qaic-compile or qaic-exec) is neither on PATH nor in" in said
    assert "Next step: install Qualcomm's Cloud AI" in said
    assert "backend='onnxruntime'" in said


def test_the_compilers_refusal_is_passed_on(linear, compiler, stand_in):
    with pytest.raises(QaicCompileError, match=r"status 2: stand-in compiler: unknown option -io-crc"):
        Session(linear, io_crc=True, onnx_define_symbol=BATCH)


def test_a_compiler_that_leaves_nothing_is_an_error(linear, compiler, stand_in):
    compiler.write_text(
        "#!/bin/sh\nfor a in $@; do case $a in -aic-binary-dir=*) mkdir ${a#*=};; esac; done\n"
    )
    with pytest.raises(QaicCompileError, match=r"succeeded but wrote no programqpc\.bin"):
        Session(linear, onnx_define_symbol=BATCH)


def test_a_compiler_that_cannot_start_is_an_error(linear, compiler, stand_in):
    compiler.write_text("#!/no/such/shell\n")
    with pytest.raises(QaicCompileError, match="cannot be run: No such file or directory"):
        Session(linear, onnx_define_symbol=BATCH)


def test_the_newer_compiler_is_preferred_and_told_its_own_hardware_name(linear, compiler, stand_in, tmp_path):
    compiler.with_name("qaic-compile").write_text(compiler.read_text())
    compiler.with_name("qaic-compile").chmod(0o755)
    Session(linear, onnx_define_symbol=BATCH, output_dir=tmp_path / "qpc")
    assert "-aic-hw-version=ai100" in (tmp_path / "qpc" / "programqpc.bin").read_text()


def test_an_output_dir_that_cannot_be_made_is_an_error(linear, stand_in):
    for backend in ("aic", "onnxruntime"):
        with pytest.raises(
            QaicCompileError, match=r"cannot be compiled.*(NotADirectory|Not a directory|File exists)"
        ):
            Session(linear, backend=backend, output_dir=linear / "inside-a-file")


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_qpc_is_opened_by_its_path_a_pattern_or_its_folder(linear, stand_in, tmp_path, as_path):
    folder = tmp_path / "model_qpc"
    Session(linear, onnx_define_symbol=BATCH, output_dir=folder)
    for given in (folder / "programqpc.bin", folder / "*.bin", folder):
        assert close(Session(as_path(given)).run({"data": DATA})["output"])


def test_opening_a_qpc_needs_no_compiler(linear, stand_in, tmp_path, monkeypatch):
    Session(linear, onnx_define_symbol=BATCH, output_dir=tmp_path / "qpc")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    Session(tmp_path / "qpc" / "programqpc.bin")
    with pytest.raises(QaicUnavailableError, match=r"cannot compile .*: the compiler .* is neither"):
        Session(linear)


def test_a_qpc_without_sdk_says_what_is_missing(tmp_path, without_sdk):
    (tmp_path / "programqpc.bin").write_bytes(b"QPC")
    with pytest.raises(
        QaicUnavailableError, match=r"open .*programqpc\.bin.*qaic is not installed.*Next step: install"
    ):
        Session(tmp_path / "programqpc.bin")


def test_a_qpc_on_onnxruntime_is_refused(tmp_path):
    (tmp_path / "programqpc.bin").write_bytes(b"QPC")
    with pytest.raises(QaicModelError, match=r"runs on a Cloud AI card only.*Next step: pass the \.onnx"):
        Session(tmp_path / "programqpc.bin", backend="onnxruntime")


def test_a_pattern_that_fits_several_names_them(tmp_path):
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).touch()
    with pytest.raises(QaicModelError, match=r"matches 2 files: .*a\.bin, .*b\.bin"):
        Session(tmp_path / "*.bin")
    with pytest.raises(QaicModelError, match="matches 0 files"):
        Session(tmp_path / "none" / "*.bin")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("none.onnx", "there is no such file"),
        ("model.pt", r"neither \.onnx \(a model\) nor \.bin"),
        ("folder", r"the folder contains no programqpc\.bin"),
    ],
)
def test_a_path_that_is_no_model_is_named(tmp_path, name, complaint):
    (tmp_path / "model.pt").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(QaicModelError, match=complaint) as caught:
        Session(tmp_path / name, backend="onnxruntime")
    assert caught.value.fields["path"] == str(tmp_path / name)


@pytest.mark.parametrize("path", [None, 3, "", b"m.onnx"])
def test_no_path_at_all(path):
    with pytest.raises(QaicModelError, match="it is not a path"):
        Session(path, backend="onnxruntime")


def test_a_file_name_with_pattern_signs_is_itself(tmp_path):
    assert Session(models.linear(tmp_path / "a[1].onnx"), backend="onnxruntime").backend_options()


@pytest.mark.parametrize(
    "content", [b"", b"no protobuf", random.Random(0).randbytes(200)], ids=["empty", "text", "noise"]
)
def test_a_broken_model_is_the_compilers_to_refuse(tmp_path, content):
    (tmp_path / "broken.onnx").write_bytes(content)
    with pytest.raises(QaicCompileError, match=r"broken\.onnx' cannot be compiled: ONNX Runtime refuses it"):
        Session(tmp_path / "broken.onnx", backend="onnxruntime")


def test_a_broken_qpc_is_the_packages_to_refuse(tmp_path, stand_in):
    (tmp_path / "programqpc.bin").write_bytes(b"\0\1\2")
    with pytest.raises(QaicRunError, match=r"backend 'aic' failed: qaic's Session raised \w+"):
        Session(tmp_path / "programqpc.bin")


def test_a_package_of_the_same_name_is_told_apart(linear, stand_in, monkeypatch):
    monkeypatch.delattr(stand_in, "Session")
    with pytest.raises(QaicUnavailableError, match="has no Session, so it is another package"):
        Session(linear)
