#!/usr/bin/env bash
# Resolves pyproject.toml's extras anew in a throw-away environment and writes lock.txt. `make lock` runs it.
# Afterwards run the whole test matrix: the lock is what the project claims to work with.
#
#   PYTHON, TORCH_INDEX      as in setup.sh
#   TORCH, LMDEPLOY          the versions to lock
set -euo pipefail
cd "$(dirname "$0")/.."

torch=${TORCH:-2.13.0}
lmdeploy=${LMDEPLOY:-0.18.0}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"${PYTHON:-python3.11}" -m venv "$scratch/venv"
pip=("$scratch/venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install -q ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torch==$torch" ".[dev]"
"${pip[@]}" install -q --no-deps "lmdeploy==$lmdeploy"

# Left out: pip itself, dlinfer, what auto-round only downloads texts with, and what only CUDA needs. triton (1 GB) is asked for by xgrammar, which uses it for
# CUDA tensors alone, and by torch's CUDA build, which pins its own version.
# Local version labels (2.13.0+cpu) go, so that either build of torch satisfies the lock.
{
    echo "# Written by \`make lock\`: torch $torch, LMDeploy $lmdeploy and all that pyproject.toml's dev extra asks for."
    echo "# Complete, so install it with --no-deps (requirements/setup.sh says why)."
    "${pip[@]}" freeze --all --exclude pip --exclude dlinfer |
        grep -viE '^(datasets|dill|multiprocess|pandas|pyarrow|xxhash|triton|nvidia-[a-z0-9-]*|cuda-[a-z-]*)==' |
        sed -E 's/\+[a-z0-9.]+$//'
} >"$scratch/lock.txt"
mv "$scratch/lock.txt" requirements/lock.txt
echo "lock: $(grep -c == requirements/lock.txt) packages in requirements/lock.txt"
