"""What the files of a folder say, and which of it is refused."""

from pathlib import Path
from typing import Any

import pytest

from dlinfer.embedding import EmbeddingFolderError
from dlinfer.embedding.folder import ENCODERS, task_of
from dlinfer.embedding.recipe import read_recipe
from tests.embedding import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.write(tmp_path, "config.json", {"architectures": ["BertModel"], "model_type": "bert"})
    return tiny.sentence_files(tmp_path, "mean", max_seq_length=12)


def modules(*types: str) -> list[dict[str, Any]]:
    return [
        {"idx": at, "name": str(at), "path": "" if at == 0 else f"{at}_{kind}", "type": kind}
        for at, kind in enumerate(types)
    ]


def test_a_folder_of_sentence_transformers(folder: Path):
    recipe = read_recipe(folder)
    assert (recipe.task, recipe.poolings, recipe.max_length) == ("embed", ("mean",), 12)
    assert recipe.normalizes
    assert recipe.default_prompt is None
    assert read_recipe(folder, pooling="cls").poolings == ("cls",)


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"architectures": ["XLMRobertaForSequenceClassification"], "model_type": "xlm-roberta"}, "rerank"),
        ({"architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3"}, "rerank"),
        ({"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta"}, "embed"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "embed"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, None),
        ({"architectures": ["Qwen2ForRewardModel"], "model_type": "qwen2"}, None),
        ({"architectures": None, "model_type": "llama"}, None),
        ({}, None),
    ],
)
def test_tasks(tmp_path: Path, config: dict[str, Any], task: str | None):
    tiny.write(tmp_path, "config.json", config)
    assert task_of(tmp_path) == task


def test_a_decoder_with_a_pooling_embeds(folder: Path):
    tiny.write(folder, "config.json", {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    assert task_of(folder) == "embed"


def test_encoders_are_types_of_transformers():
    from transformers import CONFIG_MAPPING

    assert ENCODERS - {"new"} <= set(CONFIG_MAPPING.keys())  # "new" is code that GTE's folders bring along


def test_a_folder_without_a_pooling_needs_one(tmp_path: Path):
    tiny.write(tmp_path, "config.json", {"architectures": ["BertModel"], "model_type": "bert"})
    with pytest.raises(EmbeddingFolderError, match="--pooling"):
        read_recipe(tmp_path)
    assert read_recipe(tmp_path, pooling="cls").poolings == ("cls",)
    with pytest.raises(EmbeddingFolderError, match="no pooling 'first'"):
        read_recipe(tmp_path, pooling="first")


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("modules.json", modules("custom.Transformer"), "code of others"),
        (
            "modules.json",
            modules(
                "sentence_transformers.models.Transformer",
                "sentence_transformers.models.WeightedLayerPooling",
            ),
            "WeightedLayerPooling is not served",
        ),
        ("modules.json", modules("sentence_transformers.models.Pooling"), "not exactly one Transformer"),
        (
            "modules.json",
            [{"path": "../elsewhere", "type": "sentence_transformers.models.Transformer"}],
            "outside the folder",
        ),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "SparseEncoder"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "default prompt 'query'"),
        ("config_sentence_transformers.json", {"keep_in_fp32_modules": ["0"]}, "keep_in_fp32_modules"),
        ("sentence_bert_config.json", {"query_expansion": {"length": 32}}, "query_expansion"),
        ("sentence_bert_config.json", {"processor_kwargs": {"padding_side": "left"}}, "padding_side"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "fill-mask does not fit"),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {"method": "get_text_features", "method_output_name": None}}},
            "get_text_features",
        ),
        (
            "sentence_bert_config.json",
            {
                "modality_config": {
                    "message": {"method": "forward", "method_output_name": "last_hidden_state"}
                }
            },
            "chat template",
        ),
        ("1_Pooling/config.json", {"pooling_mode": "attention"}, "pooling attention"),
        ("config.json", [], "no JSON object"),
    ],
)
def test_what_is_not_served(folder: Path, file: str, content: Any, reason: str):
    tiny.write(folder, file, content)
    with pytest.raises(EmbeddingFolderError, match=reason):
        read_recipe(folder)


def test_damaged_files_and_no_folder(folder: Path, tmp_path: Path):
    (folder / "modules.json").write_text("[")
    with pytest.raises(EmbeddingFolderError, match=r"modules\.json"):
        read_recipe(folder)
    with pytest.raises(EmbeddingFolderError, match=r"no config\.json"):
        read_recipe(tmp_path / "none")
