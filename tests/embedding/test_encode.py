"""Vectors of ``dlinfer.embedding`` against sentence-transformers' own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from dlinfer.embedding import EmbeddingFolderError, EmbeddingInputError, TextModel, load
from tests.embedding import tiny
from tests.embedding.conftest import Folder

sentence_transformers = pytest.importorskip("sentence_transformers")

FULL = pytest.mark.full
POOLING = {"xlm_roberta": "cls", "gte": "cls", "qwen3": "lasttoken"}


def oracle(folder: Path, texts: list[str], **options: Any) -> Tensor:
    model = sentence_transformers.SentenceTransformer(
        str(folder), device="cpu", model_kwargs={"dtype": torch.float32}
    )
    return model.encode(texts, convert_to_tensor=True, show_progress_bar=False, **options)


def compare(model: TextModel, folder: Path, texts: list[str] = tiny.TEXTS, **options: Any) -> None:
    torch.testing.assert_close(
        model.encode(texts, **options), oracle(folder, texts, **options), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    "family",
    [
        *("bert", "xlm_roberta", "modernbert", "gte", "nomic_bert", "qwen3"),
        *(pytest.param(family, marks=FULL) for family in ("distilbert", "electra", "eurobert")),
    ],
)
def test_families(folder_of: Folder, family: str):
    folder = tiny.sentence_files(folder_of(family), POOLING.get(family, "mean"))
    model = load(folder, batch_tokens=100)  # several forwards, whose sizes differ
    assert model.packed.how in ("compiled", "loaded")
    compare(model, folder)
    together = load(folder)
    torch.testing.assert_close(together.encode(tiny.TEXTS), model.encode(tiny.TEXTS), rtol=0, atol=1e-6)
    assert together.packed.how == "loaded"
    assert model.encode([]).shape == (0, 64)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize(
    "pooling", [["cls"], ["max"], ["mean_sqrt_len_tokens"], ["weightedmean"], ["lasttoken"], ["cls", "mean"]]
)
def test_poolings(folder_of: Folder, pooling: list[str], old: bool):
    folder = tiny.sentence_files(folder_of("bert"), *pooling, normalize=False, old=old)
    model = load(folder)
    assert model.size == 64 * len(pooling)
    compare(model, folder)


@pytest.mark.parametrize("pooling", ["cls", "max", "mean", "weightedmean", "lasttoken"])
def test_prompts(folder_of: Folder, pooling: str):
    prompts = {"prompts": {"query": "search for: ", "empty": ""}, "default_prompt_name": "query"}
    folder = tiny.sentence_files(
        folder_of("bert"),
        pooling,
        prompts=prompts,
        pooling_config={"include_prompt": False},
        max_seq_length=30,
    )
    model = load(folder)
    texts = [text for text in tiny.TEXTS if text]
    compare(model, folder, texts)
    compare(model, folder, texts, prompt_name="empty")
    compare(model, folder, texts, prompt="Paris: ")
    with pytest.raises(EmbeddingInputError, match="no prompt 'none'"):
        model.encode(texts, prompt_name="none")


def test_texts_are_cut_and_lowered(folder_of: Folder):
    folder = tiny.sentence_files(folder_of("bert"), "mean", max_seq_length=7, do_lower_case=True)
    compare(load(folder), folder)


def test_texts_are_cut_where_positions_end(folder_of: Folder):
    folder = tiny.sentence_files(folder_of("xlm_roberta", limit=100_000), "cls")
    model = load(folder)
    assert model.tokenizer.limit == 128  # two of the 130 positions are for padding
    assert model.encode(["word " * 500]).isfinite().all()


def test_dense(folder_of: Folder):
    folder = tiny.sentence_files(folder_of("bert"), "mean", normalize=False)
    modules = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    dense = sentence_transformers.models.Dense(64, 24, activation_function=torch.nn.ReLU())
    normalize = sentence_transformers.models.Normalize()
    saved = folder.parent / "dense"
    sentence_transformers.SentenceTransformer(modules=[*modules, dense, normalize], device="cpu").save(
        str(saved)
    )
    model = load(saved)
    assert model.size == 24
    compare(model, saved)


def test_shorter_vectors(embedding_folder: Path):
    model = load(embedding_folder)
    expected = oracle(embedding_folder, tiny.TEXTS, truncate_dim=16, normalize_embeddings=True)
    torch.testing.assert_close(model.encode(tiny.TEXTS, dimensions=16), expected, rtol=0, atol=1e-5)
    for size in (0, 65):
        with pytest.raises(EmbeddingInputError, match="dimensions"):
            model.encode(tiny.TEXTS, dimensions=size)


def test_bfloat16(embedding_folder: Path):
    model = load(embedding_folder, dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    alike = cosine_similarity(model.encode(tiny.TEXTS), oracle(embedding_folder, tiny.TEXTS))
    assert alike.min() > 0.99


def test_missing_weights_are_refused(embedding_folder: Path):
    from safetensors.torch import load_file, save_file

    file = embedding_folder / "model.safetensors"
    weights = load_file(file)
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(EmbeddingFolderError, match=r"it lacks encoder\.layer\.1\.output\.dense\.weight"):
        load(embedding_folder)


def test_relative_positions_are_refused(tmp_path: Path):
    import transformers

    config = transformers.MPNetConfig(vocab_size=600, **tiny.SIZES)
    transformers.MPNetModel(config).save_pretrained(tmp_path)
    tiny.tokenizer("bert").save_pretrained(tmp_path)
    with pytest.raises(EmbeddingFolderError, match="attention of MPNetModel"):
        load(tmp_path, pooling="mean")


def test_code_in_the_folder_is_not_run(embedding_folder: Path):
    config = {"model_type": "new", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    tiny.write(embedding_folder, "config.json", config)
    (embedding_folder / "code.py").write_text("raise SystemExit('was run')")
    with pytest.raises(EmbeddingFolderError, match="code in the folder is never run"):
        load(embedding_folder)


def test_a_model_that_packing_changes_is_refused(embedding_folder: Path, monkeypatch: pytest.MonkeyPatch):
    from dlinfer.embedding import packed_model

    monkeypatch.setattr(packed_model, "_positions", lambda base: (160, 3))
    with pytest.raises(EmbeddingFolderError, match="something else for packed texts"):
        load(embedding_folder)
