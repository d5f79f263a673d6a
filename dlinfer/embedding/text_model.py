"""``load(folder)`` returns a model that turns texts into vectors, or pairs of texts into scores."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dlinfer.embedding.errors import EmbeddingFolderError, EmbeddingInputError
from dlinfer.embedding.folder import Task
from dlinfer.embedding.heads import head_of
from dlinfer.embedding.packed_model import PackedModel, differs, examples
from dlinfer.embedding.pooling import activation_of, load_steps, pool
from dlinfer.embedding.recipe import Recipe, read_recipe
from dlinfer.embedding.tokens import Tokenizer, Tokens
from dlinfer.framework.transformers_ext import register_attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BATCH_TOKENS = 4096


def load(
    folder: str | Path,
    *,
    task: Task | None = None,
    pooling: str | None = None,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    batch_tokens: int = BATCH_TOKENS,
) -> "TextModel":
    """Load an embedding model or a reranker from a folder, as sentence-transformers or transformers saves it.

    task, pooling: needed where the files do not name them, see ``read_recipe``. dtype: "auto" is bfloat16 for a
    checkpoint in bfloat16, else float32. batch_tokens: about how many tokens one forward computes.

    The first load compiles the model, which takes seconds; the disk cache keeps the code. Code in the folder is never
    run. Raises EmbeddingFolderError for a folder that cannot be served.
    """
    path = Path(folder)
    recipe = read_recipe(path, task, pooling)
    return TextModel(recipe, _weights(recipe, dtype), batch_tokens)


class TextModel:
    """An embedding model or a reranker.

    recipe: how results are computed. tokenizer: the tokenizer, with the limit of a text. size: numbers in a vector, or
    1 for a reranker. batch_tokens: about how many tokens one forward computes.
    """

    def __init__(self, recipe: Recipe, model: Any, batch_tokens: int) -> None:
        self.batch_tokens = batch_tokens
        self.dtype: torch.dtype = model.dtype
        rows = examples(model.base_model)
        expected = _own_logits(model, rows) if recipe.task == "rerank" and not model.can_generate() else None
        self.packed = PackedModel.of(recipe.transformer, model)
        self.tokenizer = Tokenizer(recipe, self.packed.positions, model.config.vocab_size)
        if recipe.task == "rerank" and recipe.answers is None and model.can_generate():
            answers = (self.tokenizer.id_of("yes"), self.tokenizer.id_of("no"))
            recipe = self.tokenizer.recipe = replace(recipe, answers=answers, wording="card")
        self.recipe = recipe
        if recipe.task == "rerank":
            self._head = head_of(model, recipe)
            # transformers' heads of decoders read the last token that is not the padding token.
            self._padding = model.config.pad_token_id if hasattr(model, "score") else None
            if expected is not None and differs(self._logits(rows), expected, scale=1.0):
                raise EmbeddingFolderError(
                    folder=recipe.transformer,
                    reason=f"the head of {type(model).__name__} computes something else for packed texts",
                    advice="use a model of another family; docs/guides/embeddings.md lists those that are served.",
                )
            self._activation = activation_of(recipe.transformer, recipe.activation or "torch.nn.Sigmoid")
        else:
            self._steps = load_steps(recipe.steps, self.dtype)
        self.size: int = self.run([Tokens([0])]).shape[-1]

    def encode(
        self,
        texts: Sequence[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
    ) -> Tensor:
        """Return the vectors of texts, [texts, size] float32, as sentence-transformers' ``encode`` does.

        prompt_name, prompt: a prompt by its name or its text, put in front of each text. dimensions: how many numbers
        of each vector are kept. If the model normalises, the shorter vectors have the length 1 again.

        Longer texts are cut at ``tokenizer.limit``. Raises EmbeddingInputError for a reranker, an unknown prompt, and
        dimensions that the model does not have.
        """
        if self.recipe.task != "embed":
            raise EmbeddingInputError(
                argument="texts", reason="a reranker takes pairs of texts", advice="call score(pairs)."
            )
        prompt = self.tokenizer.prompt(prompt, prompt_name)
        rows = self.tokenizer.texts(texts, prompt, self.tokenizer.limit)
        return self.shortened(self.run_all(rows), dimensions)

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> Tensor:
        """Return the scores of pairs (query, document), [pairs] float32.

        A reranker's scores equal sentence-transformers' ``CrossEncoder.predict``. An embedding model scores a pair by
        the cosine of its two vectors. ``encode`` describes prompts and limits.
        """
        if self.recipe.task == "embed":
            queries = self.encode([query for query, _ in pairs], prompt_name=prompt_name, prompt=prompt)
            documents = self.encode(
                [document for _, document in pairs], prompt_name=prompt_name, prompt=prompt
            )
            return F.cosine_similarity(queries, documents)
        prompt = self.tokenizer.prompt(prompt, prompt_name)
        return self.run_all(self.tokenizer.pairs(pairs, prompt, self.tokenizer.limit))[:, 0]

    def shortened(self, vectors: Tensor, dimensions: int | None) -> Tensor:
        """Return vectors with their first ``dimensions`` numbers. None: the recipe's number, or all."""
        if dimensions is None and self.recipe.truncate_dim is not None:
            return vectors[:, : self.recipe.truncate_dim]
        if dimensions is None:
            return vectors
        if not 0 < dimensions <= vectors.shape[1]:
            raise EmbeddingInputError(
                argument="dimensions",
                reason=f"{dimensions} is not between 1 and {vectors.shape[1]}",
                advice="leave it out, or pass a number that the model's card names.",
            )
        vectors = vectors[:, :dimensions]
        return F.normalize(vectors, dim=-1) if self.recipe.normalizes else vectors

    def run_all(self, rows: Sequence[Tokens]) -> Tensor:
        """Return the results of rows, [rows, size] float32, in as many forwards as ``batch_tokens`` asks for."""
        results: list[Tensor] = []
        batch: list[Tokens] = []
        for row in rows:
            if batch and sum(map(len, batch)) + len(row) > self.batch_tokens:
                results.append(self.run(batch))
                batch = []
            batch.append(row)
        if batch:
            results.append(self.run(batch))
        return torch.cat(results) if results else torch.empty(0, self.size)

    def run(self, rows: Sequence[Tokens]) -> Tensor:
        """Return the results of rows, [rows, size] float32, in one forward."""
        if self.recipe.task == "rerank":
            return self._activation(self._logits(rows).float())
        hidden, lengths = self.packed.hidden(rows)
        with torch.no_grad():
            skipped = None
            if not self.recipe.include_prompt and any(row.prompt for row in rows):
                skipped = torch.tensor([row.prompt for row in rows])
            vectors = pool(hidden, lengths, self.recipe.poolings, skipped)
            for step in self._steps:
                vectors = step(vectors)
            return vectors

    def _logits(self, rows: Sequence[Tokens]) -> Tensor:
        """Return a reranker's logits before the activation, [rows, 1] in the model's dtype or float32."""
        if self._padding is not None:
            rows = [row.without_end(self._padding) for row in rows]
        hidden, lengths = self.packed.hidden(rows)
        pooling, head = self._head
        with torch.no_grad():
            return head(pool(hidden, lengths, (pooling,)).to(self.dtype))


