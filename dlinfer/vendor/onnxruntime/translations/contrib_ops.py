"""Functions that write ONNX Runtime's own ops into a model, with only the parameters that translations use.

onnxscript knows only the ops of ONNX. The schemas in this module make it accept ONNX Runtime's ops, without a check of
types.
"""

import functools
from collections.abc import Sequence
from typing import Any

DOMAIN = "com.microsoft"


def fused_mat_mul(a: Any, b: Any, *, trans_b: bool = False, alpha: float = 1.0) -> Any:
    """Write alpha * a @ b for float32 and float64.

    trans_b: whether to transpose the last two dimensions of ``b`` first.
    """
    return _call("FusedMatMul", (a, b), 1, transB=int(trans_b), alpha=alpha)


def simplified_layer_norm(x: Any, scale: Any, eps: float) -> Any:
    """Write an RMS norm over the last dimension.

    The op is ONNX Runtime's own, although ONNX Runtime keeps it in ONNX's domain.
    """
    return _call("SimplifiedLayerNormalization", (x, scale), 1, domain="", axis=-1, epsilon=eps, stash_type=1)


def skip_simplified_layer_norm(x: Any, skip: Any, scale: Any, eps: float) -> tuple[Any, Any]:
    """Write x + skip and its RMS norm over the last dimension. Return the norm, then the sum.

    x: a tensor of 2 or 3 dimensions.
    """
    results = _call("SkipSimplifiedLayerNormalization", (x, skip, scale), 4, epsilon=eps)
    return results[0], results[3]


def mat_mul_n_bits(
    a: Any,
    b: Any,
    scales: Any,
    zero_points: Any,
    in_features: int,
    out_features: int,
    block: int,
    accuracy_level: int,
) -> Any:
    """Write a @ b.T in float32. ``b`` has 4-bit numbers in blocks.

    b: uint8 [out_features, blocks, block / 2].
    scales: float32 [out_features, blocks].
    zero_points: uint8 [out_features, blocks / 2 rounded up]; None means that all are 8.
    accuracy_level: see ``OrtOptions``.
    """
    operands = (a, b, scales) if zero_points is None else (a, b, scales, zero_points)
    return _call(
        "MatMulNBits",
        operands,
        1,
        K=in_features,
        N=out_features,
        bits=4,
        block_size=block,
        accuracy_level=accuracy_level,
    )


def _call(name: str, inputs: Sequence[Any], outputs: int, *, domain: str = DOMAIN, **attributes: Any) -> Any:
    from onnxscript import evaluator

    kinds = tuple((key, type(value).__name__) for key, value in attributes.items())
    schema = _schema(name, domain, len(inputs), outputs, kinds)
    interpreter: Any = evaluator.default()
    return interpreter.eval(schema, list(inputs), attributes)


@functools.cache
def _schema(name: str, domain: str, inputs: int, outputs: int, kinds: tuple[tuple[str, str], ...]) -> Any:
    from onnx.defs import OpSchema

    types = ["tensor(float)", "tensor(double)", "tensor(float16)"]
    attribute = {"int": OpSchema.AttrType.INT, "float": OpSchema.AttrType.FLOAT}
    return OpSchema(
        name,
        domain,
        1,
        inputs=[OpSchema.FormalParameter(f"input_{index}", "T") for index in range(inputs)],
        outputs=[OpSchema.FormalParameter(f"output_{index}", "T") for index in range(outputs)],
        type_constraints=[("T", types, "")],
        attributes=[OpSchema.Attribute(key, attribute[kind], required=True) for key, kind in kinds],
    )
