"""The house keeps its shape (docs/architecture.md): directions, quiet imports, short documented files."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "dlinfer"

# A room is a package path; a module belongs to the longest room that it starts with. Order is the direction:
# a room may import itself and the rooms before it.
ROOMS = (
    "dlinfer",  # the package's __init__
    "dlinfer.errors",
    "dlinfer.utils",
    "dlinfer.settings",
    "dlinfer.toolchain",
    "dlinfer.vendor",  # base.py, discovery.py and __init__: the noun and its lazy loading
    "dlinfer.ops",
    "dlinfer.graph",
    "dlinfer.vendor.*",  # each vendor's folder
    "dlinfer.framework",
    "dlinfer.cli",
    "dlinfer.__main__",
)
NOUN = ("dlinfer.vendor.base", "dlinfer.vendor.discovery")

# The autoload hook runs in everybody's `import torch`; it reaches the adaptor inside a function only.
AUTOLOAD = "dlinfer._autoload"
AUTOLOAD_REACHES = {"dlinfer.framework.lmdeploy_ext"}

# Third-party packages by room, longest name first; what is not listed is refused. A vendor's SDK belongs in a
# row for its folder, a framework in the row of its adaptor.
TORCH = {"torch"}
THIRD_PARTY = {
    "dlinfer.framework.lmdeploy_ext": TORCH
    | {"lmdeploy", "transformers", "numpy", "packaging", "safetensors"},
    "dlinfer.framework": TORCH | {"packaging"},
    "dlinfer.cli.explain": TORCH | {"transformers"},
    "dlinfer.cli": TORCH | {"rich"},
    "dlinfer.vendor.megengine": TORCH | {"numpy"},
    "dlinfer.vendor.onnxruntime": TORCH | {"numpy", "onnx", "onnxruntime", "onnxscript"},
    "dlinfer.vendor.openvino": TORCH | {"numpy", "openvino"},
    "dlinfer.vendor.qaic": TORCH | {"numpy", "onnx", "onnx_ir", "onnxruntime", "qaic", "yaml"},
    "dlinfer.vendor.sophgo.compiler_driver": {"numpy"},  # run by the toolchain's Python
    "dlinfer.vendor.sophgo.llm": TORCH | {"numpy", "transformers"},
    "dlinfer.vendor.sophgo": TORCH | {"numpy", "onnx", "onnx_ir"},
    "dlinfer.vendor": TORCH,
    "dlinfer.graph.onnx": TORCH | {"onnx", "onnx_ir", "onnxscript"},
    "dlinfer.runtime.artifact.sealing": TORCH | {"cryptography"},
    "dlinfer.runtime.options": TORCH | {"yaml"},
    "dlinfer.graph.seam.onnx": TORCH | {"onnx_ir"},
    "dlinfer.graph": TORCH | {"numpy", "sympy"},  # guards and ranges of symbolic sizes are sympy's
    "dlinfer.ops": TORCH,
    "dlinfer.utils": TORCH,
    "dlinfer": set(),
}


# --- reading the imports


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(root: Path) -> dict[str, Path]:
    return {module_name(path, root): path for path in sorted((root / "dlinfer").rglob("*.py"))}


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, those inside functions included."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = (
                ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            )
            base = ".".join(part for part in (above, node.module) if part)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in known else base


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def room(name: str) -> str:
    if within(name, "dlinfer.vendor"):
        return "dlinfer.vendor" if name == "dlinfer.vendor" or name in NOUN else "dlinfer.vendor.*"
    return max((r for r in ROOMS if within(name, r)), key=len)


def violations(root: Path) -> list[str]:
    """Every import that runs against the directions, as "module:line imports target: why"."""
    known = modules(root)
    found = []
    for name, path in known.items():
        for line, target in imports(name, path, known):
            why = _against_direction(name, target) if within(target, "dlinfer") else _foreign(name, target)
            if why:
                found.append(f"{name}:{line} imports {target}: {why}")
    return found


def _against_direction(name: str, target: str) -> str:
    if name == AUTOLOAD:
        allowed = any(within(target, reached) for reached in AUTOLOAD_REACHES)
        return "" if allowed else "the autoload hook reaches its adaptor only"
    if target == AUTOLOAD:
        return "" if room(name) == "dlinfer.framework" else "the autoload hook belongs to the adaptors"
    if ROOMS.index(room(target)) > ROOMS.index(room(name)):
        return f"{room(name)} stands below {room(target)}"
    if room(name) == room(target) == "dlinfer.vendor.*" and name.split(".")[2] != target.split(".")[2]:
        return "one vendor never imports another"
    return ""


def _foreign(name: str, target: str) -> str:
    package = target.partition(".")[0]
    allowed = next(names for prefix, names in THIRD_PARTY.items() if within(name, prefix))
    return "" if package in sys.stdlib_module_names or package in allowed else "not a package of this room"


def test_imports_run_one_way():
    assert violations(REPOSITORY) == []


@pytest.mark.parametrize(
    ("module", "line", "why"),
    [
        ("dlinfer.errors", "from dlinfer import settings", "stands below"),
        ("dlinfer.settings", "import torch", "not a package of this room"),
        ("dlinfer.vendor.base", "import dlinfer.ops", "stands below"),
        ("dlinfer.ops.norm", "from dlinfer.vendor.cpu import VENDOR", "stands below"),
        ("dlinfer.ops.norm", "from ...graph import backend", "stands below"),
        ("dlinfer.graph.backend", "def f():\n    from dlinfer.vendor import cpu", "stands below"),
        ("dlinfer.vendor.cpu", "import dlinfer.vendor.reference", "one vendor never"),
        ("dlinfer.vendor.cpu", "from .. import reference", "one vendor never"),
        ("dlinfer.vendor.cpu", "import openvino", "not a package of this room"),
        ("dlinfer.vendor.cpu", "from dlinfer.framework import patching", "stands below"),
        ("dlinfer.framework.patching", "import lmdeploy.messages", "not a package of this room"),
        ("dlinfer.ops.norm", "from lmdeploy import utils", "not a package of this room"),
        ("dlinfer.framework", "import dlinfer.cli", "stands below"),
        ("dlinfer._autoload", "from dlinfer import errors", "reaches its adaptor only"),
        ("dlinfer._autoload", "import torch", "not a package of this room"),
    ],
)
def test_the_reader_of_imports_sees(tmp_path, module, line, why):
    tree = (
        "vendor.cpu",
        "vendor.reference",
        "vendor.base",
        "ops.norm",
        "graph.backend",
        "framework.patching",
    )
    for name in ("dlinfer.errors", "dlinfer.settings", *(f"dlinfer.{part}" for part in tree)):
        folder = tmp_path.joinpath(*name.split("."))
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        for parent in folder.relative_to(tmp_path).parents[:-1]:
            (tmp_path / parent / "__init__.py").touch()
    guilty = tmp_path.joinpath(*module.split("."))
    guilty.mkdir(exist_ok=True)
    (guilty / "__init__.py").write_text(line)
    assert len(violations(tmp_path)) == 1
    assert why in violations(tmp_path)[0]


# --- quiet imports


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


def test_import_dlinfer_loads_only_the_standard_library():
    found = in_a_new_process(
        "before = set(sys.modules)\nimport dlinfer\nfound['new'] = sorted(set(sys.modules) - before)"
    )
    foreign = {name.partition(".")[0] for name in found["new"]} - set(sys.stdlib_module_names)
    assert foreign == {"dlinfer"}
    assert "torch" not in found["new"]


def test_import_of_every_public_module_loads_no_framework_and_no_sdk():
    found = in_a_new_process(
        "import torch\nbefore = set(sys.modules)\n"
        "import dlinfer\nfor name in dlinfer.__all__: getattr(dlinfer, name)\n"
        "found['new'] = sorted(set(sys.modules) - before)"
    )
    assert FRAMEWORKS_AND_SDKS & {name.partition(".")[0] for name in found["new"]} == set()
    own = [name for name in found["new"] if within(name, "dlinfer")]
    assert [
        name for name in own if room(name) in ("dlinfer.vendor.*", "dlinfer.framework", "dlinfer.cli")
    ] == []
    assert "torch._dynamo" not in found["new"]  # over a second, for nothing in eager mode


def test_import_dlinfer_loads_one_module_of_ours_and_not_torch():
    """So it takes milliseconds."""
    found = in_a_new_process(
        "before = set(sys.modules)\nimport dlinfer\nfound['new'] = sorted(set(sys.modules) - before)"
    )
    assert [name for name in found["new"] if name.startswith(("dlinfer", "torch"))] == ["dlinfer"]
    assert {name.partition(".")[0] for name in found["new"]} - set(sys.stdlib_module_names) == {"dlinfer"}


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


# --- readable files


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_files_are_short_and_say_what_they_are(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    assert ast.get_docstring(ast.parse(text)) or not text


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Public functions and classes of a file, and the public methods of those classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node
            for member in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                    yield f"{node.name}.{member.name}", member


@pytest.mark.parametrize("path", sorted((PACKAGE / "ops").glob("*.py")), ids=lambda path: path.name)
def test_public_names_of_ops_are_documented(path):
    definitions = public_definitions(ast.parse(path.read_text()))
    missing = [name for name, node in definitions if not ast.get_docstring(node)]
    assert missing == []


def test_every_op_documents_every_parameter():
    from dlinfer import ops

    missing = [
        f"{op.name}: {parameter}"
        for op in ops.registry().values()
        for parameter in op.parameters
        if parameter not in (op.__doc__ or "") + (op.reference.__doc__ or "")
    ]
    assert missing == []
