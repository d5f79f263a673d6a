"""Writes a model that holds a convolution's weights, as models of training do. Runs in the toolchain's environment.

Usage: python constant_convolution.py MODEL.mge
"""

import importlib
import sys

import numpy

# Not by ``import``: there is no such package where this file is read but not run.
megengine = importlib.import_module("megengine")
functional = importlib.import_module("megengine.functional")
trace = importlib.import_module("megengine.jit").trace


def main(path):
    weight = megengine.Parameter(numpy.linspace(-1, 1, 64 * 64 * 9, dtype="float32").reshape(64, 64, 3, 3))
    traced = trace(
        lambda data: functional.conv2d(data, weight, None, 1, 1), symbolic=True, capture_as_const=True
    )
    traced(megengine.tensor(numpy.zeros((1, 64, 16, 16), "float32")))
    traced.dump(path, arg_names=["data"], output_names=["result_0"], optimize_for_inference=False)


if __name__ == "__main__":
    main(sys.argv[1])
