"""``python -m dlinfer.embedding.server MODEL`` serves an embedding model or a reranker."""

import sys
from collections.abc import Sequence

from dlinfer.embedding.server.options import Options, read
from dlinfer.errors import DlinferError


def main(words: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status. Running requests are answered first."""
    options = read(words)
    try:
        serve(options)
    except DlinferError as error:
        sys.stderr.write(f"dlinfer.embedding.server: error: {error}\n")
        return 2
    return 0


def serve(options: Options) -> None:
    """Load the model and serve it. Raises EmbeddingFolderError for a folder that cannot be served."""
    import uvicorn

    from dlinfer.embedding.server.app import create_app
    from dlinfer.embedding.text_model import load

    model = load(
        options.model,
        task=options.task,
        pooling=options.pooling,
        dtype=options.dtype,  # pyright: ignore[reportArgumentType] - argparse has checked it
        batch_tokens=options.batch_tokens,
    )
    dtype = str(model.dtype).removeprefix("torch.")
    print(
        f"dlinfer: {options.name} for {model.recipe.task}, {model.size} numbers, {dtype}, texts up to "
        f"{model.tokenizer.limit} tokens, graph mode: {model.packed.how}",
        flush=True,
    )
    uvicorn.run(create_app(model, options), host=options.host, port=options.port)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
