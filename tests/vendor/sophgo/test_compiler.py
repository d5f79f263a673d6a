"""ONNX to bmodel: options, the cache, what the compiler refuses, and what another program would find in the file."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dlinfer import settings
from dlinfer.errors import ToolchainMissingError
from dlinfer.toolchain import process
from dlinfer.vendor.sophgo.compiler import cache as compiler_cache
from dlinfer.vendor.sophgo.compiler import compile as compiler
from dlinfer.vendor.sophgo.compiler import process as compiler_process
from dlinfer.vendor.sophgo.compiler.compile import combine, compile_onnx, describe
from dlinfer.vendor.sophgo.compiler.options import CHIPS, QUANTIZE, BmodelOptions
from dlinfer.vendor.sophgo.errors import SophgoCompileError, SophgoModelError, SophgoOptionError
from dlinfer.vendor.sophgo.runtime.bmodel import Header
from tests.waiting import SECONDS, ended, until

WIDTH = 32


def mlp(rows: int = 8, op: str = "Relu", seed: int = 0, inside: bool = True) -> bytes:
    """x [1, rows, 32] -> y = op(x @ w) @ v. inside: the weights stand in the model, else in a file beside it."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.RandomState(seed)
    matrices = [random.randn(WIDTH, WIDTH).astype(np.float32) * 0.2 for _ in range(2)]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node(op, ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "v"], ["y"]),
    ]
    sizes = [1, rows, WIDTH]
    inputs, outputs = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes)] for name in ("x", "y"))
    constants = [numpy_helper.from_array(one, name) for one, name in zip(matrices, "wv", strict=True)]
    graph = helper.make_graph(nodes, "mlp", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def test_a_net_and_its_place_in_the_cache(toolchain):
    """The second call finds it; the steps were told at the first, where it was not there from an earlier run."""
    first = compile_onnx(mlp(), name="mlp", options=BmodelOptions(quantize="F16"))
    told: list[str] = []
    assert (
        compile_onnx(mlp(), name="mlp", options=BmodelOptions(quantize="F16"), progress=told.append) == first
    )
    assert told == []
    said = describe(first)
    assert "net 0: [mlp]  static" in said
    assert "chip: BM1684X" in said
    assert "addr mode: 1" in said
    assert f"input: x, [1, 8, {WIDTH}], float16" in said


def test_a_damaged_entry_is_made_anew(toolchain, tmp_path):
    """In a cache of the test's own; the toolchain stays where it is."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compiler_cache, "cache_folder", lambda: tmp_path)
        told: list[str] = []
        made = compile_onnx(mlp(), name="mlp", progress=told.append)
        assert told == ["transform", "compile"]
        assert made.parent == tmp_path / "sophgo"
        with made.open("r+b") as file:
            file.seek(1000)
            file.write(b"damaged")
        again = compile_onnx(mlp(), name="mlp", progress=told.append)
        assert told == ["transform", "compile"] * 2
        assert b"damaged" not in again.read_bytes()
        assert [path for path in (tmp_path / "sophgo").iterdir() if path.name.startswith(".")] == []


def test_a_net_on_which_the_optimiser_ends_is_compiled_with_less(toolchain, monkeypatch, tmp_path):
    """As the compiler's core does it on float32 layers (test_llm.py, ``test_other_numbers``): without a word."""
    tool = tmp_path / "tool.py"
    sound = compile_onnx(mlp(), name="mlp")
    tool.write_text(
        "import json, sys\n"
        f"sound = open({str(sound)!r}, 'rb').read()\n"
        "deploy = json.load(open(sys.argv[1]))['deploy']\n"
        "print('dlinfer step: compile', flush=True)\n"
        "if '--opt' not in deploy:\n"
        "    print('RuntimeError: [!Error]: tpuc-opt x.mlir --processor-tpu-optimize -o y.mlir')\n"
        "    sys.exit(1)\n"
        "open('net.bmodel', 'wb').write(sound + b'made with ' + deploy[-1].encode())\n"
    )
    monkeypatch.setattr(compiler_process, "driver_command", lambda job: [sys.executable, str(tool), str(job)])
    monkeypatch.setattr(compiler_cache, "cache_folder", lambda: tmp_path)
    told: list[str] = []
    made = compile_onnx(mlp(), name="mlp", progress=told.append)
    assert told == ["compile", "compile"]
    assert made.read_bytes().endswith(b"made with 1")


def test_what_a_bmodel_depends_on_is_its_key(toolchain, tmp_path):
    plain = BmodelOptions()
    keys = {
        compiler._key(mlp(), "mlp", plain, ()),
        compiler._key(mlp(), "other", plain, ()),
        compiler._key(mlp(seed=1), "mlp", plain, ()),
        compiler._key(mlp(), "mlp", BmodelOptions(chip="bm1688"), ()),
        compiler._key(mlp(), "mlp", BmodelOptions(quantize="F32"), ()),
        compiler._key(mlp(), "mlp", BmodelOptions(quantize="W4F16", group_size=32), ()),
        compiler._key(mlp(), "mlp", BmodelOptions(quantize="W4F16"), ()),
        compiler._key(mlp(), "mlp", BmodelOptions(dynamic=True), ()),
        compiler._key(mlp(), "mlp", plain, [{"x": np.zeros(3)}]),
    }
    assert len(keys) == 9
    assert compiler._key(mlp(), "mlp", BmodelOptions(timeout=5), ()) == compiler._key(mlp(), "mlp", plain, ())


def test_weights_beside_the_model_count_too(toolchain, tmp_path):
    import onnx

    def key(seed: int) -> str:
        path = tmp_path / "model.onnx"
        onnx.save(
            onnx.ModelProto.FromString(mlp(seed=seed)),
            str(path),
            save_as_external_data=True,
            location="weights.bin",
            size_threshold=0,
        )
        return compiler._key(path, "mlp", BmodelOptions(), ())

    first = key(0)
    (tmp_path / "weights.bin").unlink()
    assert key(1) != first


def test_stages_and_nets_in_one_file(toolchain, tmp_path):
    """Nets of one name with other sizes become stages."""
    parts = [compile_onnx(mlp(rows), name="mlp") for rows in (8, 4)]
    parts.append(compile_onnx(mlp(seed=1), name="head"))
    combine(parts, tmp_path / "all.bmodel")
    said = describe(tmp_path / "all.bmodel")
    assert "net 0: [mlp]" in said
    assert "stage 1" in said
    assert "net 1: [head]" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.bmodel"]


@pytest.mark.full
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("quantize", QUANTIZE)
def test_every_chip_has_every_kind_of_numbers(toolchain, chip, quantize):
    inputs = [{"x": np.random.RandomState(1).randn(1, 8, WIDTH).astype(np.float32)}]
    calibration = inputs if quantize == "INT8" else ()
    options = BmodelOptions(chip=chip, quantize=quantize)
    said = describe(compile_onnx(mlp(), name="mlp", options=options, calibration=calibration))
    assert f"chip: {chip.upper()}" in said
    kind = {"F32": "float32", "INT8": "float32"}.get(
        quantize, "bfloat16" if "BF16" in quantize else "float16"
    )
    assert f"input: x, [1, 8, {WIDTH}], {kind}" in said


# --- what goes wrong


def test_what_the_compiler_refuses_is_said_with_its_log(toolchain):
    with pytest.raises(SophgoCompileError, match="Selu") as caught:
        compile_onnx(mlp(op="Selu"), name="mlp")
    assert "Op not support" in Path(caught.value.fields["log"]).read_text()
    with pytest.raises(SophgoCompileError, match="cannot compile"):
        compile_onnx(b"no model", name="mlp")


def test_a_compiler_that_takes_too_long_is_ended_with_all_it_started(toolchain, monkeypatch, tmp_path):
    sleeper = tmp_path / "sleeper.py"
    pids = tmp_path / "pids"
    sleeper.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(10000)'])\n"
        "print('asleep', flush=True)\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}} all')\n"
        "time.sleep(10000)\n"
    )

    def asleep() -> bool:
        return pids.exists() and pids.read_text().endswith("all")

    monkeypatch.setattr(process, "monotonic", lambda: 1e9 if asleep() else 0.0)
    monkeypatch.setattr(compiler_process, "driver_command", lambda job: [sys.executable, str(sleeper)])
    monkeypatch.setattr(compiler_cache, "kept", lambda key: None)
    with pytest.raises(SophgoCompileError, match=r"ended after 3 s; it printed: asleep"):
        compile_onnx(mlp(), name="mlp", options=BmodelOptions(timeout=3))
    for pid in pids.read_text().split()[:2]:
        until(lambda pid=int(pid): ended(pid))


