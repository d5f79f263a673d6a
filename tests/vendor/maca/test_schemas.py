"""The golden file has exactly what the kernels call, and the simulation has its signatures."""

import torch

from tests.vendor.maca import schemas
from tests.vendor.maca.packages import flash_mla
from tests.vendor.maca.simulated_card import attention, calling, later_latent


def test_the_golden_file_has_what_kernels_call():
    assert {schemas.name(one) for one in schemas.golden()} == schemas.called()
    assert len(schemas.called()) > 12


def test_every_line_of_torch_s_ops_is_a_schema():
    for space in ("_C", "_C_cache_ops", "_moe_C", "mcoplib.lmdeploy"):
        for line in schemas.golden(space):
            text = line.partition("::")[2]
            parsed = torch._C.parse_schema(text)
            assert [one.name for one in parsed.arguments] == [
                part.split("=")[0].split()[-1]
                for part in text.partition("(")[2].partition(")")[0].split(", ")
            ]


def test_stand_ins_of_python_functions_have_the_golden_signatures():
    for space, made in (
        ("flash_attn", (attention.flash_attn_varlen_func, attention.flash_attn_with_kvcache)),
        ("flash_mla", (flash_mla.get_mla_metadata, flash_mla.flash_mla_with_kvcache)),
        ("later flash_mla", (later_latent.get_mla_metadata, later_latent.flash_mla_with_kvcache)),
    ):
        assert [f"{space}::{calling.signature_of(one)}" for one in made] == schemas.golden(space)
