"""Programs as JSON: what another process needs to run one without capturing or compiling anything."""

import base64
from typing import Any

import torch

from dlinfer.graph.ir.program import Constant, Program, Step, Value

_LARGEST_CONSTANT = 1 << 20

_TORCH_NAMES: tuple[type, ...] = (torch.dtype, torch.layout, torch.memory_format)


class NotStorableError(Exception):
    """A program holds something that has no place in a file."""


def to_json(program: Program) -> dict[str, Any]:
    """The program as plain data. Raises NotStorableError."""
    return {
        "name": program.name,
        "inputs": list(program.inputs),
        "steps": [_step(step) for step in program.steps],
        "output": _encode(program.output),
        "constants": {name: _tensor(value) for name, value in program.constants.items()},
    }


def parts_of(data: dict[str, Any]) -> dict[str, Any]:
    """The arguments of Program besides ``resolve``. Raises KeyError, TypeError or ValueError on other data."""
    return {
        "name": str(data["name"]),
        "inputs": [str(name) for name in data["inputs"]],
        "steps": [_to_step(item) for item in data["steps"]],
        "output": _decode(data["output"]),
        "constants": {name: _to_tensor(value) for name, value in data["constants"].items()},
    }


def _step(step: Step) -> dict[str, Any]:
    return {
        "results": step.results if isinstance(step.results, str) else list(step.results),
        "kind": step.kind,
        "callee": step.callee,
        "args": [_encode(arg) for arg in step.args],
        "kwargs": {key: _encode(value) for key, value in step.kwargs.items()},
        "line": step.line,
    }


def _to_step(data: dict[str, Any]) -> Step:
    results = data["results"]
    return Step(
        results if isinstance(results, str) else tuple(results),
        data["kind"],
        data["callee"],
        tuple(_decode(arg) for arg in data["args"]),
        {key: _decode(value) for key, value in data["kwargs"].items()},
        data["line"],
    )


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Value):
        return {"value": value.name}
    if isinstance(value, Constant):
        return {"constant": value.name}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_encode(item) for item in value]}
    if isinstance(value, slice):
        return {"slice": [_encode(item) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, _TORCH_NAMES):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise NotStorableError(f"an argument of type {type(value).__name__}")


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return [_decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "value":
        return Value(content)
    if kind == "constant":
        return Constant(content)
    if kind == "tuple":
        return tuple(_decode(item) for item in content)
    if kind == "slice":
        return slice(*(_decode(item) for item in content))
    if kind == "torch":
        value = getattr(torch, content)
        if not isinstance(value, _TORCH_NAMES):
            raise ValueError(f"torch.{content} is no dtype, layout or memory format")
        return value
    if kind == "device":
        return torch.device(content)
    raise ValueError(f"unknown kind of argument {kind!r}")


def _tensor(value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        raise NotStorableError("a constant that is no strided tensor")
    if value.nbytes > _LARGEST_CONSTANT:
        raise NotStorableError(f"a constant of {value.nbytes} bytes")
    if not value.is_contiguous():
        raise NotStorableError("a constant that is not contiguous")  # compiled loops rely on its strides
    flat = value.detach().cpu().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "device": str(value.device),
        "bytes": base64.b64encode(raw).decode(),
    }


def _to_tensor(data: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, data["dtype"])
    raw = bytearray(base64.b64decode(data["bytes"], validate=True))
    if not raw:
        return torch.empty(data["shape"], dtype=dtype, device=data["device"])
    return torch.frombuffer(raw, dtype=dtype).reshape(data["shape"]).to(data["device"])