def test_a_compiler_that_is_killed_or_writes_nothing_whole(toolchain, monkeypatch):
    """What a full disk cut off is not kept."""
    sound = compile_onnx(mlp(), name="mlp")
    monkeypatch.setattr(compiler_cache, "kept", lambda key: None)
    part = f"open('net.bmodel', 'wb').write(open({str(sound)!r}, 'rb').read()[:-9])"
    for code, said in (
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
        ("pass", "wrote no bmodel"),
        (part, "wrote an incomplete bmodel"),
    ):
        monkeypatch.setattr(
            compiler_process, "driver_command", lambda job, code=code: [sys.executable, "-c", code]
        )
        with pytest.raises(SophgoCompileError, match=said):
            compile_onnx(mlp(), name="mlp")


def test_a_full_disk_is_an_error_of_the_compiler(toolchain, monkeypatch):
    monkeypatch.setattr(compiler_cache, "kept", lambda key: None)

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(SophgoCompileError, match="No space left on device"):
        compile_onnx(mlp(), name="mlp")


def test_of_two_that_want_a_net_one_compiles(toolchain, monkeypatch, tmp_path):
    """In another process as well: the lock is a file's."""
    sound, count = compile_onnx(mlp(), name="mlp"), tmp_path / "count"
    code = (
        f"import shutil, time; open({str(count)!r}, 'a').write('x'); time.sleep(0.5);"
        f"shutil.copy({str(sound)!r}, 'net.bmodel')"
    )
    monkeypatch.setattr(compiler_process, "driver_command", lambda job: [sys.executable, "-c", code])
    monkeypatch.setattr(compiler_cache, "cache_folder", lambda: tmp_path)
    with ThreadPoolExecutor(3) as pool:
        made = {one.result() for one in [pool.submit(compile_onnx, mlp(), name="mlp") for _ in range(3)]}
    assert len(made) == 1 and count.read_text() == "x"
    assert sorted(path.suffix for path in (tmp_path / "sophgo").iterdir()) == [".bmodel"]


