"""A stand-in for Qualcomm's package ``qaic``: its published calls, with ONNX Runtime where the card would be.

It proves that dlinfer calls the package as published; it proves nothing about a card. Published are, and checked here:
the names, keywords and results of "class Session" in quic/cloud-ai-sdk-pages (docs/Python-API/qaic/qaic.md), and what
the samples of quic/cloud-ai-sdk do with a Session (samples/python/qaic_features, models/language_processing/encoder):
there the shape dicts are properties, in the page they are methods. ``AS_IN_THE_GUIDE`` chooses.
A "QPC" is the JSON that the stand-in compiler of this folder writes beside a copy of the model.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

AS_IN_THE_GUIDE = False
CALLS: list[tuple[str, object]] = []  # every call, for tests to look at

_TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}


def Session(model_path: str, **kwargs: Any) -> "_Session":  # noqa: N802 - the published name of a factory
    return _Session(model_path, **kwargs)


class _Session:
    def __init__(
        self,
        model_path: str,
        *,
        num_activations: int = 1,
        set_size: int = 10,
        dev_id: int = 0,
        oversubscription_name: str = "",
    ) -> None:
        import onnxruntime

        given = {"num_activations": num_activations, "set_size": set_size, "dev_id": dev_id}
        CALLS.append(("Session", {"model_path": model_path, **given, "group": oversubscription_name}))
        qpc = json.loads(Path(model_path).read_text())
        if qpc["stand_in"] != "QPC":
            raise RuntimeError("not a QPC")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        for symbol, size in qpc["symbols"].items():
            options.add_free_dimension_override_by_name(symbol, int(size))
        self._network = onnxruntime.InferenceSession(
            str(Path(model_path).parent / qpc["model"]), options, providers=["CPUExecutionProvider"]
        )
        self._options = given
        self._loaded = False

    def _described(self, ones: Any) -> object:
        shapes = {one.name: (list(one.shape), np.dtype(_TYPES[one.type])) for one in ones}
        return (lambda: shapes) if AS_IN_THE_GUIDE else shapes

    @property
    def model_input_shape_dict(self) -> object:
        return self._described(self._network.get_inputs())

    @property
    def model_output_shape_dict(self) -> object:
        return self._described(self._network.get_outputs())

    def backend_options(self) -> dict[str, int]:
        return dict(self._options)

    def update_backend_options(self, **kwargs: int) -> None:
        CALLS.append(("update_backend_options", kwargs))
        if not kwargs.keys() <= self._options.keys():
            raise TypeError(f"unknown options {sorted(kwargs.keys() - self._options.keys())}")
        self._options |= kwargs

    def setup(self) -> None:
        CALLS.append(("setup", None))
        self._loaded = True

    def reset(self) -> None:
        CALLS.append(("reset", None))
        self._loaded = False

    def run(self, input_dict: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        CALLS.append(("run", sorted(input_dict)))
        if not all(array.flags.c_contiguous for array in input_dict.values()):
            raise ValueError("a buffer is not contiguous")
        self._loaded = True
        names = [one.name for one in self._network.get_outputs()]
        values: Any = self._network.run(names, input_dict)
        # Flat: the samples reshape what they get by model_output_shape_dict.
        return {name: value.ravel() for name, value in zip(names, values, strict=True)}

    def run_benchmark(
        self, num_inferences: int = 40, inf_time: int | None = None, input_dict: dict | None = None
    ) -> tuple[int, float, float, int]:
        CALLS.append(("run_benchmark", (num_inferences, inf_time, input_dict and sorted(input_dict))))
        inputs = input_dict or {
            one.name: np.ones(one.shape, _TYPES[one.type]) for one in self._network.get_inputs()
        }
        start, done = time.perf_counter(), 0
        while done < num_inferences if inf_time is None else time.perf_counter() - start < inf_time:
            self._network.run(None, inputs)
            done += 1
        taken = time.perf_counter() - start
        return done, done / taken, taken, next(iter(inputs.values())).shape[0]
