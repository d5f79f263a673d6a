"""What preflight says of folders: its arithmetic, its refusals with figures, and that LMDeploy's own objects agree."""

import dataclasses
import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dlinfer.cli import main
from dlinfer.framework.lmdeploy_ext.conversion import model_files
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.preflight import check, memory
from dlinfer.framework.lmdeploy_ext.preflight.check import Report, preflight
from dlinfer.vendor import DeviceMemory
from examples.tiny_models.build import build

DOCS = Path(__file__).parents[4] / "docs/reference/json.md"
GIB = 1 << 30


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Tiny models of several kinds."""
    root = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen2", "mixtral"):
        build(family, root / family, dtype="bfloat16")
    return root


@pytest.fixture
def memory_of(monkeypatch):
    """Lets the device have so much memory free."""

    def memory_of(free: int) -> None:
        device = activation.device()
        monkeypatch.setattr(device, "memory", lambda: DeviceMemory(free, free, "a test's", shared=True))

    return memory_of


def look(folder: Path, **options) -> Report:
    return preflight(folder, "cpu", **{"session_len": 256, "max_batch_size": 2, **options})


# --- arithmetic


def test_headers_count_what_is_loaded_and_tied_weights_once(tmp_path):
    tensors = {
        "model.embed_tokens.weight": torch.zeros(10, 4),
        "lm_head.weight": torch.zeros(10, 4),
        "model.norm.weight": torch.zeros(4, dtype=torch.bfloat16),
        "table": torch.zeros(3, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = model_files.read(tmp_path)
    assert sum(one.nbytes for one in found) == 40 * 4 * 2 + 8 + 24
    assert model_files.loaded_bytes(found, 2, tied=False) == 40 * 2 * 2 + 8 + 24
    assert model_files.loaded_bytes(found, 2, tied=True) == 40 * 2 + 8 + 24
    assert model_files.loaded_bytes(found, 4, tied=True) == 40 * 4 + 16 + 24
    assert model_files.largest_file(tmp_path) == (tmp_path / "model.safetensors").stat().st_size


def test_headers_are_those_of_the_files_that_are_loaded(tmp_path):
    """Mistral's checkpoints have all weights a second time, in a file that the index does not name."""
    for name in ("first", "second"):
        save_file({name: torch.zeros(4)}, tmp_path / f"{name}.safetensors")
    save_file({"first.again": torch.zeros(40)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in ("first", "second")}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [one.name for one in model_files.read(tmp_path)] == ["first", "second"]
    assert model_files.largest_file(tmp_path) == (tmp_path / "second.safetensors").stat().st_size
    save_file({"whole": torch.zeros(2)}, tmp_path / "model.safetensors")  # LMDeploy looks for it first
    assert [one.name for one in model_files.read(tmp_path)] == ["whole"]


def test_a_prefill_has_a_buffer_for_each_part_of_a_layer():
    # 2 x 8 of residual and input, 2 x 16 of q, k, v, 3 x 32 of the MLP
    assert memory.widest(8, 16, 32, experts=0) == 16 + 32 + 96
    assert memory.widest(8, 16, 32, experts=2) == 16 + 32 + 192 + 16
    assert memory.prefill_bytes(10, 144, 2) == memory.KEPT * 10 * 144 * 2
    assert memory.logits_bytes(3, 100, 2) == 3 * 100 * (2 + 12 + 8)


def test_the_peak_is_of_loading_or_of_serving():
    sizes = {"process": 90, "graphs": 10, "weights": 50, "mapped": 40, "activations": 5, "logits": 1}
    others = {"free": 0, "source": "", "stored": 0, "kv_token": 0, "kv_blocks": 0, "block_size": 0}
    plan = memory.Memory(**sizes, **others, kv_cache=20, prefill_tokens=0)
    assert (plan.peak, plan.needed) == (180, 176 - 90 + memory.RUNNING)  # while its weights load
    plan = memory.Memory(**sizes, **others, kv_cache=60, prefill_tokens=0)
    assert (plan.peak, plan.needed) == (216, 216 - 90 + memory.RUNNING)


# --- folders


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
def test_what_is_planned_is_what_lmdeploy_would_make(family, folders):
    report = look(folders / family)
    assert report.refusals == []
    assert report.fits
    assert report.model_class.startswith("lmdeploy.pytorch.models.")
    assert {one.vendor for one in report.ops} == {"cpu"}
    called = {one.op for one in report.ops}
    assert called >= {"linear", "rms_norm", "fill_kv_cache", "paged_decode_attention"}
    assert ("fused_moe" in called) is (family == "mixtral")
    plan = report.memory
    assert plan is not None
    config = json.loads((folders / family / "config.json").read_text())
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    assert plan.kv_token == 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * size * 2
    # two sequences of 256 tokens in blocks of 64, two blocks more each, and one that is reserved
    assert (plan.kv_blocks, plan.block_size) == (max(16, 2 * (4 + 2) + 1), 64)
    assert plan.kv_cache == plan.kv_blocks * 64 * plan.kv_token
    stored = sum(one.elements for one in model_files.read(folders / family))
    tied = config.get("tie_word_embeddings") and any(
        one.name == "lm_head.weight" for one in model_files.read(folders / family)
    )
    assert plan.weights == 2 * stored - (2 * config["vocab_size"] * config["hidden_size"] if tied else 0)
    assert plan.needed < plan.peak


def test_an_indexers_ops_and_caches_count(tmp_path):
    """Two layers of 32 + 8 numbers of a latent and 16 of an indexer's key, in float32."""
    build("deepseek_v32", tmp_path / "model")
    report = look(tmp_path / "model")
    assert report.fits
    ops = {one.op: one.vendor for one in report.ops}
    assert (ops["lightning_indexer"], ops["sparse_flash_attention"]) == ("cpu", "cpu")
    assert "paged_decode_attention" not in ops
    assert report.memory is not None
    assert report.memory.kv_token == 2 * (32 + 8 + 16) * 4


def test_dtype_and_block_size_are_those_that_are_asked_for(folders):
    narrow, wide = look(folders / "llama"), look(folders / "llama", dtype="float32", block_size=128)
    assert (narrow.dtype, wide.dtype) == ("bfloat16", "float32")
    assert narrow.memory is not None
    assert wide.memory is not None
    assert wide.memory.weights == 2 * narrow.memory.weights
    assert wide.memory.kv_token == 2 * narrow.memory.kv_token
    assert wide.memory.block_size == 128


def test_a_quantised_folder_is_refused_by_the_adaptors_own_words(folders, tmp_path):
    shutil.copytree(folders / "llama", tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "awq"}})
    )
    report = look(tmp_path / "model")
    assert [one.error for one in report.refusals] == ["UnsupportedFeatureError"]
    assert (report.quantisation, report.fits, report.memory) == ("awq", False, None)


