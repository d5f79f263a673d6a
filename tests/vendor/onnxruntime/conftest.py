"""These tests run real sessions of ONNX Runtime on its CPU provider."""

import pytest
import torch

from dlinfer import settings
from dlinfer.graph.report import report
from dlinfer.ops.core import fallback
from tests.caches import fresh_cache

for _package in ("onnxruntime", "onnx", "onnxscript", "onnx_ir"):
    pytest.importorskip(_package, reason=f"needs {_package}: pip install 'dlinfer[onnxruntime]'")


@pytest.fixture
def graph_mode(tmp_path):
    """Nothing compiled before is seen, by Dynamo or in the reports; no fallback was counted."""
    torch._dynamo.reset()
    report.reset()
    fallback.reset()
    with settings.override(cache_dir=str(fresh_cache(tmp_path / "cache")), fallback="error"):
        yield
    torch._dynamo.reset()