def test_what_a_killed_process_left_in_the_cache_goes(toolchain, monkeypatch, tmp_path):
    """But not what is locked, or so new that its owner may not have locked it yet."""
    monkeypatch.setattr(compiler_cache, "cache_folder", lambda: tmp_path)
    left, used, new = (tmp_path / "sophgo" / f".compiling-{name}" for name in ("left", "used", "new"))
    for folder in (left, used, new):
        folder.mkdir(parents=True)
        (folder / "net.onnx").write_bytes(b"0")
    for folder, seconds in ((left, 0), (used, 0), (new, time.time() + SECONDS)):  # however slow this is
        os.utime(folder, (seconds, seconds))
    lock = os.open(used, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with compiler_cache.scratch() as own:
        assert own.is_dir() and not left.exists()
    os.close(lock)
    assert used.is_dir() and new.is_dir() and not own.exists()


def test_the_largest_stage_of_a_net_is_its_first(monkeypatch):
    """What BMRuntime does to a smaller one before it: raw/growing_stages.py."""
    memory = {"block 8": 10, "block 16": 30, "head": 5, "block 12": 20}

    def read(path: Path) -> Header:
        return Header("BM1684X", 1, {path.name.split()[0]: ((memory[path.name],),)}, frozenset())

    monkeypatch.setattr(compiler.bmodel_file, "read_file", read)
    ordered = compiler._largest_first([Path(name) for name in memory])
    assert [path.name for path in ordered] == ["block 16", "block 12", "block 8", "head"]


def test_files_that_are_no_bmodels_cannot_be_combined(toolchain, tmp_path):
    (tmp_path / "a").write_bytes(b"no bmodel")
    with pytest.raises(SophgoModelError, match="shorter than a header"):
        combine([tmp_path / "a", tmp_path / "a"], tmp_path / "out.bmodel")
    assert not (tmp_path / "out.bmodel").exists()


def test_calibration_is_for_int8_and_int8_wants_it(toolchain):
    with pytest.raises(SophgoOptionError, match="calibration"):
        compile_onnx(mlp(), name="mlp", options=BmodelOptions(quantize="INT8"))
    with pytest.raises(SophgoOptionError, match="calibration"):
        compile_onnx(mlp(), name="mlp", calibration=[{"x": np.zeros((1, 8, WIDTH), np.float32)}])


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"chip": "bm1684"}, "bm1684x, bm1688, bm1690"),
        ({"quantize": "INT4"}, "W4BF16"),
        ({"addr_mode": "other"}, "io_alone"),
        ({"cores": 2}, "1 to 1, the cores of bm1684x"),
        ({"chip": "bm1688", "cores": 3}, "1 to 2"),
        ({"cores": True}, "cores"),
        ({"group_size": 48}, "multiple of 32"),
        ({"dynamic": 1}, "True or False"),
        ({"timeout": -1}, "above 0"),
        ({"timeout": 1e300}, "at most"),
        ({"chip": ["bm1688"]}, "bm1684x, bm1688, bm1690"),
    ],
)
def test_wrong_options_name_the_right_ones(wrong, named):
    with pytest.raises(SophgoOptionError, match=named):
        BmodelOptions(**wrong)


