"""Small bmodels, compiled by Sophgo's toolchain and kept in dlinfer's cache folder under a hash of their recipe.

The network ``mlp``: y = relu(x @ w1) @ w2 + bias, inputs x and bias [1, rows, 16]; ``head`` is another with weights of
its own. The float64 oracle is here too.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dlinfer.settings import cache_folder
from dlinfer.toolchain import find
from dlinfer.vendor.sophgo.toolchain import TOOLCHAIN

WIDTH, HIDDEN = 16, 32
SEEDS = {"mlp": 0, "head": 1}
_SECONDS = 3000


@dataclass(frozen=True)
class Part:
    """One network with one set of shapes."""

    net: str = "mlp"
    rows: int = 8
    quantize: str = "F16"
    addr_mode: str = "io_alone"
    dynamic: bool = False
    devices: int = 1
    layer_groups: bool = (
        True  # keep what lies between layers on the chip; else in the network's working memory
    )


@dataclass(frozen=True)
class Recipe:
    """A bmodel: parts for one chip; parts of one network are its stages."""

    chip: str
    parts: tuple[Part, ...]


GROWING = (Part(rows=1024, layer_groups=False), Part(rows=1088, layer_groups=False), Part("head", rows=4))
LLM = (Part(rows=8), Part(rows=16), Part("head", rows=4))
RECIPES = {
    "bm1684x": Recipe("bm1684x", LLM),
    "bm1688": Recipe("bm1688", LLM[:2]),
    "basic": Recipe("bm1684x", (Part(addr_mode="basic"),)),
    "tagged": Recipe("bm1688", (Part(addr_mode="io_tag"),)),
    "dynamic": Recipe("bm1684x", (Part(dynamic=True),)),
    "two devices": Recipe("bm1684x", (Part(devices=2),)),
    "eight devices": Recipe("bm1684x", (Part(devices=8),)),
    "float32": Recipe("bm1684x", (Part(quantize="F32"),)),
    "bfloat16": Recipe("bm1684x", (Part(quantize="BF16"),)),
    "int8": Recipe("bm1684x", (Part(quantize="INT8"),)),
    "growing bm1684x": Recipe("bm1684x", GROWING),
    "growing bm1688": Recipe("bm1688", GROWING),
    "large bm1684x": Recipe("bm1684x", (Part(rows=2048, layer_groups=False),)),
    "large bm1688": Recipe("bm1688", (Part(rows=2048, layer_groups=False),)),
}


def weights(net: str) -> tuple[np.ndarray, np.ndarray]:
    """float32 [16, 32] and [32, 16]."""
    random = np.random.RandomState(SEEDS[net])
    first = random.randn(WIDTH, HIDDEN) * WIDTH**-0.5
    return first.astype(np.float32), (random.randn(HIDDEN, WIDTH) * HIDDEN**-0.5).astype(np.float32)


def oracle(net: str, x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """What the network computes, in float64."""
    first, second = (weight.astype(np.float64) for weight in weights(net))
    return np.maximum(x.astype(np.float64) @ first, 0) @ second + bias.astype(np.float64)


def build(name: str) -> Path:
    """The path of a bmodel, compiled now where it is not there yet."""
    recipe = RECIPES[name]
    text = json.dumps([asdict(recipe), SEEDS, WIDTH, HIDDEN, TOOLCHAIN.digest])
    path = cache_folder() / "sophgo" / "tests" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.bmodel"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes that want it one compiles
            if not path.exists():
                with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                    os.replace(_compiled(recipe, Path(scratch)), path)
    return path


def build_all() -> None:
    """All of them, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(build, RECIPES))


def _compiled(recipe: Recipe, folder: Path) -> Path:
    parts = []
    for number, part in enumerate(recipe.parts):
        place = folder / str(number)
        place.mkdir()
        parts.append(_compiled_part(recipe.chip, part, place))
    if len(parts) == 1:
        return parts[0]
    _run(folder, "model_tool", "--combine", *map(str, parts), "-o", "all.bmodel")
    return folder / "all.bmodel"


def _translated(part: Part) -> Path:
    """A folder with the network as the compiler reads it, the same for all chips and numbers."""
    text = json.dumps([part.net, part.rows, SEEDS, WIDTH, HIDDEN, TOOLCHAIN.digest])
    path = cache_folder() / "sophgo" / "tests" / hashlib.sha256(text.encode()).hexdigest()[:24]
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                made = Path(scratch, "net")
                made.mkdir()
                _write_onnx(part, made / "net.onnx")
                names = ["--model_name", part.net, "--model_def", "net.onnx", "--mlir", "net.mlir"]
                _run(made, "model_transform", *names)
                made.rename(path)
    return path


def _compiled_part(chip: str, part: Part, folder: Path) -> Path:
    shutil.copytree(_translated(part), folder, dirs_exist_ok=True)
    options = ["--mlir", "net.mlir", "--quantize", part.quantize, "--chip", chip, "--model", "net.bmodel"]
    options += ["--addr_mode", part.addr_mode, "--quant_input", "--quant_output"]
    if part.dynamic:
        options.append("--dynamic")
    if not part.layer_groups:
        options.append("--disable_layer_group")
    if part.devices > 1:
        options += ["--num_device", str(part.devices)]
    if part.quantize == "INT8":
        (folder / "table").write_text(CALIBRATION)
        options += ["--calibration_table", "table"]
    _run(folder, "model_deploy", *options)
    return folder / "net.bmodel"


# Names of the tensors, threshold, least and greatest value: what the toolchain's calibration finds by trying.
CALIBRATION = "\n".join(
    f"{name} {limit} -{limit} {limit}"
    for name, limit in (("x", 4), ("bias", 4), ("a_MatMul", 4), ("b_Relu", 4), ("c_MatMul", 4), ("y_Add", 8))
)


def _write_onnx(part: Part, path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    shape = [1, part.rows, WIDTH]
    first, second = weights(part.net)
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w2"], ["c"]),
        helper.make_node("Add", ["c", "bias"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "bias")]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)]
    constants = [numpy_helper.from_array(first, "w1"), numpy_helper.from_array(second, "w2")]
    graph = helper.make_graph(nodes, part.net, inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)


def _run(folder: Path, tool: str, *arguments: str) -> None:
    programs = find(TOOLCHAIN).scripts
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(programs / tool), *arguments],
        cwd=folder,
        env={**environment, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert done.returncode == 0, (
        f"{tool} {' '.join(arguments)}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
