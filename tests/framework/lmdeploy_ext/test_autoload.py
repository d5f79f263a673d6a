"""The autoload hook: it must not hurt ``import torch`` or LMDeploy, whatever state LMDeploy is in."""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow

MESSAGES = """
    import torch
    from dataclasses import dataclass

    @dataclass
    class PytorchEngineConfig:
        device_type: str = 'cuda'
        def __post_init__(self{more}):
            assert self.device_type in ['cuda'], f'invalid device_type: {{self.device_type}}'
"""


@pytest.fixture
def environment(tmp_path):
    """Runs a script with a made-up LMDeploy of the given version in front of the real one."""

    def run(script: str, files: dict[str, str] | None = None, version: str = "0.18.0", **variables: str):
        site = tmp_path / "site"
        if files is not None:
            package = site / "lmdeploy"
            package.mkdir(parents=True)
            for name, text in files.items():
                (package / f"{name}.py").write_text(textwrap.dedent(text))
            info = site / f"lmdeploy-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lmdeploy\nVersion: {version}\n")
        path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
            env={**os.environ, "PYTHONPATH": path, **variables},
        )

    return run


def test_without_lmdeploy_torch_loads_only_the_hook(environment):
    done = environment("""
        import sys
        import torch
        print(sorted(name for name in sys.modules if name.partition(".")[0] in ("dlinfer", "lmdeploy")))
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['dlinfer', 'dlinfer._autoload']"


def test_lmdeploy_missing(environment):
    done = environment("""
        import sys
        import torch, dlinfer._autoload as hook
        sys.modules["lmdeploy"] = None
        try:
            import lmdeploy
        except ImportError as error:
            print("import error:", error)
        import dlinfer.framework.lmdeploy_ext
        print("failure:", hook.failure())
    """)
    assert done.returncode == 0, done.stderr
    assert "import error: import of lmdeploy halted" in done.stdout
    assert "failure: None" in done.stdout


def test_lmdeploy_broken_shows_its_own_error(environment):
    done = environment("import torch, lmdeploy", {"__init__": "raise ImportError('libfoo.so is missing')"})
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ImportError: libfoo.so is missing")


def test_lmdeploy_too_new_says_so_in_one_line_and_keeps_its_own_devices(environment):
    files = {
        "__init__": "from .messages import PytorchEngineConfig\nfrom .version import __version__",
        "messages": MESSAGES.format(more=", strict=True"),
        "version": "__version__ = '9.0.0'",
    }
    done = environment(
        """
        import lmdeploy
        print(lmdeploy.PytorchEngineConfig(device_type="cuda"))
        try:
            lmdeploy.PytorchEngineConfig(device_type="cpu")
        except AssertionError as error:
            print("refused by LMDeploy:", error)
        """,
        files,
        version="9.0.0",
    )
    assert done.returncode == 0, done.stderr
    assert "refused by LMDeploy: invalid device_type: cpu" in done.stdout
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1, done.stderr
    assert "lmdeploy 9.0.0 is outside the tested range" in lines[0]


def test_a_fault_of_ours_leaves_lmdeploy_as_it_is_and_is_kept_for_doctor(environment):
    files = {
        "__init__": "from .messages import PytorchEngineConfig",
        "messages": MESSAGES.format(more=""),
    }
    done = environment(
        """
        import torch, dlinfer._autoload as hook
        import dlinfer.framework.lmdeploy_ext.install as install
        def fail(module):
            raise RuntimeError("a fault of ours")
        install.on_import = fail
        import lmdeploy
        print(lmdeploy.PytorchEngineConfig())
        print(hook.failure())
        """,
        files,
    )
    assert done.returncode == 0, done.stderr
    assert "PytorchEngineConfig(device_type='cuda')" in done.stdout
    assert "a fault of ours" in done.stdout
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("dlinfer:"))
    assert "LMDeploy runs without dlinfer, because a patch failed: RuntimeError: a fault of ours." in line


@pytest.mark.full
def test_with_autoload_off_the_one_line_alternative_works(environment):
    script = """
        import sys
        {line}
        from lmdeploy import PytorchEngineConfig
        try:
            print(PytorchEngineConfig(device_type="cpu").device_type)
        except AssertionError as error:
            print("refused:", error)
    """
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    without = environment(script.format(line=""), **off)
    assert "refused: invalid device_type: cpu" in without.stdout, without.stderr
    line = "import dlinfer.framework.lmdeploy_ext"
    assert environment(script.format(line=line), **off).stdout.strip() == "cpu"