def test_options_and_missing_folders_are_refused(folders, tmp_path):
    assert [one.error for one in look(tmp_path / "none").refusals] == ["ModelFolderError"]
    assert [one.error for one in look(folders / "llama", tp=2).refusals] == ["UnsupportedFeatureError"]


# --- three that do not fit


def test_weights_that_do_not_fit_are_refused_with_figures(folders, tmp_path, memory_of):
    look(folders / "llama")
    shutil.copytree(folders / "llama", tmp_path / "model")
    path = (
        tmp_path / "model/model.safetensors"
    )  # a header alone says how large a tensor is: 6 GiB of a sparse file
    entry = {"dtype": "BF16", "shape": [3, GIB], "data_offsets": [0, 6 * GIB]}
    text = json.dumps({"model.embed_tokens.weight": entry}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 6 * GIB)
    memory_of(4 * GIB)
    misfit, refused = look(tmp_path / "model").refusals  # which the header is, too
    assert misfit.error == "ModelFolderError"
    assert refused.error == "ModelMemoryError"
    assert "it needs 6.00 GiB, but 4.00 GiB are free" in refused.text
    assert refused.next_step


def test_a_cache_that_does_not_fit_is_refused_by_the_engines_planner(folders, memory_of):
    look(folders / "qwen2")
    memory_of(GIB)
    (refused,) = look(folders / "qwen2", num_gpu_blocks=1 << 20).refusals
    assert refused.error == "MemoryPlanError"
    assert "num_gpu_blocks=1048576" in refused.text


def test_buffers_that_do_not_fit_beside_the_rest_are_refused(folders, memory_of):
    plan = look(folders / "mixtral", cache_max_entry_count=0.99, session_len=1 << 20).memory
    assert plan is not None
    memory_of(memory.RUNNING + memory.GRAPHS + plan.weights + (200 << 20))
    report = look(folders / "mixtral", cache_max_entry_count=0.99, session_len=1 << 20)
    assert {refused.error for refused in report.refusals} == {"ModelMemoryError", "UnsupportedFeatureError"}
    assert not report.fits


# --- the command


def test_the_command_prints_json_and_a_table_and_its_status(folders, tmp_path, capsys):
    arguments = [str(folders / "llama"), "--session-len", "256", "--max-batch-size", "2"]
    assert main(["preflight", *arguments, "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out[out.index("{\n") :])
    assert list(found) == [field.name for field in dataclasses.fields(Report)]
    assert main(["preflight", *arguments]) == 0
    assert "PASS: it can be served" in capsys.readouterr().out
    assert main(["preflight", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "ModelFolderError" in out
    assert "Next step: " in out


def test_the_page_documents_every_field():
    text = DOCS.read_text()
    for part in (check.Report, check.Refusal, check.OpServed, check.Memory):
        for field in dataclasses.fields(part):
            assert f"`{field.name}`" in text, field.name
