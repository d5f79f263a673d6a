"""The bodies of requests. A field that is not listed is refused."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

Ids = Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(min_length=1)]


class _Request(BaseModel):
    """The fields of all requests.

    model: the name that /v1/models lists. user: not read; OpenAI's clients send it.
    truncate_prompt_tokens: where longer texts are cut; -1 is the model's limit. None follows the model's files.
    """

    model_config = ConfigDict(extra="forbid")

    model: StrictStr | None = None
    user: StrictStr | None = None
    truncate_prompt_tokens: Annotated[StrictInt, Field(ge=-1)] | None = None


class EmbeddingRequest(_Request):
    """OpenAI's request for embeddings.

    input: a text, texts, the token ids of a text, or the token ids of texts.
    prompt_name, prompt: a prompt of the model by its name, or its text; it is put in front of each text.
    """

    input: StrictStr | Ids | Annotated[list[StrictStr] | list[Ids], Field(min_length=1)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None
    prompt_name: StrictStr | None = None
    prompt: StrictStr | None = None


class Document(BaseModel):
    """A document of Cohere's and Jina's requests."""

    model_config = ConfigDict(extra="forbid")

    text: StrictStr


class RerankRequest(_Request):
    """The request of Jina's, Cohere's and vLLM's /v1/rerank.

    top_n: how many results are returned; None returns all. instruction: the prompt of a reranker that takes one.
    """

    query: StrictStr
    documents: Annotated[list[StrictStr | Document], Field(min_length=1)]
    top_n: Annotated[StrictInt, Field(ge=1)] | None = None
    return_documents: bool = False
    instruction: StrictStr | None = None

    def texts(self) -> list[str]:
        """Return the documents' texts."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


class ScoreRequest(_Request):
    """vLLM's request for scores.

    text_1 and text_2: one text and one, one and several, or as many and as many.
    """

    text_1: StrictStr | Annotated[list[StrictStr], Field(min_length=1)]
    text_2: StrictStr | Annotated[list[StrictStr], Field(min_length=1)]
    instruction: StrictStr | None = None


_TEXTS = "a text, or a list of at least one text"
# Fields of several forms -> the forms. pydantic names only the first form that a value does not have.
_FORMS = {
    "input": "a text, the token ids of a text, or a list of at least one of these",
    "documents": 'a list of at least one text or {"text": ...}',
    "text_1": _TEXTS,
    "text_2": _TEXTS,
}


def misfit(error: dict[str, Any]) -> tuple[str, str]:
    """Return the name of the field that pydantic refused, and why. error: one of ``ValidationError.errors()``."""
    field = str(next(iter(error["loc"]), "body"))
    missing = error["type"] == "missing"
    return field, f"expected {_FORMS[field]}" if field in _FORMS and not missing else error["msg"]
