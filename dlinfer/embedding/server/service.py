"""From the body of a request to the body of its answer: tokens, the queue, and the fields that clients expect."""

import asyncio
import base64
import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlinfer.embedding.errors import EmbeddingInputError
from dlinfer.embedding.folder import read_dict
from dlinfer.embedding.server.requests import EmbeddingRequest, RerankRequest, ScoreRequest
from dlinfer.embedding.server.token_queue import TokenQueue
from dlinfer.embedding.text_model import TextModel
from dlinfer.embedding.tokens import Tokens

_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names of a prompt for documents. The first that the model has is used, as by ``encode_document``."""


class Service:
    """Answers requests with a model.

    name: the model's name. matryoshka: whether ``dimensions`` is served though the folder names no sizes.
    """

    def __init__(self, model: TextModel, queue: TokenQueue, name: str, matryoshka: bool) -> None:
        self.model, self.queue, self.name, self._matryoshka = model, queue, name, matryoshka
        config = read_dict(model.recipe.transformer / "config.json")
        self._sizes: list[int] | None = config.get("matryoshka_dimensions")
        self._matryoshka |= bool(config.get("is_matryoshka"))

    async def embeddings(self, request: EmbeddingRequest) -> dict[str, Any]:
        """Return OpenAI's list of embeddings."""
        self._needs("embed", "/v1/embeddings", "use /v1/rerank or /v1/score.")
        self._check_dimensions(request.dimensions)
        inputs: Any = [request.input] if isinstance(request.input, str) else request.input
        inputs = [inputs] if isinstance(inputs[0], int) else inputs
        if isinstance(inputs[0], str):
            prompt = self.model.tokenizer.prompt(request.prompt, request.prompt_name)
            rows = await self._texts(inputs, prompt, request.truncate_prompt_tokens, "input")
        else:
            rows = self._ids(inputs, request.truncate_prompt_tokens)
        vectors = self.model.shortened(torch.stack(await self.queue.submit(rows)), request.dimensions)
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, request.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        return {"object": "list", "data": data, "model": self.name, "usage": _usage(rows)}

    async def rerank(self, request: RerankRequest) -> dict[str, Any]:
        """Return the documents' places and scores, best first."""
        texts, cut = request.texts(), request.truncate_prompt_tokens
        if self.model.recipe.task == "rerank":
            scores, rows = await self._pair_scores([(request.query, text) for text in texts], request, cut)
        else:
            self._refuse_instruction(request)
            query = await self._texts([request.query], self._named(("query",)), cut, "query")
            rows = query + await self._texts(texts, self._named(_DOCUMENT_PROMPTS), cut, "documents")
            vectors = torch.stack(await self.queue.submit(rows))
            scores = F.cosine_similarity(vectors[:1], vectors[1:]).tolist()
        best = sorted(range(len(texts)), key=lambda index: -scores[index])[: request.top_n]
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": texts[index]}} if request.return_documents else {})
            for index in best
        ]
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "object": "list",
            "model": self.name,
            "usage": _usage(rows),
            "results": results,
        }

    async def score(self, request: ScoreRequest) -> dict[str, Any]:
        """Return a score for each pair of texts."""
        first, second = (
            [texts] if isinstance(texts, str) else texts for texts in (request.text_1, request.text_2)
        )
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise EmbeddingInputError(
                argument="text_1",
                reason=f"it has {len(first)} texts, and text_2 has {len(second)}",
                advice="pass one text, or as many as text_2 has.",
            )
        cut = request.truncate_prompt_tokens
        if self.model.recipe.task == "rerank":
            scores, rows = await self._pair_scores(list(zip(first, second, strict=True)), request, cut)
        else:
            self._refuse_instruction(request)
            prompt = self.model.tokenizer.prompt(None, None)
            texts = list(dict.fromkeys([*first, *second]))
            rows = await self._texts(texts, prompt, cut, "text_1 and text_2")
            vectors = dict(zip(texts, await self.queue.submit(rows), strict=True))
            left, right = (torch.stack([vectors[text] for text in side]) for side in (first, second))
            scores = F.cosine_similarity(left, right).tolist()
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": self.name,
            "data": data,
            "usage": _usage(rows),
        }

    async def _pair_scores(
        self, pairs: list[tuple[str, str]], request: RerankRequest | ScoreRequest, cut: int | None
    ) -> tuple[list[float], list[Tokens]]:
        tokenizer = self.model.tokenizer
        prompt = tokenizer.prompt(request.instruction, None)
        limit = self._limit(cut)
        rows = await asyncio.to_thread(tokenizer.pairs, pairs, prompt, limit)
        self._refuse_long(rows, "documents" if isinstance(request, RerankRequest) else "text_2")
        return [float(score) for score in await self.queue.submit(rows)], rows

    async def _texts(
        self, texts: Sequence[str], prompt: str | None, cut: int | None, argument: str
    ) -> list[Tokens]:
        rows = await asyncio.to_thread(self.model.tokenizer.texts, texts, prompt, self._limit(cut))
        self._refuse_long(rows, argument)
        return rows

    def _ids(self, inputs: Sequence[Sequence[int]], cut: int | None) -> list[Tokens]:
        vocabulary = self.model.tokenizer.vocabulary
        if (largest := max(map(max, inputs))) >= vocabulary:
            raise EmbeddingInputError(
                argument="input",
                reason=f"the token id {largest} is not below {vocabulary}",
                advice="use the model's tokenizer.",
            )
        limit = None if cut is None else self._limit(cut)
        rows = [Tokens(ids[:limit]) for ids in inputs]
        self._refuse_long(rows, "input")
        return rows

    def _limit(self, cut: int | None) -> int | None:
        """Return where texts are cut. None: nowhere, so that longer texts are refused."""
        tokenizer = self.model.tokenizer
        if cut is None:
            return tokenizer.limit if self.model.recipe.max_length is not None else None
        if cut == 0 or cut > tokenizer.limit:
            raise EmbeddingInputError(
                argument="truncate_prompt_tokens",
                reason=f"{cut} is not between 1 and the model's limit, {tokenizer.limit}",
                advice="pass -1 for the model's limit.",
            )
        return tokenizer.limit if cut == -1 else cut

    def _refuse_long(self, rows: Sequence[Tokens], argument: str) -> None:
        limit = self.model.tokenizer.limit
        for index, row in enumerate(rows):
            if len(row) > limit:
                raise EmbeddingInputError(
                    argument=argument,
                    reason=f"text {index} has {len(row)} tokens, and the model takes {limit}",
                    advice="shorten it, or pass truncate_prompt_tokens=-1 to have it cut.",
                )

    def _check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is None:
            return
        if self._sizes is not None and dimensions not in self._sizes:
            raise EmbeddingInputError(
                argument="dimensions",
                reason=f"{dimensions} is none of the model's {self._sizes}",
                advice="choose one of them.",
            )
        if self._sizes is None and not self._matryoshka:
            raise EmbeddingInputError(
                argument="dimensions",
                reason="the model's files do not say that its vectors may be cut",
                advice="leave it out; if the model's card says so, start the server with --matryoshka.",
            )

    def _named(self, names: Sequence[str]) -> str | None:
        prompts = self.model.recipe.prompts
        name = next((name for name in names if name in prompts), None)
        return self.model.tokenizer.prompt(None, name)

    def _refuse_instruction(self, request: RerankRequest | ScoreRequest) -> None:
        if request.instruction is not None:
            self._needs("rerank", "instruction", "leave it out.")

    def _needs(self, task: str, what: str, advice: str) -> None:
        if self.model.recipe.task != task:
            raise EmbeddingInputError(
                argument="model" if task == "embed" else what,
                reason=f"{self.name} is no model for {what}",
                advice=advice,
            )


def _encoded(vector: Tensor, how: str) -> Any:
    if how == "float":
        return vector.tolist()
    return base64.b64encode(vector.contiguous().numpy().astype("<f4").tobytes()).decode()


def _usage(rows: Sequence[Tokens]) -> dict[str, int]:
    tokens = sum(map(len, rows))
    return {"prompt_tokens": tokens, "total_tokens": tokens}
