"""From texts, and from pairs of texts, to token ids."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from dlinfer.embedding.errors import EmbeddingFolderError, EmbeddingInputError
from dlinfer.embedding.recipe import Recipe

_WITHOUT_LIMIT = 1 << 30
"""Tokenizers that name no limit have a larger number here."""

# How Qwen3-Reranker, and models trained as it was, ask for the answer "yes" or "no". The model's card has this text.
_QUESTION = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True)
class Tokens:
    """One text, or one joined pair.

    ids: at least one token. types: the token type of each token; None: all 0.
    prompt: how many first tokens belong to the prompt.
    """

    ids: Sequence[int]
    types: Sequence[int] | None = None
    prompt: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def without_end(self, token: int) -> "Tokens":
        """Return the tokens before all equal tokens ``token`` at the end; at least one token."""
        count = len(self.ids)
        while count > 1 and self.ids[count - 1] == token:
            count -= 1
        return self if count == len(self.ids) else Tokens(self.ids[:count], self.types, self.prompt)


class Tokenizer:
    """The tokenizer of a model folder, with the limit of its recipe. Several threads may call it.

    limit: the most tokens of a text. vocabulary: all token ids are below it.
    """

    def __init__(self, recipe: Recipe, positions: int | None, vocabulary: int) -> None:
        """Load the tokenizer. positions: how many tokens the model can place, or None for any number."""
        from transformers import AutoTokenizer

        self.recipe, self.vocabulary = recipe, vocabulary
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            recipe.transformer, local_files_only=True, trust_remote_code=False
        )
        if not self._tokenizer.is_fast:
            raise EmbeddingFolderError(
                folder=recipe.transformer,
                reason="it has no tokenizer.json",
                advice="save its tokenizer with AutoTokenizer.from_pretrained(...).save_pretrained(...).",
            )
        if recipe.lower_case:
            self._lower()
        named = recipe.max_length or min(self._tokenizer.model_max_length, _WITHOUT_LIMIT)
        self.limit: int = min(named, positions or named)
        self._lock = threading.Lock()  # a call with another truncation changes the tokenizer's state
        self._prompts: dict[str, int] = {}
        self._tails: dict[str | None, list[int]] = {}
        self._takes_types = "token_type_ids" in self._tokenizer.model_input_names

    def prompt(self, text: str | None, name: str | None) -> str | None:
        """Return the prompt that a call asks for: its text, the text of its name, or the recipe's default."""
        if text is not None:
            return text
        chosen = self.recipe.default_prompt if name is None else name
        if chosen is None:
            return None
        if chosen not in self.recipe.prompts:
            raise EmbeddingInputError(
                argument="prompt_name",
                reason=f"the model has no prompt {chosen!r}",
                advice=f"choose one of {sorted(self.recipe.prompts)}, or pass the text itself as prompt.",
            )
        return self.recipe.prompts[chosen]

    def texts(self, texts: Sequence[str], prompt: str | None, limit: int | None) -> list[Tokens]:
        """Return the tokens of texts. limit: where a text is cut. None: nowhere.

        Raises EmbeddingInputError for a text without tokens.
        """
        if not texts:
            return []
        skipped = 0
        if prompt:
            texts = [prompt + text for text in texts]
            skipped = 0 if self.recipe.include_prompt else self._prompt_length(prompt)
        encoded = self._call(texts, None, limit)
        return [self._row(encoded, index, skipped) for index in range(len(texts))]

    def pairs(self, pairs: Sequence[tuple[str, str]], prompt: str | None, limit: int | None) -> list[Tokens]:
        """Return the tokens of pairs (query, document). limit: where a pair is cut. None: nowhere.

        Raises EmbeddingInputError for a pair without tokens.
        """
        if not pairs:
            return []
        if self.recipe.wording in ("flat", "structured"):
            return [self._by_template(query, document, prompt, limit) for query, document in pairs]
        if self.recipe.wording == "card":
            return self._by_card(pairs, prompt or _INSTRUCTION, limit)
        queries = [(prompt or "") + query for query, _ in pairs]
        encoded = self._call(queries, [document for _, document in pairs], limit)
        return [self._row(encoded, index, 0) for index in range(len(pairs))]

    def id_of(self, word: str) -> int:
        """Return the id of a word that is one token. Raises EmbeddingFolderError if it is none."""
        number = self._tokenizer.convert_tokens_to_ids(word)
        if number is None or number == self._tokenizer.unk_token_id:
            raise EmbeddingFolderError(
                folder=self.recipe.transformer,
                reason=f"its tokenizer has no token {word!r} to answer with",
                advice="use a reranker that answers yes or no, or one with a classification head.",
            )
        return number

    def _call(
        self, texts: Sequence[str], seconds: Sequence[str] | None, limit: int | None, **how: Any
    ) -> Any:
        cut: dict[str, Any] = {} if limit is None else {"truncation": "longest_first", "max_length": limit}
        with self._lock:
            return self._tokenizer(
                list(texts),
                None if seconds is None else list(seconds),
                return_attention_mask=False,
                verbose=False,
                **cut,
                **how,
            )

    def _row(self, encoded: Any, index: int, prompt: int) -> Tokens:
        if not encoded["input_ids"][index]:
            raise EmbeddingInputError(
                argument="texts", reason=f"text {index} has no tokens", advice="leave it out."
            )
        types = encoded["token_type_ids"][index] if self._takes_types else None
        return Tokens(encoded["input_ids"][index], types, prompt)

    def _prompt_length(self, prompt: str) -> int:
        """Return how many tokens a prompt has, without a special token behind it."""
        if prompt not in self._prompts:
            ids = self._call([prompt], None, None)["input_ids"][0]
            special = bool(ids) and ids[-1] in self._tokenizer.all_special_ids
            self._prompts[prompt] = len(ids) - special
        return self._prompts[prompt]

    def _by_card(self, pairs: Sequence[tuple[str, str]], instruction: str, limit: int | None) -> list[Tokens]:
        plain = {"add_special_tokens": False}
        head, tail = self._call([_QUESTION, _ANSWER], None, None, **plain)["input_ids"]
        room = None if limit is None else max(limit - len(head) - len(tail), 1)
        bodies = [
            f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
            for query, document in pairs
        ]
        encoded = self._call(bodies, None, room, **plain)["input_ids"]
        return [Tokens([*head, *body, *tail]) for body in encoded]

    def _by_template(self, query: str, document: str, prompt: str | None, limit: int | None) -> Tokens:
        ids = self._rendered(query, document, prompt)
        if limit is not None and len(ids) > limit:
            tail = self._tail(prompt)[-limit:]
            ids = ids[: limit - len(tail)] + tail
        return Tokens(ids)

    def _rendered(self, query: str, document: str, prompt: str | None) -> list[int]:
        parts = [("query", query), ("document", document)]
        if prompt:
            parts.insert(0, ("system", prompt))
        flat = self.recipe.wording == "flat"
        messages = [
            {"role": role, "content": text if flat else [{"type": "text", "text": text}]}
            for role, text in parts
        ]
        with self._lock:
            return self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)

    def _tail(self, prompt: str | None) -> list[int]:
        """Return the tokens that the chat template writes behind any document."""
        if prompt not in self._tails:
            first, second = (self._rendered(text, text, prompt)[::-1] for text in ("0", "1 2 3 4"))
            same = list(takewhile(lambda both: both[0] == both[1], zip(first, second, strict=False)))
            if len(same) == min(len(first), len(second)):
                raise EmbeddingFolderError(
                    folder=self.recipe.transformer,
                    reason="its chat template does not write the roles query and document",
                    advice="use the chat_template.jinja that belongs to the reranker.",
                )
            self._tails[prompt] = [token for token, _ in reversed(same)]
        return self._tails[prompt]

    def _lower(self) -> None:
        from tokenizers.normalizers import Lowercase
        from tokenizers.normalizers import Sequence as Normalizers

        backend = self._tokenizer.backend_tokenizer
        before = backend.normalizer
        backend.normalizer = Lowercase() if before is None else Normalizers([Lowercase(), before])
