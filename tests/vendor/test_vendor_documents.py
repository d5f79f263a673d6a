"""docs/vendors/vendor_documents.md has a row for all that vendors' documents describe; every test that it names exists.

The names below are those of the documents, typed in from them; the pages of the vendors are checked here too, where
they list what the code has.
"""

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

from dlinfer.framework.mindie_ext import GeneratorTorch
from dlinfer.vendor.megengine import lite
from dlinfer.vendor.qaic import Session
from dlinfer.vendor.qaic.options.table import ROWS
from dlinfer.vendor.sophgo import errors, sail

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
TABLE_HEAD = "| document | section | what it describes | tests | how far |"

SAIL = """
    process get_device_ids get_graph_names get_addr_mode get_stage_num get_input_num get_output_num get_is_dynamic
    get_input_name get_output_name get_input_tensor_devid get_output_tensor_devid get_input_shape get_output_shape
    get_input_max_shape get_output_max_shape get_input_dtype get_output_dtype get_input_scale get_output_scale
    get_input_tensors get_input_tensor get_output_tensors get_output_tensor get_input_tensors_addrmode0
    get_output_tensors_addrmode0
"""
LITE = {
    "LiteTensor": """
        layout is_pinned_host device_type device_id is_continue nbytes get_ctypes_memory reshape slice fill_zero
        copy_from share_memory_with update set_data_by_copy set_data_by_share get_data_by_share to_numpy
    """,
    "LiteOptions": """
        weight_preprocess fuse_preprocess fake_next_exec var_sanity_check_first_run const_shape force_dynamic_alloc
        force_output_dynamic_alloc force_output_use_user_specified_memory no_profiling_on_shape_change jit_level
        comp_node_seq_record_level graph_opt_level async_exec_level enable_nchw44 enable_nchw44_dot enable_nchw88
        enable_nhwcd4 enable_nchw4 enable_nchw32 enable_nchw64
    """,
    "LiteNetworkIO": "add_input add_output",
    "LiteNetwork": """
        load forward wait device_id stream_id threads_number get_input_name get_output_name get_all_input_name
        get_all_output_name get_static_memory_alloc_info is_cpu_inplace_mode enable_cpu_inplace_mode use_tensorrt
        get_io_tensor share_weights_with share_runtime_memroy async_with_callback set_start_callback
        set_finish_callback enable_profile_performance set_network_algo_workspace_limit set_network_algo_policy
        io_txt_dump io_bin_dump
    """,
    "LiteGlobal": """
        register_decryption_and_key update_decryption_key set_loader_lib_path set_persistent_cache
        dump_persistent_cache get_device_count try_coalesce_all_free_memory set_tensorrt_cache dump_tensorrt_cache
        register_memory_pair clear_memory_pair lookup_physic_ptr
    """,
    "TensorBatchCollector": "collect_id collect_by_ctypes collect free get to_numpy",
}
QAIC = """
    backend_options update_backend_options model_input_shape_dict model_output_shape_dict setup reset run get_metrics
    print_metrics print_profile_data run_benchmark
"""
CALLS = [
    *(("sail", sail.EngineLLM, name) for name in SAIL.split()),
    *(("Lite", getattr(lite, kind), name) for kind, names in LITE.items() for name in names.split()),
    *(("qaic", Session, name) for name in QAIC.split()),
    ("MindIE", GeneratorTorch, "sample"),
    ("MindIE", GeneratorTorch, "cache_pool"),
]
# What the documents describe without a method of its own: words that the row has.
TOPICS = {
    "sail": (
        "graph_name, tensor_name, index, stage, EngineLLM(bmodel_path, dev_ids), BM_RUNTIME_SHARE_MEM, input_mems,"
        "EngineLLM(bmodel_bytes, bmodel_size, dev_ids), EngineLLM(bmodel_path, flags, dev_ids), eight devices,"
        "several graphs, several cores, the caller's, memory that the graph has, where addr_mode is not 1"
    ),
    "Lite": (
        "LiteLayout, float16, LiteDataType, numpy.dtype, numpy type, LiteTensor(, LiteDeviceType, allocated when,"
        "a list leaves, array of another size, an address needs, host memory, enable_chwn4, LiteConfig, LiteIO,"
        "LiteNetwork(, LiteAlgoSelectStrategy, binary_equal_between_batch, decryption_func, set_log_level,"
        "TensorBatchCollector(, filling again"
    ),
    "qaic": (
        "NSP, instance = activation, QPC; TCM, the backend, Python 3.8, x86-64, Session(model_path, an .onnx, *.bin,"
        "options_path, onnx_define_symbol, by YAML or keywords, a number or a time, Python's time"
    ),
    "MindIE": (
        "GeneratorTorch(GeneratorBackend), __init__(model_config), check_model_config, tokenizer, device,"
        "adapter_manager, backend_type, world_size, rank, npu_device_id, ASCEND_RT_VISIBLE_DEVICES, num_threads,"
        "local_rank, trust_remote_code, model_name, inference_mode, max_position_embeddings, load_tokenizer,"
        "tokenizer_path, raised as an exception, model_id"
    ),
}


