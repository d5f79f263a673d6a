"""The HTTP server of an embedding model or a reranker: ``python -m dlinfer.embedding.server MODEL``."""
