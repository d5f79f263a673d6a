"""What a model_config may be: a table of faults, each named with its key before anything is loaded."""

import json
import pickle
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import transformers

from dlinfer.framework.mindie_ext import GeneratorTorch, ModelConfig, check_model_config
from dlinfer.framework.mindie_ext.config.refused import REFUSED
from dlinfer.framework.mindie_ext.errors import ModelConfigError
from tests.workers import ROOT

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What looks like a checkpoint; its weights are no weights."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def good(folder: Path) -> dict[str, Any]:
    return {
        "model_id": str(folder),
        "backend_type": "atb",
        "world_size": 2,
        "rank": 1,
        "local_rank": 1,
        "npu_device_id": 1,
    }


MISSING = "left out"
# (changes, keys that are at fault)
BAD: list[tuple[dict[Any, Any], set[str]]] = [
    *(({key: MISSING}, {key}) for key in good(Path())),
    *(({key: None}, {key}) for key in ("model_id", "backend_type", "world_size")),
    ({"model_id": ""}, {"model_id"}),
    ({"model_id": 5}, {"model_id"}),
    ({"model_id": "/no/such/folder"}, {"model_id"}),
    ({"backend_type": "ms"}, {"backend_type"}),
    ({"backend_type": "ATB"}, {"backend_type"}),
    ({"backend_type": 1}, {"backend_type"}),
    ({"world_size": 0}, {"world_size"}),
    ({"world_size": -1}, {"world_size"}),
    ({"world_size": 1048577}, {"world_size"}),
    ({"world_size": "two"}, {"world_size"}),
    ({"world_size": 1.5}, {"world_size"}),
    ({"world_size": True}, {"world_size"}),
    ({"rank": -1}, {"rank"}),
    ({"rank": 2}, {"rank"}),
    ({"rank": "1.5"}, {"rank"}),
    ({"local_rank": -1}, {"local_rank"}),
    ({"local_rank": 2}, {"local_rank"}),
    ({"npu_device_id": -1}, {"npu_device_id"}),
    ({"npu_device_id": 2}, {"npu_device_id"}),
    ({"npu_device_id": "first"}, {"npu_device_id"}),
    ({"num_threads": 0}, {"num_threads"}),
    ({"num_threads": -8}, {"num_threads"}),
    ({"num_threads": 1025}, {"num_threads"}),
    ({"num_threads": []}, {"num_threads"}),
    ({"trust_remote_code": "perhaps"}, {"trust_remote_code"}),
    ({"trust_remote_code": 7}, {"trust_remote_code"}),
    ({"model_name": ""}, {"model_name"}),
    ({"model_name": "-llama"}, {"model_name"}),
    ({"model_name": "llama."}, {"model_name"}),
    ({"model_name": "_"}, {"model_name"}),
    ({"model_name": "a/b"}, {"model_name"}),
    ({"model_name": "llama\n"}, {"model_name"}),
    ({"model_name": "a" * 257}, {"model_name"}),
    ({"model_name": 3}, {"model_name"}),
    ({"max_position_embeddings": 0}, {"max_position_embeddings"}),
    ({"max_position_embeddings": "long"}, {"max_position_embeddings"}),
    ({"load_tokenizer": "no"}, {"load_tokenizer"}),
    ({"tokenizer_path": "/no/such/folder"}, {"tokenizer_path"}),
    ({"tokenizer_path": 4}, {"tokenizer_path"}),
    ({"block_size": 0}, {"block_size"}),
    ({"block_size": 1025}, {"block_size"}),
    ({"block_size": "big"}, {"block_size"}),
    ({"npu_mem": 0}, {"npu_mem"}),
    ({"npu_mem": -2}, {"npu_mem"}),
    ({"npu_mem": "all"}, {"npu_mem"}),
    ({"cpu_mem": -1}, {"cpu_mem"}),
    ({"max_input_len": 0}, {"max_input_len"}),
    ({"max_input_len": 100, "max_seq_len": 99}, {"max_input_len"}),
    ({"max_iter_times": 0}, {"max_iter_times"}),
    ({"max_prefill_tokens": -1}, {"max_prefill_tokens"}),
    ({"max_seq_len": 0}, {"max_seq_len"}),
    ({"max_batch_size": -1}, {"max_batch_size"}),
    ({"ignore_eos": "maybe"}, {"ignore_eos"}),
    ({"eos_token_id": "[1, 2"}, {"eos_token_id"}),
    ({"eos_token_id": {"a": 1}}, {"eos_token_id"}),
    ({"repetition_penalty": 0}, {"repetition_penalty"}),
    ({"temperature": -0.1}, {"temperature"}),
    ({"top_k": -1}, {"top_k"}),
    ({"top_p": 1.1}, {"top_p"}),
    ({"do_sample": "often"}, {"do_sample"}),
    ({"max_loras": -1}, {"max_loras"}),
    ({"max_loras": 2}, {"max_lora_rank"}),
    ({"max_lora_rank": 8}, {"max_loras"}),
    ({"model_role": "prefill"}, {"model_role"}),
    ({"plugin_params": '{"plugin_type": "la"}'}, {"plugin_params"}),
    ({"speculation_gamma": 4}, {"speculation_gamma"}),
    ({"kv_pool_backend": "mooncake"}, {"kv_pool_backend"}),
    ({"dp": 2}, {"dp"}),
    ({"cp": 4}, {"cp"}),
    ({"sp": 2}, {"sp"}),
    ({"moe_ep": 2}, {"moe_ep"}),
    ({"layerwiseDisaggregated": "true"}, {"layerwiseDisaggregated"}),
    ({"block_sise": 16}, {"block_sise"}),
    ({"world_size": MISSING, "worldsize": 2}, {"world_size", "worldsize"}),
    ({5: 5}, {"model_config"}),
    (
        {"rank": 9, "block_size": 0, "top_p": 2, "model_name": "-"},
        {"rank", "block_size", "top_p", "model_name"},
    ),
]


