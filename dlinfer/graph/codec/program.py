"""Write and read programs as JSON. A process that reads a program runs it without a capture or a compilation."""

import base64
from collections.abc import Callable

import torch

from dlinfer.graph.codec.arguments import (
    CodecError,
    Json,
    decode,
    dtype_of,
    encode,
    refuse_malformed,
    short_name,
)
from dlinfer.graph.ir.program import Constant, Function, Join, Program, Step, Value

_LARGEST_CONSTANT = 1 << 20
_REFERENCES = {"node": Value, "constant": Constant}


def write_program(program: Program) -> Json:
    """Return the program as JSON. Raises CodecError if an argument or a constant has no written form."""
    return {
        "name": program.name,
        "inputs": list(program.inputs),
        "steps": [_write_step(step) for step in program.steps],
        "output": encode(program.output),
        "constants": {name: _write_tensor(value) for name, value in program.constants.items()},
    }


def read_program(
    data: Json,
    resolve: Callable[[str], Function],
    join: Join | None = None,
    restore: Callable[[set[str]], None] | None = None,
) -> Program:
    """Return the program that ``write_program`` wrote.

    resolve: returns the function that a step's ``callee`` names.
    join: joins steps into fewer calls; see ``Program``.
    restore: called with the names of all callees, before ``resolve`` is called for any of them.
    Raises CodecError for other data. Errors that the three functions raise pass unchanged.
    """
    with refuse_malformed():
        name, inputs = str(data["name"]), [str(item) for item in data["inputs"]]
        steps = [_read_step(item) for item in data["steps"]]
        output = decode(data["output"], _REFERENCES)
        constants = {key: _read_tensor(value) for key, value in data["constants"].items()}
    if restore is not None:
        restore({step.callee for step in steps})
    return Program(name, inputs, steps, output, resolve, constants, join)


def _write_step(step: Step) -> Json:
    return {
        "results": encode(step.results),
        "kind": step.kind,
        "callee": step.callee,
        "args": [encode(arg) for arg in step.args],
        "kwargs": {key: encode(value) for key, value in step.kwargs.items()},
        "line": step.line,
    }


def _read_step(data: Json) -> Step:
    args = tuple(decode(arg, _REFERENCES) for arg in data["args"])
    kwargs = {key: decode(value, _REFERENCES) for key, value in data["kwargs"].items()}
    return Step(decode(data["results"], {}), data["kind"], data["callee"], args, kwargs, data["line"])


def _write_tensor(value: object) -> Json:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        raise CodecError("a constant is not a strided tensor")
    if value.nbytes > _LARGEST_CONSTANT:
        raise CodecError(f"a constant has {value.nbytes} bytes, which is too large")
    if not value.is_contiguous():
        raise CodecError("a constant is not contiguous")  # compiled loops rely on its strides
    raw = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return {
        "dtype": short_name(value.dtype),
        "shape": list(value.shape),
        "device": str(value.device),
        "bytes": base64.b64encode(raw).decode(),
    }


def _read_tensor(data: Json) -> torch.Tensor:
    dtype, raw = dtype_of(data["dtype"]), bytearray(base64.b64decode(data["bytes"], validate=True))
    if not raw:
        return torch.empty(data["shape"], dtype=dtype, device=data["device"])
    return torch.frombuffer(raw, dtype=dtype).reshape(data["shape"]).to(data["device"])
