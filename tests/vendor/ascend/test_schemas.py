"""The golden schemas are those of the vendor's own binaries, and of exactly the ops that the kernels call."""

import pytest
import torch

from tests.vendor.ascend import schemas
from tests.vendor.ascend.vendor_package import environment, stubs


def test_the_golden_file_has_the_ops_that_kernels_call():
    assert {schemas.name(one) for one in schemas.golden()} == schemas.called()
    assert len(schemas.called()) > 15


def test_every_line_is_a_schema():
    for line in schemas.golden():
        assert str(torch._C.parse_schema(line)) == line


@pytest.mark.slow
def test_the_vendor_s_binaries_declare_the_same():
    if reason := environment.missing():
        pytest.skip(reason)
    assert schemas.golden() == schemas.chosen(environment.read_schemas())


def test_stubs_are_no_functions_where_data_is_meant():
    lines = list(stubs.definitions(["_ZTIN3abcE", "_ZTHx", "PyLong_Type", "aclInit", "aclrtGetSocName"]))
    assert len(lines) == 3
    assert lines[0].startswith("void *data0[")
    assert lines[1].endswith("long call3(void) { return 0; }")
    assert "Ascend910B2" in lines[2]
