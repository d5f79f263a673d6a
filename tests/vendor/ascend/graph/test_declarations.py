"""Reading REG_OP."""

from tests.vendor.ascend.graph.reg_ops.documents import Attribute, Operand, read

TEXT = r'''
def Norm(x):
    """REG_OP(Norm)\n
    .INPUT(x, TensorType({DT_FLOAT32, DT_BF16,
                          DT_FLOAT16}))\n
    .OPTIONAL_INPUT(bias, "T")\n
    .DYNAMIC_INPUT(rows, TensorType::IndexNumberType())\n
    .OUTPUT(y, TensorType({BasicType(), DT_BOOL}))\n
    .REQUIRED_ATTR(axes, ListInt)\n
    .ATTR(epsilon, Float, 1e-6)\n
    .DATATYPE(T, TensorType({DT_BF16}))\n
    """
'''


def test_a_declaration_is_read():
    norm = read(TEXT)["Norm"]
    assert norm.inputs == [
        Operand("x", "required", frozenset({"FLOAT", "BF16", "FLOAT16"})),
        Operand("bias", "optional", frozenset({"BF16"}), "T"),
        Operand("rows", "dynamic", frozenset({"INT32", "INT64"})),
    ]
    assert norm.outputs == [Operand("y", "required", None)]  # what BasicType holds is not told
    assert norm.attributes == {
        "axes": Attribute("axes", "ListInt", required=True),
        "epsilon": Attribute("epsilon", "Float", required=False),
    }
