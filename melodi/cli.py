"""The `melodi` command: a coat, not bones. Each command parses, calls the core, and prints.

Errors that a user can cause are one line, without a traceback.
"""

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, TypeVar

import tyro

from melodi.config import PRESETS, ModelConfig, preset

Args = TypeVar("Args")


@dataclass
class MemoryArgs:
    preset: str | None = None
    """Name of a preset; all of them when not given. With it, any of its fields can be changed."""
    json: bool = False
    """Print a JSON list instead of a table."""


@dataclass
class VariedMemoryArgs:
    config: Annotated[ModelConfig, tyro.conf.arg(name="")]
    json: bool = False
    """Print a JSON list instead of a table."""


def memory(args: list[str]) -> None:
    """What a preset costs: memory in floats and bytes per document, and parameters.

    Example: melodi memory --preset paper-melodi-s128-l64 --window 256 --long-term-windows 256
    """
    name, rest = preset_and_rest(args)
    if name is None:
        overview = parse(MemoryArgs, "memory", memory, rest)
        print_memory(dict(PRESETS), overview.json)
    else:
        varied = parse(VariedMemoryArgs, "memory", memory, rest, VariedMemoryArgs(preset(name)))
        print_memory({name: varied.config}, varied.json)


def print_memory(configs: dict[str, ModelConfig], as_json: bool) -> None:
    import torch

    from melodi.model import LanguageModel

    rows: list[dict[str, Any]] = []
    for name, config in configs.items():
        with torch.device("meta"):
            parameters = LanguageModel(config).num_parameters
        short, long = config.memory_floats()
        rows.append(
            {
                "preset": name,
                "short": short,
                "long": long,
                "floats": short + long,
                "bytes_fp32": 4 * (short + long),
                "bytes_bf16": 2 * (short + long),
                "parameters": parameters,
            }
        )
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print_table(
        "Memory per document, in floats",
        ["preset", "short-term", "long-term", "all", "MB fp32", "MB bf16", "parameters"],
        [
            [
                str(row["preset"]),
                *[f"{row[key]:,}" for key in ("short", "long", "floats")],
                *[f"{row[key] / 1e6:.1f}" for key in ("bytes_fp32", "bytes_bf16")],
                f"{row['parameters']:,}",
            ]
            for row in rows
        ],
    )


COMMANDS: dict[str, Callable[[list[str]], None]] = {"memory": memory}


def main(args: list[str] | None = None) -> None:
    """The entry point of the `melodi` command."""
    args = sys.argv[1:] if args is None else args
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return
    if args[0] == "--version":
        from melodi import __version__

        print(__version__)
        return
    name, *rest = args
    if name not in COMMANDS:
        fail(f"command {name!r} is unknown: choose one of {', '.join(COMMANDS)}")
    try:
        COMMANDS[name](rest)
    except (ValueError, OSError) as error:
        fail(str(error))


def usage() -> str:
    lines = [f"  {name:<10} {_first_line(command)}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: melodi COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "melodi COMMAND --help explains a command and gives an example.",
        ]
    )


def fail(message: str) -> NoReturn:
    print(f"melodi: error: {message}", file=sys.stderr)
    sys.exit(2)


def preset_and_rest(args: list[str]) -> tuple[str | None, list[str]]:
    """Takes `--preset NAME` out of the arguments: it decides what the other defaults are."""
    for i, arg in enumerate(args):
        if arg == "--preset":
            if i + 1 == len(args):
                raise ValueError("--preset lacks a name: melodi memory lists all presets")
            return args[i + 1], args[:i] + args[i + 2 :]
        if arg.startswith("--preset="):
            return arg.partition("=")[2], args[:i] + args[i + 1 :]
    return None, args


def parse(
    cls: type[Args],
    name: str,
    command: Callable[..., Any],
    args: list[str],
    default: Any = None,
) -> Args:
    """Parses a command's arguments; complaints are folded into one line."""
    complaint = io.StringIO()
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


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # Figures are never cut short, however narrow the terminal.
    console = Console()
    console.width = max(console.width, Console(width=1000).measure(table).maximum)
    console.print(table)


def _first_line(command: Callable[..., Any]) -> str:
    return (command.__doc__ or "").partition("\n")[0]