@pytest.mark.parametrize("name", ["", "a b", "1a", "a;rm", "a" * 101, "$(a)"])
def test_names_that_a_shell_would_read_are_refused(name):
    with pytest.raises(SophgoOptionError, match="name"):
        compile_onnx(b"", name=name)


def test_without_the_toolchain_the_error_says_how_to_install_it(tmp_path):
    with (
        settings.override(cache_dir=str(tmp_path)),
        pytest.raises(ToolchainMissingError, match="toolchain install"),
    ):
        compile_onnx(mlp(), name="mlp")


def test_the_compiler_sees_nothing_of_this_environment(toolchain, monkeypatch, tmp_path):
    """PYTHONPATH and a virtual environment of the caller's would put other packages before the toolchain's."""
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    log = tmp_path / "log"
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    compiler_process.run([sys.executable, "-c", code], tmp_path, log, SECONDS)
    seen = json.loads(log.read_text().splitlines()[-1])
    assert not {"PYTHONPATH", "VIRTUAL_ENV"} & set(seen)
    assert seen["PATH"].startswith(str(compiler_process.toolchain().scripts))
    assert os.environ["PYTHONPATH"] == "/somewhere"


def test_the_toolchains_stand_ins_are_enough_for_the_front_end(toolchain):
    """The tools import torch and onnxruntime_extensions; neither is in the toolchain for real."""
    code = (
        "import sys, torch; from onnxruntime_extensions import PyOp, PyOrtFunction, onnx_op;"
        "assert torch.tensor([1]).numpy().tolist() == [1] and torch.Tensor;"
        "assert onnx_op(op_type='x', inputs=[PyOp.dt_float])(len) is len and not hasattr(torch, '__path__')"
    )
    subprocess.run([str(compiler_process.toolchain().python), "-s", "-c", code], check=True, timeout=SECONDS)
