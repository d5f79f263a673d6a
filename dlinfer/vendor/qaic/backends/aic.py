"""The backend ``aic``: a Cloud AI card, which Qualcomm's package ``qaic`` controls."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dlinfer.vendor.qaic import sdk
from dlinfer.vendor.qaic.backends.backend import Arrays, Benchmark
from dlinfer.vendor.qaic.engine.compiler import compile_model
from dlinfer.vendor.qaic.errors import QaicRunError
from dlinfer.vendor.qaic.model_file import ModelFile, check_symbols
from dlinfer.vendor.qaic.options.options import Options
from dlinfer.vendor.qaic.tensors import TensorInfo, sizes_of


class AicBackend:
    """A model on a card. Its methods raise QaicUnavailableError, QaicCompileError or QaicRunError."""

    def __init__(self, model: ModelFile, options: Options) -> None:
        what = f"{'compile' if model.kind == 'onnx' else 'open'} {str(model.path)!r} for backend 'aic'"
        sdk.require(what, compiling=model.kind == "onnx")
        package = sdk.package()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        qpc = model.path if model.kind == "qpc" else self._compiled(model, options)
        # dlinfer takes metrics and profiles itself, so that they mean the same on every backend.
        keywords = {
            name: value
            for name, value in {**options.of_stage("run"), **options.of_stage("session")}.items()
            if name not in ("enable_metrics", "enable_profiling")
        }
        self._session: Any = _asked(package.Session, model_path=str(qpc), **keywords)
        self.inputs = _infos(self._session.model_input_shape_dict)
        self.outputs = _infos(self._session.model_output_shape_dict)
        self.defaults: Mapping[str, TensorInfo] = {}

    def _compiled(self, model: ModelFile, options: Options) -> Path:
        compiler = sdk.compiler()
        assert compiler is not None  # require() has found it
        compiling = options.of_stage("compile")
        if "output_dir" in compiling:
            folder = Path(compiling["output_dir"])
        else:
            self._scratch = tempfile.TemporaryDirectory(prefix="dlinfer-qaic-")
            folder = Path(self._scratch.name)
        check_symbols(model, options)
        return compile_model(compiler, model.path, folder, compiling)

    def settable(self) -> dict[str, Any]:
        return dict(_value(self._session.backend_options))

    def update(self, changed: Mapping[str, Any]) -> None:
        _asked(self._session.update_backend_options, **changed)

    def load(self) -> None:
        _asked(self._session.setup)

    def release(self) -> None:
        _asked(self._session.reset)

    def run(self, inputs: Arrays) -> dict[str, np.ndarray]:
        contiguous = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        values = _asked(self._session.run, contiguous)
        return {name: _shaped(values[name], info) for name, info in self.outputs.items()}

    def benchmark(self, count: int | None, seconds: float | None, inputs: Arrays | None) -> Benchmark:
        """Run the benchmark of Qualcomm's package, which is written in C++.

        If ``inputs`` is None, that benchmark makes random inputs.
        """
        asked: dict[str, Any] = {"num_inferences": count} if seconds is None else {"inf_time": seconds}
        if inputs is not None:
            asked["input_dict"] = dict(inputs)
        completed, rate, taken, size = _asked(self._session.run_benchmark, **asked)
        return int(completed), float(rate), float(taken), int(size)


def _asked(call: Any, *arguments: Any, **keywords: Any) -> Any:
    """Call a function of Qualcomm's package and return its result. Turn any exception into QaicRunError."""
    try:
        return call(*arguments, **keywords)
    except Exception as cause:  # the package's classes are not published
        name = getattr(call, "__name__", str(call))
        detail = f"qaic's {name} raised {type(cause).__name__}: {cause}"
        raise QaicRunError(backend="aic", detail=detail) from cause


def _value(member: Any) -> Any:
    """Return the value of a method or property. Qualcomm's user guide has methods where its samples have properties."""
    return _asked(member) if callable(member) else member


def _infos(member: Any) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(sizes_of(shape), np.dtype(dtype)) for name, (shape, dtype) in _value(member).items()
    }


def _shaped(value: Any, info: TensorInfo) -> np.ndarray:
    """Return an output, which may be an array or a buffer, as an array of the model's shape."""
    # Copy a buffer, so that the caller may write to it as to an array.
    array = value if isinstance(value, np.ndarray) else np.frombuffer(value, info.dtype).copy()
    if info.is_open or info.shape is None:
        return array
    return array.reshape([int(size) for size in info.shape if size is not None])