@pytest.mark.parametrize(
    ("changes", "keys"), BAD, ids=lambda one: str(one)[:60] if isinstance(one, dict) else ""
)
def test_each_fault_is_named_and_nothing_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], keys: set[str]
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    nothing_may_be_loaded(monkeypatch)
    config = {key: one for key, one in (good(folder) | changes).items() if one != MISSING}
    with pytest.raises(ModelConfigError) as raised:
        GeneratorTorch(config)
    assert {key for key, _, _ in raised.value.fields["faults"]} == keys
    assert all(key in str(raised.value) for key in keys)


def test_there_are_at_least_sixty() -> None:
    assert len(BAD) >= 60


def nothing_may_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("something was loaded")

    for owner, name in (
        (safetensors, "safe_open"),
        (transformers.AutoModelForCausalLM, "from_pretrained"),
        (transformers.AutoConfig, "from_pretrained"),
        (transformers.AutoTokenizer, "from_pretrained"),
        (torch, "zeros"),
        (torch, "empty"),
    ):
        monkeypatch.setattr(owner, name, loaded)


def test_a_refusal_allocates_next_to_nothing(folder: Path) -> None:
    config = good(folder) | {"rank": 7, "npu_mem": 64, "cpu_mem": 64}
    with pytest.raises(ModelConfigError):  # imports and caches are not counted
        GeneratorTorch(config)
    tracemalloc.start()
    with pytest.raises(ModelConfigError):
        GeneratorTorch(config)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


FOLDERS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "model_id", "config.json"),
    "a config that is no JSON": (lambda f: (f / "config.json").write_text("{"), "model_id", "JSON"),
    "a config without a type": (lambda f: (f / "config.json").write_text("{}"), "model_id", "model_type"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model_id", "safetensors"),
    "pickled weights": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "model_id",
        "to safetensors",
    ),
    "code in the folder": (
        lambda f: (f / "config.json").write_text(
            json.dumps({"model_type": "their_own", "auto_map": {"AutoModelForCausalLM": "m.M"}})
        ),
        "trust_remote_code",
        "their_own",
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_that_cannot_be_loaded(folder: Path, case: str) -> None:
    spoil, key, text = FOLDERS[case]
    spoil(folder)
    with pytest.raises(ModelConfigError, match=text) as raised:
        check_model_config(good(folder))
    assert [fault[0] for fault in raised.value.fields["faults"]] == [key]


def test_code_in_the_folder_of_a_trusted_or_a_known_model(folder: Path) -> None:
    code = {"auto_map": {"AutoModelForCausalLM": "m.M"}}
    (folder / "config.json").write_text(json.dumps({"model_type": "their_own"} | code))
    assert check_model_config(good(folder) | {"trust_remote_code": "true"}).trust_remote_code is True
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | code))
    assert check_model_config(good(folder)).trust_remote_code is False


