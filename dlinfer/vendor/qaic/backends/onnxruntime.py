"""The backend ``onnxruntime``, which runs the user's .onnx on this machine's CPU, without a card.

The options use a card's terms. Here an instance is a thread of the benchmark that runs one inference at a time; all
instances share the weights. An AI core is a thread within an inference. Compiling means ONNX Runtime's optimisation.
"""

import functools
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dlinfer.vendor.qaic.backends.backend import Arrays, Benchmark
from dlinfer.vendor.qaic.backends.workers import run_loops
from dlinfer.vendor.qaic.errors import (
    QaicCompileError,
    QaicInputError,
    QaicModelError,
    QaicRunError,
    QaicUnavailableError,
)
from dlinfer.vendor.qaic.model_file import ModelFile, check_symbols, facts_of
from dlinfer.vendor.qaic.options.options import DEFAULTS, Options, without_effect
from dlinfer.vendor.qaic.tensors import TensorInfo, batch_size, random_inputs, sizes_of

DTYPES = {
    "float": "float32",
    "double": "float64",
    **{name: name for name in "float16 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()},
}
HONOURED = ("aic_num_cores", "convert_to_fp16", "onnx_define_symbol", "output_dir", "compile_only")


class OnnxruntimeBackend:
    """A model in ONNX Runtime's CPU provider.

    Raises QaicUnavailableError if the package onnxruntime is missing.
    Raises QaicModelError for a QPC (a model compiled for Cloud AI cards).
    Raises QaicModelError for an input or output if numpy lacks its type.
    Raises QaicCompileError if ONNX Runtime refuses the model.
    Raises QaicOptionError for an option that has no effect here, if the fallback policy is ``error``.
    """

    def __init__(self, model: ModelFile, options: Options) -> None:
        if model.kind == "qpc":
            raise QaicModelError(
                path=str(model.path),
                detail="a compiled QPC runs on a Cloud AI card only, not on backend 'onnxruntime'",
                advice="pass the .onnx that it was compiled from",
            )
        without_effect(options, _ignored(options))
        self._model = model
        self._options = options
        self._lock = threading.Lock()
        self._loaded: Any = None
        folder = options.get("output_dir")
        self._output_dir = None if folder is None else Path(folder).absolute()
        check_symbols(model, options)
        session = self._session()
        self.inputs = self._infos(session.get_inputs())
        self.outputs = self._infos(session.get_outputs())
        self.defaults = self._infos(session.get_overridable_initializers())

    def _infos(self, values: Sequence[Any]) -> dict[str, TensorInfo]:
        infos = {value.name: _info(value, self._model) for value in values}
        if any(info.shape == () for info in infos.values()):  # ONNX Runtime returns it for any rank too
            facts = facts_of(self._model)
            of_any_rank = facts.of_any_rank if facts is not None else frozenset()
            infos |= {name: TensorInfo(None, infos[name].dtype) for name in of_any_rank & infos.keys()}
        return infos

    def settable(self) -> dict[str, Any]:
        """Return num_activations, set_size and dev_id, with their present values."""
        return {**DEFAULTS, **self._options.of_stage("run")}

    def update(self, changed: Mapping[str, Any]) -> None:
        """Accept changes of options.

        There is nothing to load again, since an instance is only a thread of the benchmark.
        """
        without_effect(changed, _ignored_run(changed))

    def load(self) -> None:
        """Compile the model again, if ``release`` has dropped the compiled model."""
        self._session()

    def release(self) -> None:
        with self._lock:
            self._loaded = None

    def run(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Run one inference. Raises QaicRunError."""
        session = self._session()
        try:
            values = session.run(list(self.outputs), inputs)
        except Exception as cause:  # ONNX Runtime's errors have no class of their own above Exception
            raise _run_error(cause) from cause
        return dict(zip(self.outputs, values, strict=True))

    def benchmark(self, count: int | None, seconds: float | None, inputs: Arrays | None) -> Benchmark:
        """Run inferences in one thread for each instance, and return their times.

        The inputs and outputs of each thread are bound to the thread's own memory.
        """
        arrays = random_inputs(self.inputs) if inputs is None else inputs
        session = self._session()
        try:
            runs = [self._bound(session, arrays) for _ in range(self.settable()["num_activations"])]
            completed, taken = run_loops(runs, count, seconds)
        except Exception as cause:  # as in run
            if inputs is None and (sizes := _open_sizes(self.inputs)):
                raise QaicInputError(
                    name="input_dict",
                    expected="arrays that the model accepts, or sizes in the option onnx_define_symbol",
                    given=f"nothing; random arrays with size 1 for {sizes} fail: {_first_line(cause)}",
                ) from cause
            raise _run_error(cause) from cause
        return completed, completed / taken, taken, batch_size(arrays)

    def _bound(self, session: Any, arrays: Arrays) -> functools.partial[Any]:
        """Return a function that runs the model once on ``arrays``. Every call writes into the same outputs."""
        import onnxruntime

        first = session.io_binding()
        again = session.io_binding()
        for name, array in arrays.items():
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            first.bind_ortvalue_input(name, value)
            again.bind_ortvalue_input(name, value)
        for name in self.outputs:
            first.bind_output(name, "cpu")
        session.run_with_iobinding(first)
        for name, value in zip(self.outputs, first.get_outputs(), strict=True):
            again.bind_ortvalue_output(name, value)
        return functools.partial(session.run_with_iobinding, again)

    # --- compiling

    def _session(self) -> Any:
        loaded = self._loaded
        if loaded is not None:
            return loaded
        with self._lock:
            if self._loaded is None:
                self._loaded = self._compiled()
            return self._loaded

    def _compiled(self) -> Any:
        try:
            import onnxruntime
        except ImportError as cause:
            raise QaicUnavailableError(
                what="run on backend 'onnxruntime'",
                missing=f"the package onnxruntime cannot be imported ({cause})",
                advice="pip install 'dlinfer[qaic]'",
            ) from cause
        try:
            with self._prepared() as path:
                return onnxruntime.InferenceSession(
                    path, self._session_options(onnxruntime), providers=["CPUExecutionProvider"]
                )
        except QaicUnavailableError:
            raise
        except Exception as cause:  # as in run; the fault may be the user's model
            detail = f"ONNX Runtime refuses it: {_first_line(cause)}"
            raise QaicCompileError(path=str(self._model.path), detail=detail) from cause

    def _session_options(self, onnxruntime: Any) -> Any:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors; they are raised as well
        if "aic_num_cores" in self._options:
            options.intra_op_num_threads = min(self._options["aic_num_cores"], len(os.sched_getaffinity(0)))
        for symbol, size in self._options.get("onnx_define_symbol", {}).items():
            options.add_free_dimension_override_by_name(symbol, size)
        if self._output_dir is not None:
            self._output_dir.mkdir(parents=True, exist_ok=True)
            target = self._output_dir / f"{self._model.path.stem}.compiled.onnx"
            options.optimized_model_filepath = str(target)
            facts = facts_of(self._model)
            if facts is not None and facts.weights_beside:
                # Else the compiled model would name the external file of the model that it was compiled from.
                name = "session.optimized_model_external_initializers_file_name"
                options.add_session_config_entry(name, f"{target.name}.weights")
        return options

    @contextmanager
    def _prepared(self) -> Iterator[str]:
        """Yield the path of the model to compile: the user's file, or an fp16 copy, which is deleted at the end."""
        if not self._options.get("convert_to_fp16"):
            yield str(self._model.path)
            return
        with tempfile.TemporaryDirectory(prefix="dlinfer-qaic-") as folder:
            path = str(Path(folder) / "fp16.onnx")
            _convert_to_fp16(str(self._model.path), path)
            yield path


def _convert_to_fp16(source: str, target: str) -> None:
    """Write a copy of a model that computes in fp16. Its inputs and outputs keep their types, as they do on a card."""
    try:
        import onnx
        from onnxruntime.transformers.float16 import convert_float_to_float16
    except ImportError as cause:
        raise QaicUnavailableError(
            what="convert_to_fp16",
            missing=f"a package cannot be imported ({cause})",
            advice="pip install 'dlinfer[qaic]'",
        ) from cause
    model = onnx.load(source, load_external_data=False)
    _read_weights(model, Path(source).parent)
    onnx.load_external_data_for_model(model, str(Path(source).parent))  # of a node's own tensors
    converted = convert_float_to_float16(model, keep_io_types=True)
    # The converter also gives fp16 to inner values that stay float32 (a LayerNormalization's mean). ONNX Runtime finds
    # the types of all inner values itself.
    del converted.graph.value_info[:]
    # Weights beside the graph: a graph of over 2 GiB cannot be one file.
    onnx.save_model(converted, target, save_as_external_data=True)


def _read_weights(model: Any, folder: Path) -> None:
    """Read the external files of a model's weights into the model. Raises ValueError and OSError.

    onnx itself refuses files behind symbolic links, as a model hub's cache has them, but ONNX Runtime takes such files.
    """
    for tensor in model.graph.initializer:
        said = {entry.key: entry.value for entry in tensor.external_data}
        if "location" not in said:
            continue
        place = Path(said["location"])
        if place.is_absolute() or ".." in place.parts:
            raise ValueError(f"the weight {tensor.name!r} is outside the model's folder: {place}")
        with open(folder / place, "rb") as stream:
            stream.seek(int(said.get("offset", 0)))
            tensor.raw_data = stream.read(int(said["length"]) if "length" in said else -1)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")


def _ignored(options: Options) -> dict[str, str]:
    compiled = {
        name: "only the card's compiler uses it"
        for name, value in options.of_stage("compile").items()
        if value
    }
    session = {"oversubscription_name": "no card is shared"} if "oversubscription_name" in options else {}
    reasons = {**_ignored_run(options), **session, **compiled}
    return {name: why for name, why in reasons.items() if name not in HONOURED}


def _ignored_run(options: Mapping[str, Any]) -> dict[str, str]:
    reasons = {}
    if options.get("dev_id"):
        reasons["dev_id"] = "the CPU is device 0"
    if "set_size" in options:
        reasons["set_size"] = "there are no transfers for a queue to hide"
    return reasons


def _info(tensor: Any, model: ModelFile) -> TensorInfo:
    name = tensor.type.removeprefix("tensor(").removesuffix(")")
    if name not in DTYPES:
        raise QaicModelError(
            path=str(model.path),
            detail=f"{tensor.name!r} has the type {tensor.type}, which numpy does not have",
            advice="export the model with another type for it",
        )
    return TensorInfo(sizes_of(tensor.shape), np.dtype(DTYPES[name]))


def _open_sizes(infos: Mapping[str, TensorInfo]) -> str:
    """Return a text for a message: all input sizes that are not numbers."""
    sizes = {
        f"{name}[{dim}]" if size is None else size: None
        for name, info in infos.items()
        for dim, size in enumerate(info.shape or ())
        if not isinstance(size, int)
    }
    return ", ".join(sizes)


def _run_error(cause: Exception) -> QaicRunError:
    return QaicRunError(backend="onnxruntime", detail=_first_line(cause))


def _first_line(cause: Exception) -> str:
    return " ".join(str(cause).split())[:500]
