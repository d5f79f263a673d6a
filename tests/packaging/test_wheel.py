"""``pip install`` of the wheel beside LMDeploy is all it takes: ``device_type="cpu"`` then works."""

import json
import os
import re
import shutil
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from dlinfer.vendor.cpu.compiler import COMPILERS
from dlinfer.vendor.cpu.prebuilt import LEVELS
from examples.tiny_models.build import build
from tests.e2e.processes import run_process
from tests.workers import ROOT

SCRIPT = Path(__file__).with_name("user_script.py")
# The user's script after the one line that takes the place of torch's autoload.
ONE_LINE_FIRST = """
import dlinfer.framework.lmdeploy_ext
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(2000)]


@dataclass(frozen=True)
class Environment:
    """A throw-away virtual environment with LMDeploy and the installed wheel."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def packages(self) -> Path:
        major, minor = sys.version_info[:2]
        return self.folder / "lib" / f"python{major}.{minor}" / "site-packages"


def pip(*arguments: str, **env: str) -> None:
    done = run_process([sys.executable, "-m", "pip", *arguments], timeout=500, **env)
    assert done.returncode == 0, done.stdout + done.stderr


def borrow_packages(source: Path, target: Path) -> None:
    """Link every installed package into another environment, save dlinfer and editable installs."""
    for entry in source.iterdir():
        unwanted = entry.name.startswith("dlinfer") or entry.suffix == ".pth"
        if not unwanted and not (target / entry.name).exists():
            (target / entry.name).symlink_to(entry)


def unoptimized_compiler(folder: Path) -> Path:
    """A C++ compiler that takes a fourth of the time for a level: its last word is -O0.

    It has to accept all sources at all levels as the true one does. What optimized kernels compute is what the
    kernels' own tests say, and ``make test-full`` installs a wheel that has them.
    """
    chosen = os.environ.get("CXX") or next(name for name in COMPILERS if shutil.which(name))
    made = folder / "unoptimized-c++"
    made.write_text(f'#!/bin/sh\nexec {chosen} "$@" -O0\n')
    made.chmod(0o755)
    return made


@pytest.fixture(scope="module")
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree; without optimized kernels where no test marked full is about to install it."""
    folder = tmp_path_factory.mktemp("wheel")
    here = [item for item in request.session.items if item.path == request.path]
    optimized = any(item.get_closest_marker("full") for item in here)
    env = {} if optimized else {"CXX": str(unoptimized_compiler(tmp_path_factory.mktemp("compiler")))}
    pip(
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(folder),
        str(ROOT),
        **env,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("environment"))
    venv.create(made.folder, symlinks=True)
    borrow_packages(Path(sysconfig.get_path("purelib")), made.packages)
    # Without --no-deps: pip itself confirms that torch and the rest satisfy the wheel, and --no-index that it
    # has nothing to download for it.
    pip("--python", made.python, "install", "--no-index", str(wheel))
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "qwen2"
    build("qwen2", folder)
    return folder


def run_user_script(environment: Environment, model: Path, where: str, **env: str):
    return run_process(
        [environment.python, str(SCRIPT), str(model), where], timeout=900, PYTHONPATH="", **env
    )


def answer_of(done, environment: Environment) -> list[int]:
    """The tokens that the script printed, once it is sure that the wheel's dlinfer made them."""
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert Path(answer["dlinfer"]).is_relative_to(environment.packages)
    assert len(answer["tokens"]) == 8
    return answer["tokens"]


@pytest.fixture(scope="module")
def tokens(environment: Environment, model: Path) -> list[int]:
    """What the script prints when all happens in its own process."""
    return answer_of(run_user_script(environment, model, "here"), environment)


def test_wheel_holds_the_package_and_nothing_else(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    outside = [name for name in names if not re.match(r"dlinfer/|dlinfer-[\d.]+\.dist-info/", name)]
    assert not outside
    assert "dlinfer/_autoload.py" in names
    assert sum(name.startswith("dlinfer/vendor/cpu/prebuilt_kernels/") for name in names) == len(LEVELS)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    sources = [path for path in (ROOT / "dlinfer").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    missing = {str(path.relative_to(ROOT)) for path in sources} - set(names)
    assert not missing  # templates and kernels' sources among them


@pytest.mark.full
def test_device_type_cpu_works_in_the_users_process(tokens: list[int]):
    assert tokens


@pytest.mark.parametrize("where", ["spawned", "mp_engine"])
@pytest.mark.full
def test_device_type_cpu_works_in_spawned_workers(
    where: str, environment: Environment, model: Path, tokens: list[int]
):
    assert answer_of(run_user_script(environment, model, where), environment) == tokens


@pytest.mark.full
def test_without_autoload_lmdeploy_refuses_and_one_line_helps(
    environment: Environment, model: Path, tokens: list[int]
):
    refused = run_user_script(environment, model, "here", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert refused.returncode != 0
    assert "AssertionError" in refused.stderr

    command = [environment.python, "-P", "-c", ONE_LINE_FIRST, str(SCRIPT), str(model), "here"]
    helped = run_process(command, timeout=900, PYTHONPATH="", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert answer_of(helped, environment) == tokens


@pytest.mark.parametrize("kernels", ["of the gate", pytest.param("optimized", marks=pytest.mark.full)])
def test_the_wheels_kernels_need_no_compiler(kernels: str, environment: Environment, tmp_path: Path):
    code = "from dlinfer.vendor.cpu import native; print(native.why_not(), native.library_name())"
    nowhere = {"CXX": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": ""}
    done = run_process([environment.python, "-P", "-c", code], timeout=100, **nowhere)
    assert done.stdout.startswith("None dlinfer_cpu-"), done.stdout + done.stderr


def test_console_script_is_installed(environment: Environment):
    done = run_process([str(environment.folder / "bin" / "dlinfer"), "doctor", "--json"], timeout=500)
    assert json.loads(done.stdout)