@pytest.mark.parametrize("listed", ["", "0,,1", "0,-1", "0,x", "1,1", "0;1"])
def test_a_list_of_devices_that_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
    monkeypatch.setenv(VISIBLE, listed)
    with pytest.raises(ModelConfigError, match=VISIBLE):
        check_model_config(good(folder))


def test_the_devices_that_are_visible_bound_the_ids(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "3, 5,7")
    assert check_model_config(good(folder) | {"npu_device_id": 2}).npu_device_id == 2
    with pytest.raises(ModelConfigError, match="3 visible devices"):
        check_model_config(good(folder) | {"npu_device_id": 3})
    monkeypatch.setenv(VISIBLE, "0")
    with pytest.raises(ModelConfigError) as raised:
        check_model_config(good(folder))
    assert {key for key, _, _ in raised.value.fields["faults"]} == {"npu_device_id", "local_rank"}


def test_what_the_document_asks_for_is_enough(folder: Path) -> None:
    config = check_model_config(good(folder))
    assert (config.num_threads, config.trust_remote_code, config.load_tokenizer) == (8, False, True)
    assert (config.model_name, config.inference_mode, config.max_position_embeddings) == (None, None, None)
    assert (config.tokenizer_path, config.block_size, config.npu_mem) == (None, 128, -1)


def test_numbers_and_flags_may_be_text_as_in_mindie(folder: Path) -> None:
    text = {"world_size": "2", "rank": "1", "npu_mem": "4", "block_size": "64", "num_threads": "3"}
    flags = {"load_tokenizer": "False", "trust_remote_code": "1", "ignore_eos": "true", "do_sample": "0"}
    config = check_model_config(
        good(folder) | text | flags | {"eos_token_id": "[2, 4]", "temperature": "0.5"}
    )
    assert (config.world_size, config.rank, config.npu_mem, config.block_size, config.num_threads) == (
        2,
        1,
        4,
        64,
        3,
    )
    assert (config.load_tokenizer, config.trust_remote_code, config.ignore_eos) == (False, True, True)
    assert (config.do_sample, config.eos_token_id, config.temperature) == (False, [2, 4], 0.5)


@pytest.mark.parametrize("name", ["a", "A-1._b", "a" * 256, "0"])
def test_good_names(folder: Path, name: str) -> None:
    assert check_model_config(good(folder) | {"model_name": name}).model_name == name


def test_values_that_ask_for_nothing_pass(folder: Path) -> None:
    nothing = {
        "model_role": "standard",
        "role": "standard",
        "remote_device_ips": "",
        "remote_model_instance_ids": [],
        "plugin_params": None,
        "speculation_gamma": 0,
        "num_speculative_tokens": "0",
        "kv_pool_backend": "",
        "kv_pool_config_path": "",
        "kv_pool_async_write": False,
        "layerwiseDisaggregated": "false",
        "distributed_enable": "false",
        "dp": -1,
        "cp": 1,
        "sp": "-1",
        "moe_ep": None,
    }
    assert nothing.keys() == REFUSED.keys()
    check_model_config(good(folder) | nothing)


def test_keys_that_nobody_knows_are_kept(folder: Path) -> None:
    config = check_model_config(good(folder) | {"soc_version": 240, "tokenizer_sliding_window_size": 3})
    assert config.model_extra == {"soc_version": 240, "tokenizer_sliding_window_size": 3}


def test_no_mapping() -> None:
    for other in ([], None, "model"):
        with pytest.raises(ModelConfigError, match="a mapping"):
            check_model_config(other)  # pyright: ignore[reportArgumentType]


def test_the_error_survives_pickling(folder: Path) -> None:
    with pytest.raises(ModelConfigError) as raised:
        check_model_config(good(folder) | {"rank": 5})
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value)
    assert again.fields["faults"] == raised.value.fields["faults"]


def test_a_config_cannot_be_changed(folder: Path) -> None:
    config = check_model_config(good(folder))
    with pytest.raises(ValueError, match="frozen"):
        config.rank = 0  # pyright: ignore[reportAttributeAccessIssue]


def test_the_document_has_each_key() -> None:
    text = (ROOT / "docs" / "vendors" / "mindie_config.md").read_text().partition("## Refused by name")[0]
    rows = {match[1]: match[2] for match in re.finditer(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE)}
    for key, field in ModelConfig.model_fields.items():
        assert key in rows, f"{key} is missing in docs/vendors/mindie_config.md"
        default = "required" if field.is_required() else f"`{field.default!r}`"
        assert rows[key].strip() == default, key
        assert field.description, key
    assert rows.keys() == ModelConfig.model_fields.keys()
