"""Importing dlinfer is quiet: no SDK, no framework, nothing compiled or patched."""

import ast
import json
import os
import subprocess
import sys

from tests.architecture.imports import PACKAGE, within
from tests.architecture.rooms import room

FRAMEWORKS_AND_SDKS = {"lmdeploy", "transformers", "openvino", "onnxruntime", "torch_npu", "ray", "rich"}


def in_a_new_process(code: str, **environment: str) -> dict:
    """Run code that fills ``found``; torch's autoload is off, so that dlinfer is loaded by nobody else."""
    child = subprocess.run(
        [sys.executable, "-c", f"import json, sys, time\nfound = {{}}\n{code}\nprint(json.dumps(found))"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environment},
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def test_import_of_every_public_module_loads_no_framework_and_no_sdk():
    found = in_a_new_process(
        "import torch\nbefore = set(sys.modules)\n"
        "import dlinfer\nfor name in dlinfer.__all__: getattr(dlinfer, name)\n"
        "found['new'] = sorted(set(sys.modules) - before)"
    )
    assert FRAMEWORKS_AND_SDKS & {name.partition(".")[0] for name in found["new"]} == set()
    own = [name for name in found["new"] if within(name, "dlinfer")]
    outer = ("dlinfer.vendor.*", "dlinfer.cli", "dlinfer.framework.lmdeploy_ext")
    assert [name for name in own if any(within(room(name), one) for one in outer)] == []
    assert "torch._dynamo" not in found["new"]  # over a second, for nothing in eager mode


def test_import_dlinfer_loads_one_module_of_ours_and_not_torch():
    """So it takes milliseconds."""
    found = in_a_new_process(
        "before = set(sys.modules)\nimport dlinfer\nfound['new'] = sorted(set(sys.modules) - before)"
    )
    assert [name for name in found["new"] if name.startswith(("dlinfer", "torch"))] == ["dlinfer"]
    assert {name.partition(".")[0] for name in found["new"]} - set(sys.stdlib_module_names) == {"dlinfer"}


def test_the_command_line_and_the_supervisor_of_servers_need_no_torch():
    """torch takes seconds to import and 180 MiB of memory, which ``dlinfer serve`` would hold beside its servers."""
    found = in_a_new_process(
        "from dlinfer.cli import parser_of_all\nparser_of_all()\n"
        "from dlinfer.embedding.folder import task_of\n"
        "from dlinfer.serve import addresses, join, options, placement, router, supervisor\n"
        "from dlinfer.vendor.cpu.host import cpus\n"
        "placement.place(cpus.usable_cpus().physical(), cpus.usable_cpus().quota, 1)\n"
        "found['torch'] = 'torch' in sys.modules"
    )
    assert found["torch"] is False


def test_the_autoload_hook_loads_only_the_standard_library():
    found = in_a_new_process(
        "before = set(sys.modules)\n"
        "from dlinfer import _autoload\n_autoload.install()\n_autoload.install()\n"
        "found['new'] = sorted(set(sys.modules) - before)\n"
        "found['finders'] = sum('autoload' in type(finder).__module__ for finder in sys.meta_path)"
    )
    assert [name for name in found["new"] if name.startswith("dlinfer")] == ["dlinfer", "dlinfer._autoload"]
    assert {name.partition(".")[0] for name in found["new"]} - set(sys.stdlib_module_names) == {"dlinfer"}
    assert found["finders"] == 1


def test_the_autoload_hook_imports_only_the_standard_library_at_its_top():
    for node in ast.parse((PACKAGE / "_autoload.py").read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            )
            assert all(str(name).partition(".")[0] in sys.stdlib_module_names for name in names)
