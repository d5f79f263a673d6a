"""The recipe of Sophgo's toolchain: the compiler, BMRuntime and chip emulators, all in the package tpu_mlir.

tpu_mlir (on PyPI, for CPython 3.10 only) depends on torch, transformers and more, which the conversion of ONNX does not
need. So packages are installed without their dependencies, and the recipe lists every package that is really imported.
"""

from dlinfer.toolchain.recipe import Toolchain

# The recipe's digest covers these texts: any change to them reinstalls every environment.
_TORCH = (
    '"""Stands in for torch, of '
    + '''which tpu_mlir's ONNX front end asks one thing: torch.tensor(x).numpy()."""

import numpy


class Tensor:
    def __init__(self, values):
        self._values = numpy.asarray(values)

    def numpy(self):
        return self._values


def tensor(values):
    return Tensor(values)
'''
)

_EXTENSIONS = '''"""Stands in for onnxruntime_extensions, which tpu_mlir uses for ops that are not ONNX's."""


class PyOp:
    dt_float = 1
    dt_int64 = 7


def onnx_op(*args, **kwargs):
    return lambda function: function


class PyOrtFunction:
    @staticmethod
    def from_model(*args, **kwargs):
        raise RuntimeError("custom ONNX ops need the package onnxruntime_extensions, which is not here")
'''

# The package's own C library is older than Debian 12's loader: no program starts with it.
_C_LIBRARY = tuple(f"tpu_mlir/lib/third_party/{name}.so*" for name in ("libc", "libm", "libpthread"))

_PACKAGES = """
    tpu_mlir==1.30.2 numpy==1.24.3 protobuf==3.20.3 onnx==1.14.1 onnxruntime==1.16.3 coloredlogs==15.0.1
    humanfriendly==10.0 flatbuffers==25.12.19 packaging==26.3 sympy==1.14.0 mpmath==1.3.0
    onnxsim==0.4.17 rich==15.0.0 markdown-it-py==4.3.0 mdurl==0.1.2 Pygments==2.21.0
    typing_extensions==4.16.0 Pillow==10.0.0 opencv-python-headless==4.8.0.76 tqdm==4.70.1 psutil==7.2.2
    plotly==7.1.0 narwhals==2.29.0 filelock==4.1.0
"""

TOOLCHAIN = Toolchain(
    name="sophgo",
    summary="Sophgo's compiler, runtime and chip emulators (tpu_mlir 1.30.2)",
    python="3.10",
    packages=tuple(_PACKAGES.split()),
    installed_bytes=1_500_000_000,
    download_bytes=450_000_000,
    files={"torch.py": _TORCH, "onnxruntime_extensions.py": _EXTENSIONS},
    remove=_C_LIBRARY,
    check="import tpu_mlir.entry, onnx, onnxruntime, onnxsim, cv2, PIL, plotly",
)
