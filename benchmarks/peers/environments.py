"""Environments of the peers, each of its own, made at the first call: nothing of theirs gets into ours."""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path.home() / ".cache" / "dlinfer-bench" / "environments"
PACKAGES = {
    "genai": ("openvino-genai", "optimum-intel[openvino]"),
    "llama.cpp": ("numpy", "gguf", "llama-cpp-python"),
    "plots": ("matplotlib",),
}
"""What pip installs; llama-cpp-python is compiled there, for this CPU, which takes some ten minutes."""

_BUILD = {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}


def python_of(name: str) -> str:
    """The interpreter of a peer's environment. Raises CalledProcessError where pip cannot install it."""
    folder = ROOT / name
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.is_file():
        print(f"installing {', '.join(PACKAGES[name])} into {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", *PACKAGES[name]]
        subprocess.run(command, check=True, env={**_inherited(), **_BUILD})
        done.touch()
    return str(python)


def _inherited() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
