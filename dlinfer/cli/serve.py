"""``dlinfer serve``: start a router and, behind it, one or several servers for each NUMA node."""

import argparse
import asyncio
import logging
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dlinfer.errors import DlinferError
from dlinfer.serve import output
from dlinfer.serve.errors import JoinError, ReplicaOptionError, ServePackageError, ServeSystemError

if TYPE_CHECKING:
    from dlinfer.serve.options import ServerOptions

EXIT = (
    "All other options go to each server; write MODEL before them. They are options of `lmdeploy serve api_server` or, "
    "for an embedding model or a reranker, of `python -m dlinfer.embedding.server`. Exit status: 0 after SIGTERM or "
    "Ctrl-C, 1 if serving cannot start or cannot continue, 2 if an option is refused."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("model", metavar="MODEL", help="model folder, GGUF file or hub id, as for LMDeploy")
    parser.add_argument(
        "--replicas", type=int, metavar="N", help="number of servers (default: one for each NUMA node)"
    )
    parser.add_argument("--join", metavar="URL", help="let this machine's servers join the router at URL")
    parser.add_argument(
        "--join-key",
        type=Path,
        metavar="FILE",
        help=(
            "file with a secret: machines with the same secret may join this router; with --join, this machine "
            "uses it to join"
        ),
    )
    parser.add_argument(
        "--task",
        choices=["generate", "embed", "rerank"],
        help="what the model is for, if its folder's files do not say it; embed and rerank start an embedding server",
    )
    parser.set_defaults(server_options=[])


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends the command, and return the exit status."""
    handler = output.LogLines()
    logging.basicConfig(level=logging.INFO, format="dlinfer serve: %(message)s", handlers=[handler])
    try:
        supervisor = _supervisor(arguments)
    except DlinferError as error:
        sys.stderr.write(f"dlinfer serve: error: {error}\n")
        return 2
    try:
        asyncio.run(supervisor.run())
    except DlinferError as error:
        sys.stderr.write(f"dlinfer serve: error: {error}\n")
        return 1
    return 0


def _supervisor(arguments: argparse.Namespace):
    if platform.system() != "Linux":
        raise ServeSystemError(system=platform.system())
    try:
        from dlinfer.serve import addresses, join, options, placement, router
        from dlinfer.serve.supervisor import Supervisor
    except ModuleNotFoundError as error:
        raise ServePackageError(what="dlinfer serve", package=error.name) from None
    from dlinfer.vendor.cpu.host import cpus

    if arguments.replicas is not None and arguments.replicas < 1:
        raise ReplicaOptionError(
            option="--replicas", reason="the number is below 1", advice="pass a number of at least 1."
        )
    usable = cpus.usable_cpus()
    placements = placement.place(usable.physical(), usable.quota, arguments.replicas)
    several = len(placements) > 1 or arguments.join is not None or arguments.join_key is not None
    task = _task(arguments)
    server = (
        options.read(arguments.server_options, several)
        if task is None
        else _embedding_options(arguments, task)
    )
    key = None if arguments.join_key is None else _secret(arguments.join_key)
    if arguments.join is not None:
        if key is None:
            raise JoinError(
                url=arguments.join,
                detail="--join-key is missing",
                advice="pass --join-key with the same secret on both machines.",
            )
        join.router_address(arguments.join)  # raises JoinError for a bad URL
        if server.host in addresses.EVERY_ADDRESS:
            server = server.at(join.local_address(arguments.join))
    elif several:
        router.find()
    if arguments.join is None:
        server = server.at(addresses.checked(server.host, server.port))
    return Supervisor(arguments.model, server, placements, key, arguments.join)


def _task(arguments: argparse.Namespace) -> str | None:
    """Return "embed" or "rerank"; None for a model that generates text, or that is no folder."""
    from dlinfer.embedding.folder import task_of

    if arguments.task is not None:
        return None if arguments.task == "generate" else arguments.task
    folder = Path(arguments.model)
    return task_of(folder) if folder.is_dir() else None


def _embedding_options(arguments: argparse.Namespace, task: str) -> "ServerOptions":
    """Return the options of embedding servers. argparse ends the process if they are wrong.

    Raises EmbeddingFolderError if the folder cannot be served.
    """
    from dlinfer.embedding.recipe import read_recipe
    from dlinfer.embedding.server import options as embedding_options
    from dlinfer.serve.options import ServerOptions

    words = ["--task", task, *arguments.server_options]
    chosen = embedding_options.read([arguments.model, *words])
    read_recipe(chosen.model, chosen.task, chosen.pooling)  # refuse the folder before servers start
    passed = tuple(embedding_options.without_address(words))
    return ServerOptions(chosen.host, chosen.port, passed, ("dlinfer.embedding.server",))


def _secret(path: Path) -> str:
    try:
        text = path.read_text().strip()
    except OSError as error:
        text, detail = "", str(error)
    else:
        detail = "the file is empty"
    if not text:
        raise ReplicaOptionError(
            option=f"--join-key {path}", reason=detail, advice="pass a file that contains a secret."
        )
    return text
