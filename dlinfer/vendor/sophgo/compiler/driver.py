"""Compile an ONNX file to a bmodel by Sophgo's own tools. This script runs on the toolchain's CPython 3.10.

Usage: ``python driver.py job.json`` in an empty folder. The module ``compile`` writes job.json.
At the start of each step the script prints a line that begins with ``dlinfer step:``.
"""

import importlib
import json
import os
import runpy
import sys


def main(path):
    """Run the job in the file at ``path``. A failed step raises an exception or exits the process with its status."""
    with open(path) as file:
        job = json.load(file)
    tools = importlib.import_module("tpu_mlir")  # sets the search paths of its tools
    root = str(tools.__path__[0])
    sys.path[:0] = [os.path.join(root, "python"), os.path.join(root, "python", "tools")]
    _announce("transform")
    _tool(root, "model_transform", job["transform"])
    if job["calibration"]:
        _announce("calibrate")
        _calibrate(job)
    _announce("compile")
    _tool(root, "model_deploy", job["deploy"])


def _announce(step):
    print(f"dlinfer step: {step}", flush=True)


def _tool(root, name, arguments):
    sys.argv = [name, *arguments]
    try:
        runpy.run_path(os.path.join(root, "python", "tools", f"{name}.py"), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def _calibrate(job):
    """Write the calibration table of the compiler: the smallest and largest value of each tensor over all inputs."""
    import numpy

    pymlir = importlib.import_module("pymlir")
    pymlir.set_mem_mode("value_mem")  # gives every tensor its own memory
    module = pymlir.module()
    module.load(job["mlir"])
    ranges = {}
    for path in job["calibration"]:
        for name, value in numpy.load(path).items():
            module.set_tensor(name, value.astype(numpy.float32), value.shape)
        module.invoke(True)
        for name, tensor in module.get_all_tensor().items():
            low, high = ranges.get(name, (0.0, 0.0))
            ranges[name] = (min(low, float(tensor.min())), max(high, float(tensor.max())))
    with open(job["table"], "w") as file:
        file.write("# op_name    threshold    min    max\n")
        for name, (low, high) in ranges.items():
            file.write(f"{name} {max(-low, high, 1e-6):.7f} {low:.7f} {high:.7f}\n")


if __name__ == "__main__":
    main(sys.argv[1])
