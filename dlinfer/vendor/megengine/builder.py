"""Build a MegEngine model from a list of nodes. This script runs in the toolchain's environment, on its CPython 3.10.

Usage: python builder.py GRAPH.json MODEL.mge
"""

import importlib
import json
import operator
import sys


def operations(megengine, numpy):
    """Return a dict from each kind of node to the function that computes it from the node's operands and attributes."""
    F = megengine.functional  # noqa: N806

    def subtensor(x, axis, start, stop, step):
        return x[(slice(None),) * axis + (slice(start, stop, step),)]

    def reduce(x, how, axes, keepdims):
        function = {"sum": F.sum, "mean": F.mean, "max": F.max, "min": F.min}[how]
        for axis in sorted(axes, reverse=True):
            x = function(x, axis=axis, keepdims=keepdims)
        return x

    def later(rows, columns):
        return megengine.tensor(numpy.triu(numpy.ones((rows, columns), "float32"), 1)) > 0.5

    def full(value, shape):
        element = megengine.tensor(numpy.full((1,) * len(shape), value, "float32"))
        return F.broadcast_to(element, tuple(shape))

    def convolution(x, weight, stride, padding, dilation):
        return F.conv2d(x, weight, None, tuple(stride), tuple(padding), tuple(dilation))

    functions = "exp log sqrt abs sin cos tanh sigmoid relu gelu maximum minimum where matmul softmax"
    return {
        **{name: getattr(F, name) for name in functions.split()},
        "neg": operator.neg,
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "div": operator.truediv,
        "less": operator.lt,
        "less_equal": operator.le,
        "greater": operator.gt,
        "greater_equal": operator.ge,
        "equal": F.equal,
        "not_equal": F.not_equal,
        "cast": lambda a, to: a.astype(to),
        "reduce": reduce,
        "reshape": lambda a, shape: F.reshape(a, tuple(shape)),
        "transpose": lambda a, order: F.transpose(a, tuple(order)),
        "broadcast": lambda a, shape: F.broadcast_to(a, tuple(shape)),
        "subtensor": subtensor,
        "concat": lambda *parts, axis: F.concat(list(parts), axis=axis),
        "rows": lambda weight, index: F.embedding(index, weight),
        "convolution": convolution,
        "later": later,
        "full": full,
    }


def main(graph_path, model_path):
    import numpy

    # Not by ``import``: pyright reads this file where MegEngine is not installed.
    megengine = importlib.import_module("megengine")
    importlib.import_module("megengine.functional")
    trace = importlib.import_module("megengine.jit").trace

    with open(graph_path) as file:
        graph = json.load(file)
    names = [name for name, _, _ in graph["inputs"]]
    table = operations(megengine, numpy)

    def run(*tensors):
        values = dict(zip(names, tensors))  # noqa: B905 - Python 3.10 style; the lengths are equal by construction
        for node in graph["nodes"]:
            operands = [values[item["ref"]] if isinstance(item, dict) else item for item in node["operands"]]
            values[node["name"]] = table[node["op"]](*operands, **node["attributes"])
        return [values[name] for name in graph["outputs"]]

    traced = trace(run, symbolic=True, capture_as_const=True)
    traced(*[megengine.tensor(numpy.zeros(shape, dtype)) for _, shape, dtype in graph["inputs"]])
    results = [f"result_{index}" for index in range(len(graph["outputs"]))]
    traced.dump(model_path, arg_names=names, output_names=results, optimize_for_inference=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
