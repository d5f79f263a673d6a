"""From the hidden states of packed texts to one vector for each text.

The sums are float32, also for bfloat16 hidden states.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlinfer.embedding.errors import EmbeddingFolderError
from dlinfer.embedding.folder import read_dict

Step = Callable[[Tensor], Tensor]


def pool(hidden: Tensor, lengths: Tensor, poolings: Sequence[str], skipped: Tensor | None = None) -> Tensor:
    """Return the vectors of packed texts, [texts, size * len(poolings)] float32.

    hidden: [tokens, size], the texts end to end. lengths: [texts] int64, each at least 1.
    poolings: names of ``recipe.POOLINGS``, whose vectors are concatenated.
    skipped: [texts] int64, how many first tokens of each text are left out. None: none.
    """
    starts = lengths.cumsum(0) - lengths
    kept, positions = lengths, None
    if skipped is not None:
        skipped = torch.minimum(skipped, lengths)
        kept = lengths - skipped
    if set(poolings) - {"cls", "lasttoken"}:
        positions = torch.arange(hidden.shape[0]) - starts.repeat_interleave(lengths)
        if skipped is not None:
            used = positions >= skipped.repeat_interleave(lengths)
            hidden_kept, positions = hidden[used].float(), positions[used]
        else:
            hidden_kept = hidden.float()
    else:
        hidden_kept = hidden

    def total(values: Tensor) -> Tensor:
        return torch.segment_reduce(values, "sum", lengths=kept, axis=0, initial=0)

    vectors: list[Tensor] = []
    for pooling in poolings:
        if pooling == "cls":
            first = starts if skipped is None else starts + torch.where(kept > 0, skipped, 0)
            vectors.append(hidden[first].float())
        elif pooling == "lasttoken":
            vectors.append(hidden[starts + lengths - 1].float())
        elif pooling == "max":
            vectors.append(torch.segment_reduce(hidden_kept, "max", lengths=kept, axis=0))
        elif pooling == "weightedmean":
            assert positions is not None
            weights = (positions + 1).float()[:, None]
            vectors.append(total(hidden_kept * weights) / total(weights).clamp(min=1e-9))
        else:
            count = kept[:, None].float().clamp(min=1e-9)
            vectors.append(total(hidden_kept) / (count if pooling == "mean" else count.sqrt()))
    return torch.cat(vectors, dim=-1)


def load_steps(steps: Sequence[tuple[str, Path]], dtype: torch.dtype) -> list[Step]:
    """Return the functions of the modules after the pooling. steps: as in ``Recipe``. dtype: of their weights."""
    return [_normalize if kind == "Normalize" else _dense(path, dtype) for kind, path in steps]


def _normalize(vectors: Tensor) -> Tensor:
    return F.normalize(vectors, p=2, dim=-1)


def _dense(folder: Path, dtype: torch.dtype) -> Step:
    config = read_dict(folder / "config.json")
    weights = _weights(folder)
    known = {"in_features", "out_features", "bias", "activation_function"}
    plain = {"sentence_embedding", None, False}
    if unread := [name for name, value in config.items() if name not in known and value not in plain]:
        raise EmbeddingFolderError(
            folder=folder, reason=f"{unread[0]} is not served", advice="use sentence-transformers itself."
        )
    activation = activation_of(folder, config.get("activation_function", "torch.nn.Tanh"))
    weight = weights["linear.weight"].to(dtype)
    bias = weights["linear.bias"].to(dtype) if config.get("bias", True) else None
    return lambda vectors: activation(F.linear(vectors.to(dtype), weight, bias)).float()


def _weights(folder: Path) -> dict[str, Tensor]:
    if (file := folder / "model.safetensors").is_file():
        from safetensors.torch import load_file

        return load_file(file)
    try:
        return torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    except OSError as error:
        raise EmbeddingFolderError(
            folder=folder, reason=str(error), advice="download the folder again."
        ) from error


def activation_of(folder: Path, path: str) -> nn.Module:
    """Return the torch module of a dotted path such as ``torch.nn.modules.activation.Tanh``.

    Raises EmbeddingFolderError for a path outside of torch.nn, which would be code of others.
    """
    kind: Any = getattr(nn, path.rpartition(".")[2], None)
    if not path.startswith("torch.nn.") or not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise EmbeddingFolderError(
            folder=folder, reason=f"the activation {path} is not of torch.nn", advice="correct the file."
        )
    return kind()
