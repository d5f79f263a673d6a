"""docs/reference/cli.md: the command ``dlinfer`` with all its options."""

import argparse
from collections.abc import Iterator

from dlinfer.cli import parser_of_all
from dlinfer.embedding.server import options as embedding_server
from docs.generate.text import cell, page, plain, table

NAME = "cli.md"
BEFORE = "`python -m dlinfer` is the same command. `dlinfer COMMAND --help` prints what this page says of it."


def commands(
    of: argparse.ArgumentParser,
) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Every command, with what it is for."""
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in action.choices.items():
                yield command, helps.get(name, "")
                yield from commands(command)


def _written(action: argparse.Action) -> str:
    """The option as it is typed."""
    value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    if action.choices is not None and action.metavar is None:
        value = ",".join(map(str, action.choices))
    if not action.option_strings:
        return f"`{value}`"
    takes = "" if action.nargs == 0 else f" {value}"
    return f"`{', '.join(action.option_strings)}{takes}`"


def _entry(command: argparse.ArgumentParser, summary: str) -> str:
    rows = [
        (_written(action), cell((action.help or "").replace("%%", "%")))
        for action in command._actions
        if not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction))
    ]
    parts = [f"## {command.prog}", plain(command.description or summary[:1].upper() + summary[1:] + ".")]
    if rows:
        parts.append(table(("argument", "meaning"), rows))
    if command.epilog:
        parts.append(plain(command.epilog))
    return "\n\n".join(parts)


def document() -> str:
    entries = [_entry(command, summary) for command, summary in commands(parser_of_all())]
    entries.append(_entry(embedding_server.parser(), ""))
    return page(
        "Command line", "For everybody who types `dlinfer`: each command and its options.", BEFORE, *entries
    )
