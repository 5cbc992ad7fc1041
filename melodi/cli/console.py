"""What all commands share: parsing into one-line errors, tables, progress, presets."""

import contextlib
import io
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import tyro

Args = TypeVar("Args")


def parse(
    cls: type[Args],
    command: Callable[..., Any],
    args: list[str],
    default: Any = None,
) -> Args:
    """Parses a command's arguments; complaints are folded into one line."""
    complaint = io.StringIO()
    name = command.__name__.strip("_")
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                cls, prog=f"melodi {name}", description=command.__doc__, args=args, default=default
            )
    except SystemExit as end:
        if not end.code:
            raise
        # The box's title line and the pointer to --help are left out.
        body = re.sub(r"^╭.*$|For full helptext.*", "", complaint.getvalue(), flags=re.M)
        fail(" ".join(re.sub(r"[─-╿]", " ", body).split()))


def fail(message: str) -> NoReturn:
    print(f"melodi: error: {message}", file=sys.stderr)
    sys.exit(2)


def take_option(args: list[str], name: str) -> tuple[str | None, list[str]]:
    """Takes `--name VALUE` out of the arguments: it decides what the other defaults are."""
    for i, arg in enumerate(args):
        if arg == name:
            if i + 1 == len(args):
                raise ValueError(f"{name} lacks a value: give one")
            return args[i + 1], args[:i] + args[i + 2 :]
        if arg.startswith(f"{name}="):
            return arg.partition("=")[2], args[:i] + args[i + 1 :]
    return None, args


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # Figures are never cut short, however narrow the terminal.
    console = Console()
    console.width = max(console.width, Console(width=1000).measure(table).maximum)
    print(title)
    console.print(table)
