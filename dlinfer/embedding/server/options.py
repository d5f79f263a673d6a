"""The options of the embedding server. They have the names of LMDeploy's ``api_server`` where both have one."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlinfer.embedding.folder import TASKS, Task

_DESCRIPTION = (
    "Serve an embedding model or a reranker. `dlinfer serve` starts this server, and takes its options."
)


@dataclass(frozen=True)
class Options:
    """A server's options. ``parser`` describes each of them.

    model_name: the name in requests and answers; None takes the folder's name.
    """

    model: Path
    host: str
    port: int
    model_name: str | None
    api_keys: tuple[str, ...]
    task: Task | None
    pooling: str | None
    dtype: str
    batch_tokens: int
    queue_tokens: int
    matryoshka: bool

    @property
    def name(self) -> str:
        return self.model_name or self.model.resolve().name


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the server's command line."""
    new = argparse.ArgumentParser(
        "python -m dlinfer.embedding.server", description=_DESCRIPTION, allow_abbrev=False
    )
    new.add_argument("model", metavar="MODEL", type=Path, help="folder of the model")
    new.add_argument("--server-name", default="0.0.0.0", metavar="HOST", help="address to listen on")
    new.add_argument("--server-port", type=_count, default=23333, metavar="PORT", help="port to listen on")
    new.add_argument("--model-name", metavar="NAME", help="name in requests; the folder's name by default")
    new.add_argument(
        "--api-keys", nargs="+", default=[], metavar="KEY", help="requests need one of these keys"
    )
    new.add_argument("--task", choices=TASKS, help="where the folder's files do not say it")
    new.add_argument("--pooling", metavar="NAME", help="where no file names it: cls, mean, lasttoken, max")
    new.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="dtype of weights"
    )
    new.add_argument(
        "--batch-tokens",
        type=_count,
        default=2048,
        metavar="N",
        help="about how many tokens one forward computes",
    )
    new.add_argument(
        "--queue-tokens",
        type=_count,
        default=1 << 18,
        metavar="N",
        help="tokens that may wait; a request beyond them is answered 429",
    )
    new.add_argument(
        "--matryoshka", action="store_true", help="serve `dimensions` though the folder names no such sizes"
    )
    return new


def without_address(words: Sequence[str]) -> list[str]:
    """Return the options without the address, which ``dlinfer serve`` chooses for each server."""
    address = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    address.add_argument("--server-name")
    address.add_argument("--server-port")
    return address.parse_known_args(words)[1]


def read(words: Sequence[str]) -> Options:
    """Return the options of a command line. argparse ends the process if they are wrong."""
    values = parser().parse_args(words)
    return Options(
        values.model,
        values.server_name,
        values.server_port,
        values.model_name,
        tuple(values.api_keys),
        values.task,
        values.pooling,
        values.dtype,
        values.batch_tokens,
        values.queue_tokens,
        values.matryoshka,
    )
