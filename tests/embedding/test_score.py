"""Scores of rerankers against sentence-transformers' CrossEncoder, or the rule on a model's card."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dlinfer.embedding import EmbeddingFolderError, EmbeddingInputError, load
from tests.embedding import tiny
from tests.embedding.conftest import Folder

sentence_transformers = pytest.importorskip("sentence_transformers")

PAIRS = [(tiny.TEXTS[0], text) for text in tiny.TEXTS] + [(text, "one") for text in tiny.TEXTS]


def compare(folder: Path) -> None:
    oracle = sentence_transformers.CrossEncoder(
        str(folder), device="cpu", model_kwargs={"dtype": torch.float32}
    )
    expected = oracle.predict(PAIRS, convert_to_tensor=True, show_progress_bar=False)
    model = load(folder, batch_tokens=200)
    assert expected.std() > 1e-3
    torch.testing.assert_close(model.score(PAIRS), expected, rtol=1e-5, atol=1e-5)
    assert model.size == 1


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("bert", {}),
        ("xlm_roberta", {}),
        ("qwen3", {}),
        ("modernbert", {"classifier_pooling": "mean"}),
        *(
            pytest.param(family, config, marks=pytest.mark.full)
            for family, config in [
                ("modernbert", {"classifier_pooling": "cls"}),
                *((name, {}) for name in ("gte", "nomic_bert", "distilbert", "electra")),
            ]
        ),
    ],
)
def test_classification_heads(folder_of: Folder, family: str, config: dict[str, Any]):
    compare(folder_of(family, "ForSequenceClassification", num_labels=1, **config))


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    tiny.write(folder, "config.json", config)


@pytest.mark.parametrize(
    "entry",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"},
    ],
)
def test_activations(reranker_folder: Path, entry: dict[str, Any]):
    edit(reranker_folder, lambda config: config.update(entry))
    compare(reranker_folder)


def test_an_activation_that_is_code_of_others(reranker_folder: Path):
    edit(reranker_folder, lambda config: config.update(sbert_ce_default_activation_function="os.system"))
    with pytest.raises(EmbeddingFolderError, match=r"os\.system is not of torch\.nn"):
        load(reranker_folder)


def test_several_labels_are_refused(folder_of: Folder):
    with pytest.raises(EmbeddingFolderError, match="3 labels"):
        load(folder_of("bert", "ForSequenceClassification", num_labels=3))


@pytest.mark.parametrize("message", [True, False])
def test_answers_of_a_causal_model(folder_of: Folder, message: bool):
    compare(tiny.logit_score_files(folder_of("qwen3", "ForCausalLM"), message))


def test_the_rule_on_the_card_of_qwen3_reranker(folder_of: Folder):
    folder = folder_of("qwen3", "ForCausalLM", limit=400)
    with pytest.raises(EmbeddingFolderError, match="generates text"):
        load(folder)
    model = load(folder, task="rerank")
    instruction = "Given a web search query, retrieve relevant passages that answer the query"
    network = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    words = transformers.AutoTokenizer.from_pretrained(folder)
    yes, no = (words.convert_tokens_to_ids(word) for word in ("yes", "no"))
    expected = []
    for query, document in PAIRS:
        text = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
            f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        ids = words(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = network(input_ids=ids).logits[0, -1]
        expected.append(logits[[no, yes]].log_softmax(0)[1].exp())
    torch.testing.assert_close(model.score(PAIRS), torch.stack(expected), rtol=0, atol=1e-5)


def test_a_tokenizer_without_the_answers(folder_of: Folder):
    folder = folder_of("eurobert", "Model")
    tiny.build(folder, "qwen3", "ForCausalLM")
    tiny.tokenizer("bert").save_pretrained(folder)
    words = json.loads((folder / "tokenizer.json").read_text())
    words["model"]["vocab"].pop("yes", None)
    (folder / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(EmbeddingFolderError, match="no token 'yes'"):
        load(folder, task="rerank")


def test_the_cosine_of_an_embedding_model(embedding_folder: Path):
    model = load(embedding_folder)
    oracle = sentence_transformers.SentenceTransformer(str(embedding_folder), device="cpu")
    left, right = (oracle.encode([pair[side] for pair in PAIRS], convert_to_tensor=True) for side in (0, 1))
    torch.testing.assert_close(
        model.score(PAIRS), sentence_transformers.util.pairwise_cos_sim(left, right), rtol=0, atol=1e-5
    )


def test_a_reranker_has_no_vectors(reranker_folder: Path):
    with pytest.raises(EmbeddingInputError, match="takes pairs"):
        load(reranker_folder).encode(["text"])
