#!/usr/bin/env bash
# Runs the tests of torch's private parts on one version of torch, in an environment of its own, and compiles the CPU
# kernels against that torch's headers. `make test-seam` runs it for the oldest and the newest version that
# pyproject.toml admits. Another torch than the locked one comes from PyPI as
# the CUDA build (5 GB on disk) unless TORCH_INDEX names an index with a CPU build. torch's libraries link to nearly all
# of the nvidia packages, so `import torch` fails without them, also where there is no card. It could do without
# triton, cuda-bindings, cusolver and nvtx, 1.2 of the 5 GB.
#
#   requirements/seam.sh 2.12.1 [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."

version=$1
shift
environment=.venv-seam/$version
python=$environment/bin/python
# What the tests import besides torch, in the locked versions; torch brings what it needs itself.
packages='expecttest|hypothesis|attrs|sortedcontainers|iniconfig|pluggy|pygments|pytest|pytest-timeout'
packages+='|ml_dtypes|onnx|onnx-ir|onnxscript|protobuf|numpy|packaging|rich|markdown-it-py|mdurl'

if ! "$python" -c "import sys, torch; sys.exit(torch.__version__.split('+')[0] != '$version')" 2>/dev/null; then
    echo "seam: installing torch $version into $environment"
    rm -rf "$environment"
    "${PYTHON:-python3.11}" -m venv "$environment"
    pip=("$python" -m pip --disable-pip-version-check install --quiet)
    "${pip[@]}" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torch==$version"
    grep -iE "^($packages)==" requirements/lock.txt | "${pip[@]}" --no-deps --requirement /dev/stdin
fi

echo "seam: torch $("$python" -c 'import torch; print(torch.__version__)')"
PYTHONPATH=. "$python" -m pytest -p no:cacheprovider -q "$@" \
    tests/graph/torch_private tests/vendor/cpu/test_native.py
