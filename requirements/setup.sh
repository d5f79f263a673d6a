#!/usr/bin/env bash
# Creates .venv in the project's root and installs the locked set and dlinfer itself (editable). `make setup` runs it.
# `make test-pythons` makes one environment for each version of CPython.
#
#   ENVIRONMENT=FOLDER       another folder than .venv
#   PYTHON=/path/to/python   the interpreter to build on; the first suitable one on PATH when not given
#   TORCH_INDEX=URL          one more package index for torch. PyPI's torch for Linux is the CUDA build with gigabytes
#                            of nvidia packages; https://download.pytorch.org/whl/cpu has the small CPU build.
set -euo pipefail
cd "$(dirname "$0")/.."

lock=requirements/lock.txt
environment=${ENVIRONMENT:-.venv}
python=$environment/bin/python
log=$environment/setup.log
# 3.11 first: the lock was resolved and is tested on it.
candidates=(${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3})

find_python() {
    local without_venv=""
    for candidate in "${candidates[@]}"; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        # Debian and Ubuntu ship these two in a package of their own.
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$candidate"
            return
        fi
        without_venv=$candidate
    done
    if [[ -n $without_venv ]]; then
        echo "setup: $without_venv lacks the venv module; on Debian or Ubuntu: apt install python3-venv" >&2
    else
        echo "setup: no Python 3.11 or newer among: ${candidates[*]}; install one, or give PYTHON=/path/to/python" >&2
    fi
    return 1
}

install() {
    # pip's chatter goes to the log; a failure shows the end of it.
    if ! "$python" -m pip --disable-pip-version-check install --progress-bar off "$@" >>"$log" 2>&1; then
        tail -n 25 "$log" >&2
        echo "setup: failed: pip install $*" >&2
        echo "setup: the whole log is in $log; run the command again to go on from here" >&2
        exit 1
    fi
}

if ! "$python" -m pip --version >/dev/null 2>&1; then
    base=$(find_python)
    echo "setup: creating $environment with $base ($("$base" --version))"
    "$base" -m venv --clear "$environment"
fi

echo "setup: torch ($(grep -m1 '^torch==' "$lock"))"
# With its dependencies, because the CUDA build cannot be imported without its nvidia packages; the CPU build has none.
install --constraint "$lock" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch

echo "setup: the other packages of $lock"
# The lock is complete. --no-deps keeps out what LMDeploy's metadata asks for: torch<=2.12.1, tilelang, nvidia-*.
install --no-deps --requirement "$lock"

echo "setup: dlinfer (editable)"
install --no-deps --no-build-isolation --editable .

# yapf, which LMDeploy imports by way of mmengine, writes a cache at its first import, and another process that imports
# it meanwhile fails. So the first import is here.
"$python" -c "import yapf" >>"$log" 2>&1 || true

echo "setup: done in $SECONDS s"