def _own_logits(model: Any, rows: Sequence[Tokens]) -> Tensor:
    """Return the logits of transformers' own forward, one row at a time."""
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([row.ids])).logits for row in rows])


def _weights(recipe: Recipe, dtype: str) -> Any:
    """Load the transformers model. Raises EmbeddingFolderError for missing weights and for code in the folder."""
    import transformers

    register_attention()
    where: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    folder = recipe.transformer
    try:
        config: Any = transformers.AutoConfig.from_pretrained(folder, **where)
    except (OSError, ValueError) as error:
        raise EmbeddingFolderError(
            folder=folder,
            reason=f"transformers {transformers.__version__} cannot read its configuration: {_first_line(error)}",
            advice="code in the folder is never run: use the same model in transformers' own format.",
        ) from error
    if dtype == "auto":
        dtype = "bfloat16" if config.dtype == torch.bfloat16 else "float32"
    kind: Any = transformers.AutoModel
    if recipe.task == "rerank":
        generates = (config.architectures or [""])[0].endswith("ForCausalLM")
        kind = transformers.AutoModelForCausalLM
        if not generates:
            kind = transformers.AutoModelForSequenceClassification
            _refuse_labels(recipe, config)
    try:
        model, report = kind.from_pretrained(
            folder,
            config=config,
            dtype=DTYPES[dtype],
            attn_implementation="eager",
            output_loading_info=True,
            **where,
        )
    except (OSError, ValueError) as error:
        raise EmbeddingFolderError(
            folder=folder, reason=_first_line(error), advice="download the folder again."
        ) from error
    unused = "pooler." if recipe.task == "embed" else "\0"  # vectors do not pass a pooler of transformers
    if missing := sorted(name for name in report["missing_keys"] if unused not in name):
        raise EmbeddingFolderError(
            folder=folder, reason=f"it lacks {missing[0]}", advice="download the folder again."
        )
    return model.eval().requires_grad_(False)


def _refuse_labels(recipe: Recipe, config: Any) -> None:
    if config.num_labels != 1:
        raise EmbeddingFolderError(
            folder=recipe.transformer,
            reason=f"it has {config.num_labels} labels, and a reranker has one",
            advice="use a reranker.",
        )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
