"""The vendor openvino: a probe that imports nothing and says what to do, behind cpu, with cpu's kernels."""

import subprocess
import sys
from importlib import metadata, util

import pytest

from dlinfer.graph.cache import fingerprint
from dlinfer.vendor import discovery, openvino
from dlinfer.vendor.openvino import VENDOR

ADVICE = 'pip install "dlinfer[openvino]"'


def found(monkeypatch, version):
    monkeypatch.setattr(util, "find_spec", lambda name: object() if version else None)
    monkeypatch.setattr(metadata, "version", lambda name: version)
    return VENDOR.probe()


@pytest.mark.parametrize(
    ("version", "available", "reason"),
    [
        (None, False, "the package openvino is not installed"),
        ("2025.4.1", False, "openvino 2025.4.1 is older than 2026.1"),
        ("2026.1.0", True, "openvino 2026.1.0"),
        ("2026.4.1-18000-abc", True, "openvino 2026.4.1-18000-abc"),
        ("2027.0.0.dev0", True, "openvino 2027.0.0.dev0"),
    ],
)
def test_the_probe_tells_version_and_next_step(monkeypatch, version, available, reason):
    probe = found(monkeypatch, version)
    assert (probe.available, probe.reason, probe.next_step) == (
        available,
        reason,
        "" if available else ADVICE,
    )


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
@pytest.mark.parametrize(
    ("limit", "flags", "available"),
    [
        ("AVX2", "avx2 avx512f", False),
        ("sse41", "avx2 avx512f", False),
        ("AVX512_CORE", "avx2 avx512f", True),
        ("AVX2", "avx2", True),
        ("", "avx2 avx512f", True),
    ],
)
def test_a_limit_under_which_openvino_ends_the_process(monkeypatch, variable, limit, flags, available):
    for one in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(one, raising=False)
    monkeypatch.setenv(variable, limit)
    monkeypatch.setattr(fingerprint, "cpu_flags", lambda: flags)
    probe = found(monkeypatch, "2026.4.1")
    assert probe.available == available
    if not available:
        assert probe.reason == f"with {variable}={limit}, OpenVINO ends the process on a CPU with AVX-512"
        assert probe.next_step == f"unset {variable}, or set it to AVX512_CORE"


def test_probing_and_loading_kernels_import_no_openvino():
    code = (
        "import sys; from dlinfer.vendor.openvino import VENDOR; VENDOR.probe(); VENDOR.load_kernels(); "
        "print([name for name in sys.modules if name.partition('.')[0] == 'openvino'])"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert child.stdout.strip() == "[]"


def test_cpu_stays_the_default():
    assert "openvino" in discovery.names()
    default = discovery.default("cpu")
    assert default is not None
    assert default.name == "cpu"
    assert discovery.get("cpu").priority > VENDOR.priority


def test_its_kernels_are_those_of_the_cpu():
    assert list(discovery.kernels_of(VENDOR)) == list(
        discovery.kernels_of(discovery.get("cpu"))
    )  # see test_kernels.py
    assert openvino.OLDEST == (2026, 1)