def rows() -> list[list[str]]:
    """The cells of each row of the table."""
    page = (DOCS / "vendors" / "vendor_documents.md").read_text()
    lines = page.partition(TABLE_HEAD)[2].splitlines()[2:]
    assert all(line.startswith("| ") for line in lines), "nothing stands behind the table"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@lru_cache
def names_of_tests(file: str) -> set[str]:
    """The names of a file's tests."""
    tree = ast.parse((TESTS / file).read_text())
    return {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def described(document: str) -> list[str]:
    return [row[2] for row in rows() if row[0] == document]


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]} {row[2]}")
def test_the_tests_of_a_row_exist(row: list[str]) -> None:
    assert len(row) == 5
    for part in row[3].split("; "):
        file, *names = re.findall(r"`([^`]+)`", part)
        assert names, part
        assert set(names) <= names_of_tests(file), file


def test_a_thing_is_described_once() -> None:
    kept = [tuple(row[:3]) for row in rows()]
    assert len(kept) == len(set(kept))
    assert {row[0] for row in rows()} == {"sail", "Lite", "qaic", "MindIE"}


@pytest.mark.parametrize(
    ("document", "owner", "name"), CALLS, ids=lambda value: getattr(value, "__name__", value)
)
def test_every_documented_name_is_there_and_has_a_row(document: str, owner: type, name: str) -> None:
    assert hasattr(owner, name)
    kept = [what for what in described(document) if re.search(rf"`{name}[`(]", what)]
    assert kept, f"{document}: {owner.__name__}.{name}"


@pytest.mark.parametrize("document", TOPICS)
def test_every_other_thing_described_has_a_row(document: str) -> None:
    whole = "\n".join(described(document))
    assert [topic for topic in re.split(r",\s*(?![^(]*\))", TOPICS[document]) if topic not in whole] == []


def test_the_options_of_a_session_are_listed_as_they_are() -> None:
    listed = (
        (DOCS / "vendors" / "qaic.md")
        .read_text()
        .partition("| option | takes | stage | meaning |")[2]
        .splitlines()[2:]
    )
    assert listed == [f"| `{row.name}` | {row.kind.words} | {row.stage} | {row.doc} |" for row in ROWS]


def test_what_the_document_leaves_open_is_chosen() -> None:
    chapter = (
        (DOCS / "vendors" / "sophgo.md")
        .read_text()
        .partition("## What the document leaves open")[2]
        .partition("\n## ")[0]
    )
    chosen = re.findall(r"^- \*\*(.+?)\*\*", chapter, re.MULTILINE)
    assert {"addr_mode", "stage", "dynamic", "input_mems, output_mems"} <= set(chosen)
    for mode in ("0 basic", "1 io_alone", "2 io_tag", "3 io_tag_fuse", "4 io_reloc"):
        assert mode in chapter


def test_sophgos_errors_of_the_table_are_ours() -> None:
    found = re.findall(r"`(Sophgo\w+Error)`", (DOCS / "vendors" / "sophgo.md").read_text())
    assert found
    assert [name for name in found if not hasattr(errors, name)] == []


def test_the_pages_say_what_they_were_not_run_on() -> None:
    assert "No GPU was used" in (DOCS / "vendors" / "megengine.md").read_text()
    assert "No Cloud AI card was used" in (DOCS / "vendors" / "qaic.md").read_text()
