"""Write and read interfaces as JSON: ports, symbols with their ranges, conditions, and constant inputs."""

from dlinfer.graph.codec.arguments import (
    CodecError,
    Json,
    decode,
    device_of,
    dtype_of,
    encode,
    name_of,
    refuse_malformed,
    short_name,
)
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.interface.ports import Port, Range, bounds_of
from dlinfer.graph.torch_private.expressions import Size, parse_condition, parse_size

_FLAGS = ("number", "held", "resolved")


def write_interface(interface: Interface) -> Json:
    """Return an interface as JSON. Raises CodecError if a value has no written form.

    The ports' flag ``written`` is left out, because ``read_graph`` finds it in the graph.
    """
    return {
        "symbols": [
            {"name": name, "low": low, "high": high, "hint": interface.examples.get(name)}
            for name, (low, high) in interface.symbols.items()
        ],
        "conditions": [str(condition) for condition in interface.conditions],
        "inputs": [_write_port(port) for port in interface.inputs],
        "constants": [[place, encode(value)] for place, value in interface.constants.items()],
        "outputs": [_write_port(port) for port in interface.outputs],
    }


def read_interface(data: Json) -> Interface:
    """Return the interface that ``write_interface`` wrote. Raises CodecError for other data."""
    with refuse_malformed():
        symbols = {name_of(item["name"]): _read_range(item) for item in data["symbols"]}
        interface = Interface(
            tuple(_read_port(item, symbols) for item in data["inputs"]),
            tuple(_read_port(item, symbols) for item in data["outputs"]),
            symbols,
            tuple(map(parse_condition, data["conditions"])),
            {place: decode(value, {}) for place, value in data["constants"]},
            {item["name"]: item["hint"] for item in data["symbols"] if item["hint"] is not None},
        )
        if not set(interface.constants) <= set(range(len(interface.inputs) + len(interface.constants))):
            raise CodecError("a constant has a place that no input has")
        if not set(symbols) <= set(interface.places):
            raise CodecError(f"no input has the size {min(set(symbols) - set(interface.places))}")
        for condition in interface.conditions:
            if not set(condition.symbols) <= set(symbols):
                raise CodecError(f"a condition reads an unknown size: {condition}")
        return interface


def _write_port(port: Port) -> Json:
    written: dict[str, Json] = {
        "name": port.name,
        "dtype": short_name(port.dtype),
        "device": str(port.device),
        "sizes": [_write_size(size) for size in port.sizes],
    }
    if port.strides is not None:
        written["strides"] = [_write_size(stride) for stride in port.strides]
    if port.offset is not None:
        written["offset"] = port.offset
    return written | {flag: True for flag in _FLAGS if getattr(port, flag)}


def _read_port(data: Json, symbols: dict[str, Range]) -> Port:
    sizes = tuple(None if size is None else parse_size(size) for size in data["sizes"])
    name, strides, offset = data["name"], data.get("strides"), data.get("offset")
    if type(name) is not str or type(offset) not in (int, type(None)):
        raise CodecError("the name of an input is not text, or its offset is not an integer")
    return Port(
        name,
        dtype_of(data["dtype"]),
        sizes,
        bounds_of(sizes, symbols),
        device_of(data["device"]),
        None if strides is None else tuple(map(parse_size, strides)),
        offset,
        **{flag: bool(data.get(flag)) for flag in _FLAGS},
    )


def _write_size(size: Size | None) -> int | str | None:
    return None if size is None else str(size) if size.fixed is None else size.fixed


def _read_range(item: Json) -> Range:
    low, high, hint = item["low"], item["high"], item["hint"]
    if type(low) is not int or not all(type(limit) in (int, type(None)) for limit in (high, hint)):
        raise CodecError("the limits of a range are not integers")
    if (high is not None and high <= low) or (hint is not None and not low <= hint):
        raise CodecError(f"a size has the range {low} to {high}")
    if hint is not None and high is not None and hint > high:
        raise CodecError(f"the example {hint} of a size is above its highest value {high}")
    return low, high
