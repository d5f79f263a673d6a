"""Errors of ``dlinfer.embedding`` and its server."""

from dlinfer.errors import DlinferError


class EmbeddingFolderError(DlinferError, ValueError):
    """A model folder cannot be served as an embedding model or as a reranker."""

    message = "{folder} cannot be loaded as an embedding model or a reranker: {reason}."
    next_step = "{advice}"


class EmbeddingInputError(DlinferError, ValueError):
    """A text, a pair of texts or an option of a call cannot be embedded or scored."""

    message = "{argument}: {reason}."
    next_step = "{advice}"


class EmbeddingQueueError(DlinferError, RuntimeError):
    """The queue of the embedding server is full."""

    message = "the queue holds {waiting} tokens, and this request has {tokens}; the limit is {limit}."
    next_step = "send the request again in {seconds} s, send fewer texts at once, or start more --replicas."
