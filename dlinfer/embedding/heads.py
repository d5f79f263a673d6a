"""From the hidden states of packed pairs to one logit for each pair."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dlinfer.embedding.errors import EmbeddingFolderError
from dlinfer.embedding.recipe import Recipe

Head = tuple[str, Callable[[Tensor], Tensor]]
"""The pooling of the hidden states, and the function from pooled rows [pairs, size] to logits [pairs, labels]."""


def head_of(model: Any, recipe: Recipe) -> Head:
    """Return the head of a transformers model for sequence classification, or of a causal language model."""
    if recipe.answers is not None:
        return "lasttoken", _answers(model, recipe.answers)
    config, base = model.config, model.base_model
    if hasattr(model, "score"):
        return "lasttoken", model.score
    pooling = getattr(config, "classifier_pooling", None) or getattr(config, "clf_pooling", None) or "cls"
    pooling = "cls" if pooling == "bos" else pooling
    if pooling not in ("cls", "mean"):
        raise EmbeddingFolderError(
            folder=recipe.transformer,
            reason=f"its pooling {pooling} is not served",
            advice="use another model.",
        )
    classifier = model.classifier
    if type(classifier).__name__.endswith("ClassificationHead"):  # it takes [pairs, tokens, size]
        return pooling, lambda rows: classifier(rows[:, None])
    if hasattr(model, "head"):
        return pooling, lambda rows: classifier(model.head(rows))
    if hasattr(model, "pre_classifier"):
        return pooling, lambda rows: classifier(F.relu(model.pre_classifier(rows)))
    if hasattr(model, "dense") and hasattr(model, "activation"):
        return pooling, lambda rows: classifier(model.activation(model.dense(rows)))
    pooler = getattr(base, "pooler", None)
    if pooler is None:
        raise EmbeddingFolderError(
            folder=recipe.transformer,
            reason=f"the classification head of {type(model).__name__} is not served",
            advice="use a model of another family; docs/guides/embeddings.md lists those that are served.",
        )
    if (activation := getattr(base, "pooler_activation", None)) is not None:
        return pooling, lambda rows: classifier(activation(pooler(rows)))
    return pooling, lambda rows: classifier(pooler(rows[:, None]))


def _answers(model: Any, answers: tuple[int, int | None]) -> Callable[[Tensor], Tensor]:
    """Return the function that gives the logit of "relevant", less that of "not relevant" if there is one."""
    ids = [answer for answer in answers if answer is not None]
    output = model.get_output_embeddings()
    weight = output.weight[ids]
    bias = None if getattr(output, "bias", None) is None else output.bias[ids]

    def logits(rows: Tensor) -> Tensor:
        scores = F.linear(rows, weight, bias).float()
        return scores if len(ids) == 1 else scores[:, :1] - scores[:, 1:]

    return logits
