"""The golden signatures are those of exactly the functions that the kernels call, and differences are seen."""

import inspect
import types

from tests.vendor.camb import signatures


def test_the_golden_file_has_the_functions_that_kernels_call():
    assert set(signatures.lines()) == signatures.called()
    assert len(signatures.called()) > 15


def test_every_line_is_a_signature_that_says_where_it_is_from():
    text = signatures.GOLDEN.read_text()
    assert f"torch_mlu_ops {signatures.VERSION}" in text and "commit " in text
    for line in signatures.lines().values():
        assert len(signatures.signature(line).parameters) >= 3


OTHER_NAMES = {
    ("group_gemm", "m_list"): "group_list",
    ("group_gemm", "max_m"): "max_in_group_list",
    ("scaled_matmul", "dtype"): "output_dtype",
    ("scaled_matmul", "b_quant_bit_size"): "quant_bit_size",
    ("scaled_quantize", "smooth"): "scale",
    ("single_query_cached_kv_attn", "max_contxt_len"): "max_context_len",
    ("single_query_cached_kv_attn", "learnable_sink"): "sink",
}
"""(function, name that the vendor's vLLM has for an argument) -> its name in the golden file."""


def test_the_vendor_s_own_vllm_gives_the_same_arguments_in_the_same_order():
    """The second witness: official, where the golden file is from a copy of the package that somebody has published."""
    calls = signatures.witnessed()
    assert set(calls) == signatures.called()
    for name, (by_place, by_keyword) in calls.items():
        ours = list(signatures.signature(signatures.lines()[name]).parameters)
        theirs = [OTHER_NAMES.get((name, one), one) for one in by_place]
        assert theirs == ours[: len(theirs)], name
        assert {OTHER_NAMES.get((name, one), one) for one in by_keyword} <= set(ours), name


def test_what_it_gives_of_latent_caches_are_arguments_there():
    of_latent = signatures.of_latent_caches()
    assert set(of_latent) == {"reshape_paged_cache", "single_query_cached_kv_attn", "flash_attention"}
    for name, given in of_latent.items():
        assert set(given) <= set(signatures.signature(signatures.lines()[name]).parameters), name


def like_the_golden() -> types.SimpleNamespace:
    functions = {}
    for name, line in signatures.lines().items():
        made = types.FunctionType((lambda: None).__code__, {})
        made.__signature__ = signatures.signature(line)  # pyright: ignore[reportFunctionMemberAccess]
        functions[name] = made
    return types.SimpleNamespace(**functions)


def test_a_module_of_that_version_has_no_drift():
    assert signatures.drift(like_the_golden()) == []


def test_a_name_an_order_and_a_function_that_are_gone_are_seen():
    other = like_the_golden()
    given = inspect.signature(other.single_query_cached_kv_attn)
    parameters = [
        one.replace(name="max_contxt_len") if one.name == "max_context_len" else one
        for one in given.parameters.values()
    ]
    other.single_query_cached_kv_attn.__signature__ = given.replace(parameters=parameters)
    first, second, *rest = inspect.signature(other.moe_gen_idx).parameters.values()
    other.moe_gen_idx.__signature__ = inspect.Signature([second, first, *rest])
    del other.scaled_matmul
    found = signatures.drift(other)
    assert [one.partition(":")[0] for one in found] == [
        "moe_gen_idx",
        "scaled_matmul",
        "single_query_cached_kv_attn",
    ]
    assert "max_contxt_len" in found[2]
