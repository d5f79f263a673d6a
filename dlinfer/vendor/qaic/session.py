"""``Session``: the inference API that Qualcomm documents, on a card or on ONNX Runtime.

The class follows "class Session" in Qualcomm's Cloud AI SDK user guide. docs/vendors/qaic.md lists the decisions where
the guide contradicts itself. docs/vendors/vendor_documents.md lists the tests of each call.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from dlinfer.runtime.session.metrics import Metrics
from dlinfer.vendor.qaic import metrics_text, profile
from dlinfer.vendor.qaic.backends.aic import AicBackend
from dlinfer.vendor.qaic.backends.backend import Backend
from dlinfer.vendor.qaic.backends.onnxruntime import OnnxruntimeBackend
from dlinfer.vendor.qaic.errors import QaicMetricsError, QaicOptionError
from dlinfer.vendor.qaic.model_file import locate
from dlinfer.vendor.qaic.options.file import read_options
from dlinfer.vendor.qaic.options.options import Options
from dlinfer.vendor.qaic.tensors import ShapeDict, check_inputs

BACKENDS = {"aic": AicBackend, "onnxruntime": OnnxruntimeBackend}
NUM_INFERENCES = 40


class Session:
    """A compiled model, ready to run. Several threads may call ``run`` at the same time.

    model_path: an .onnx file, which is compiled now; a compiled QPC (.bin); a pattern that matches one of these; or a
        folder with a programqpc.bin.
    backend: ``aic`` (the default) is a card with Qualcomm's SDK; ``onnxruntime`` is this machine's CPU.
    options_path: a YAML file of options.
    options: override the file's. options/table.py lists them. For one without effect on the backend, the fallback
        policy applies.

    Raises QaicModelError if the file cannot be opened.
    Raises QaicOptionError for a wrong option.
    Raises QaicCompileError if the compiler refuses the model.
    Raises QaicUnavailableError, which lists the missing parts of the SDK or packages.
    """

    def __init__(
        self, model_path: Any, *, backend: str | None = None, options_path: Any = None, **options: Any
    ) -> None:
        in_file = {} if options_path is None else read_options(options_path)
        named = in_file.pop("backend", "aic")
        backend = named if backend is None else backend
        if not isinstance(backend, str) or backend not in BACKENDS:
            expected = " or ".join(map(repr, BACKENDS)) + " (Qualcomm plans 'qnn' and has not published it)"
            raise QaicOptionError(option="backend", given=backend, expected=expected)
        self._options = Options.of(in_file, options)
        self._profiler = profile.Profiler() if self._options.get("enable_profiling") else None
        self._metrics = Metrics() if self._profiler or self._options.get("enable_metrics") else None
        self._backend: Backend = BACKENDS[backend](locate(model_path), self._options)
        self._inputs = self._backend.inputs

    # --- what it is

    @property
    def model_input_shape_dict(self) -> ShapeDict:
        """Each input's name -> its shape and numpy dtype.

        A symbolic size that no option defines is its symbol's name.
        """
        return ShapeDict.of(self._backend.inputs)

    @property
    def model_output_shape_dict(self) -> ShapeDict:
        """Each output's name -> its shape and numpy dtype."""
        return ShapeDict.of(self._backend.outputs)

    def backend_options(self) -> dict[str, Any]:
        """Return the options that may change after creation, with their present values."""
        return self._backend.settable()

    def update_backend_options(self, **options: Any) -> None:
        """Change options that ``backend_options`` returns.

        If one of them is wrong, the method raises QaicOptionError and changes none.
        """
        changed = self._options.changes(options)
        self._backend.update(changed)
        self._options.update(changed)

    # --- running

    def setup(self) -> None:
        """Load the network to the device now. Without this call, the first ``run`` loads it."""
        self._backend.load()

    def reset(self) -> None:
        """Release all device resources. The next ``setup`` or ``run`` allocates them again."""
        self._backend.release()

    def run(self, input_dict: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the model. Takes a dict from input name to array and returns a dict from output name to array.

        Raises QaicInputError and QaicRunError.
        """
        check_inputs(input_dict, self._inputs, self._backend.defaults)
        if self._metrics is None:
            return self._backend.run(input_dict)
        start = time.perf_counter()
        if self._profiler is None:
            outputs = self._backend.run(input_dict)
        else:
            outputs = self._profiler.call(self._backend.run, input_dict)
        self._metrics.record(time.perf_counter() - start)
        return outputs

    def run_benchmark(
        self,
        num_inferences: int | None = None,
        inf_time: float | None = None,
        input_dict: Mapping[str, np.ndarray] | None = None,
    ) -> tuple[int, float, float, int]:
        """Return the completed inferences, the inferences a second, the seconds, and the batch size.

        num_inferences: the number of inferences; 40 if both this and ``inf_time`` are None.
        inf_time: the seconds to run for, instead of a number of inferences.
        input_dict: the inputs of every inference, as in ``run``. None means random inputs, with 1 for sizes that are
            not numbers.
        Only inferences are timed, and ``get_metrics`` does not include them.
        Raises QaicOptionError for a wrong number, or if num_inferences and inf_time are both given.
        Raises QaicInputError and QaicRunError.
        """
        if num_inferences is not None and inf_time is not None:
            both = {"num_inferences": num_inferences, "inf_time": inf_time}
            raise QaicOptionError(
                option="run_benchmark", given=both, expected="num_inferences or inf_time, not both"
            )
        if num_inferences is not None and (type(num_inferences) is not int or num_inferences < 1):
            raise QaicOptionError(
                option="num_inferences", given=num_inferences, expected="an int of at least 1"
            )
        if inf_time is not None and (
            isinstance(inf_time, bool)
            or not isinstance(inf_time, (int, float))
            or not 0 < inf_time < float("inf")
        ):
            raise QaicOptionError(option="inf_time", given=inf_time, expected="a number of seconds above 0")
        if input_dict is not None:
            check_inputs(input_dict, self._inputs, self._backend.defaults)
        count = None if inf_time is not None else num_inferences or NUM_INFERENCES
        return self._backend.benchmark(count, inf_time, input_dict)

    # --- what it took

    def get_metrics(self) -> dict[str, Any]:
        """Return the count, percentiles, sum and mean of the latencies of ``run`` in seconds, see ``Metrics.summary``.

        Raises QaicMetricsError unless the option enable_metrics or enable_profiling is True.
        """
        if self._metrics is None:
            raise QaicMetricsError(call="get_metrics", needed="enable_metrics=True or enable_profiling=True")
        return self._metrics.summary()

    def print_metrics(self) -> None:
        """Print the result of ``get_metrics`` in eleven lines. Raises QaicMetricsError as ``get_metrics`` does."""
        print(metrics_text.text(self.get_metrics()))

    def print_profile_data(self, n: int) -> None:
        """Print a table of the functions that were called, with their times, for each of the first ``n`` runs.

        Raises QaicMetricsError unless the option enable_profiling is True.
        Raises QaicOptionError unless ``n`` is an int of at least 1.
        """
        if self._profiler is None:
            raise QaicMetricsError(call="print_profile_data", needed="enable_profiling=True")
        if type(n) is not int or n < 1:
            raise QaicOptionError(option="n", given=n, expected="an int of at least 1")
        print(profile.text(self._profiler.runs[:n]))
