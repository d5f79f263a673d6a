"""A finding's script reproduces it with torch and dlinfer alone."""

import ast
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.fuzz.generate import generate
from tests.fuzz.program import DOORS, Program
from tests.fuzz.script import script


def _wrong(model: torch.nn.Module, **_: Any) -> Any:
    def unsqueezed(one: Any) -> Any:
        return one.unsqueeze(0) if isinstance(one, torch.Tensor) else one

    return lambda **given: tree_map(unsqueezed, model(**given))


def _opaque(program: Program) -> bool:
    return any("opaque" in step.features for step in program.steps)


def _of_door(door: str, seed: int = 0) -> Program:
    programs = map(generate, range(seed, 10**6))
    return next(
        one
        for one in programs
        if one.door == door and len(one.calls) > 1 and not one.threads and not _opaque(one)
    )


def _ends_with(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> int:
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    return int(ended.value.code or 0)


@pytest.mark.parametrize("seed", range(0, 60, 10))
def test_it_tells_right_from_wrong(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    text = script(_of_door("compile", seed), "inductor", 'value of result 0: "wrong"')
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    assert _ends_with(tmp_path / "right.py", text, monkeypatch) == 0
    monkeypatch.setattr(torch, "compile", _wrong)
    assert _ends_with(tmp_path / "wrong.py", text, monkeypatch) == 1
    assert "compiled result 0" in capsys.readouterr().out


def test_it_brings_its_custom_ops(tmp_path: Path):
    """In another process, because a custom op is defined once a process."""
    program = next(one for one in map(generate, range(10**6)) if _opaque(one))
    path = tmp_path / "script.py"
    path.write_text(script(program, "inductor", "why"))
    run = f"""import runpy
names = runpy.run_path({str(path)!r})
print(names["run"](names["eagerly"], names["new_model"]()))"""
    ended = subprocess.run(
        [sys.executable, "-c", run], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "'result', 0, tensor" in ended.stdout


@pytest.mark.parametrize("door", DOORS)
def test_it_imports_nothing_of_the_tests(door: str):
    tree = ast.parse(script(_of_door(door), "openvino", "why"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} == {
        "contextlib",
        "sys",
        "tempfile",
        "math",
        "torch",
        "dlinfer",
    }
