"""The guide's terms and limits, and what they mean for a Session here."""

import os
import threading

import numpy as np
import pytest

from dlinfer.vendor.qaic import Session, sdk
from dlinfer.vendor.qaic.backends.workers import run_loops
from dlinfer.vendor.qaic.errors import QaicOptionError, QaicUnavailableError
from tests.vendor.qaic import models


def test_ai_cores_go_to_the_compiler(linear, stand_in, tmp_path):
    """AI core, AI compute core and NSP are one thing: what aic_num_cores counts."""
    Session(linear, aic_num_cores=4, onnx_define_symbol={"batch": 1}, output_dir=tmp_path / "qpc")
    assert '"-aic-num-cores=4"' in (tmp_path / "qpc" / "programqpc.bin").read_text()


@pytest.mark.parametrize("cores", [1, 1000])
def test_ai_cores_are_threads_on_onnxruntime(linear, cores):
    session = Session(linear, backend="onnxruntime", aic_num_cores=cores)
    threads = session._backend._session().get_session_options().intra_op_num_threads  # pyright: ignore
    assert threads == min(cores, len(os.sched_getaffinity(0)))


def test_activations_run_at_once():
    """An activation is one instance of the network; here each waits until all of them are running."""
    all_running = threading.Barrier(3, timeout=300)

    def run() -> None:
        if threading.current_thread() is not threading.main_thread():  # where each is called once to warm up
            all_running.wait()

    completed, seconds = run_loops([run, run, run], count=6, seconds=None)
    assert completed == 6
    assert seconds > 0


def test_each_activation_has_bindings_of_its_own(linear, monkeypatch):
    loops = []
    monkeypatch.setattr(
        "dlinfer.vendor.qaic.backends.onnxruntime.run_loops",
        lambda runs, count, seconds: (loops.append(runs), (count, 1.0))[1],
    )
    session = Session(linear, backend="onnxruntime", num_activations=3)
    session.run_benchmark()
    session.update_backend_options(num_activations=2)
    session.run_benchmark()
    assert [len(runs) for runs in loops] == [3, 2]
    assert len({id(run.args[0]) for run in loops[0]}) == 3


def test_a_qpc_is_what_the_compiler_leaves_and_a_session_opens(linear, stand_in, tmp_path):
    data = np.ones((2, 8), np.float32)
    compiled = Session(linear, onnx_define_symbol={"batch": 2}, output_dir=tmp_path / "qpc")
    opened = Session(tmp_path / "qpc" / "programqpc.bin")
    np.testing.assert_array_equal(
        opened.run({"data": data})["output"], compiled.run({"data": data})["output"]
    )


@pytest.mark.parametrize("backend", ["qnn", "cuda", "", 1, ["aic"]])
def test_only_the_backends_that_there_are(linear, backend):
    with pytest.raises(QaicOptionError, match=r"'aic' or 'onnxruntime' \(Qualcomm plans 'qnn'"):
        Session(linear, backend=backend)


def test_a_package_for_another_python_says_under_which_it_failed(linear, stand_in, monkeypatch):
    """The guide names Python 3.8 only, newer pages no version; dlinfer asks what the installed package takes."""

    def refuse(name):
        raise ImportError("qaic needs Python 3.8")

    monkeypatch.setattr(sdk.importlib, "import_module", refuse)
    with pytest.raises(QaicUnavailableError, match=r"under Python 3\.\d+ \(qaic needs Python 3\.8\)"):
        Session(linear)


def test_a_card_needs_x86_64(linear, stand_in, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(
        QaicUnavailableError, match=r"x86-64 only, and this machine is aarch64.*backend='onnxruntime'"
    ):
        Session(linear)


def test_onnxruntime_needs_no_x86_64(linear, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    data = np.ones((1, 8), np.float32)
    output = Session(linear, backend="onnxruntime").run({"data": data})["output"]
    # float32 sums of 8 products against float64: a few roundings of 2**-24.
    np.testing.assert_allclose(output, models.oracle(data), rtol=1e-6, atol=1e-6)
