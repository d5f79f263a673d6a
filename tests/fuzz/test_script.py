"""A finding's script reproduces it with torch and dlinfer alone."""

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fuzz.generate import generate
from tests.fuzz.program import DOORS, Program
from tests.fuzz.script import script


def _wrong(model: torch.nn.Module, **_: Any) -> Any:
    return lambda **given: tuple(one.unsqueeze(0) for one in model(**given))


def _of_door(door: str, seed: int = 0) -> Program:
    programs = map(generate, range(seed, 10**6))
    return next(one for one in programs if one.door == door and len(one.calls) > 1 and not one.threads)


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
