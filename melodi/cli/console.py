"""What all commands share: parsing into one-line errors, one door for numbers, devices, tables."""

import contextlib
import dataclasses
import inspect
import io
import math
import re
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

Args = TypeVar("Args")
UNPREFIXED = tyro.conf.arg(name="")
"""The fields of a config in a command's arguments are flags without its name before them."""


def parse(
    cls: type[Args], command: Callable[..., Any], args: list[str], default: Any = None
) -> Args:
    """A command's arguments, all of them known."""
    name = command.__name__.strip("_")
    with one_line_complaints():
        return tyro.cli(
            cls,
            prog=f"melodi {name}",
            description=inspect.getdoc(command),
            args=args,
            default=default,
            registry=REGISTRY,
        )


def parse_known(cls: type[Args], args: list[str]) -> tuple[Args, list[str]]:
    """The arguments that decide what the other defaults are, and all the others."""
    with one_line_complaints():
        return tyro.cli(cls, args=args, return_unknown_args=True, add_help=False, registry=REGISTRY)


def wants_help(args: list[str]) -> bool:
    return "-h" in args or "--help" in args


@contextlib.contextmanager
def one_line_complaints() -> Iterator[None]:
    """What tyro says in a box becomes a ValueError."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            yield
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(without_box(complaint.getvalue())) from None


def without_box(complaint: str) -> str:
    """The words of a complaint, without its title, its rules, and the help that follows it."""
    # With UTF-8 the title is in the box's first line, else it is underlined.
    words = re.sub(r"^╭.*$|\A.*\n *-+ *$|^ *-+ *$|[─-╿]", " ", complaint, flags=re.M)
    words = re.split(r"Argument helptext:|For full helptext", words)[0]
    return " ".join(words.replace("Error parsing ", "").split())


def integer(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None
    if abs(value) >= 2**63:
        raise ValueError(f"{text} is too large")
    return value


def real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value


Texts = Annotated[
    tuple[str, ...], tyro.conf.arg(metavar="STR [STR ...]", help_behavior_hint="(default: none)")
]
Paths = Annotated[
    tuple[Path, ...], tyro.conf.arg(metavar="PATH [PATH ...]", help_behavior_hint="(default: none)")
]
"""Flags with several values, or none."""

REGISTRY = ConstructorRegistry()
READERS: dict[Any, Callable[[str], Any]] = {int: integer, float: real, str: str, Path: Path}


@REGISTRY.primitive_rule
def read_value(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Numbers that no machine holds are refused, whatever the flag; absence is shown as none."""
    kinds = [kind for kind in get_args(info.type) or (info.type,) if kind is not NoneType]
    optional = len(get_args(info.type)) == 2 and NoneType in get_args(info.type)
    if len(kinds) != 1 or kinds[0] not in READERS or not (optional or info.type in READERS):
        return None
    (kind,) = kinds
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=lambda texts: (
            None if optional and texts[0].lower() == "none" else READERS[kind](texts[0])
        ),
        is_instance=lambda value: isinstance(value, kind) or (optional and value is None),
        str_from_instance=lambda value: ["none" if value is None else str(value)],
    )


def check_not_given(options: Any, names: Container[str], why: str) -> None:
    """Refuses flags that would be passed over in silence; one at its default was not given."""
    for field in dataclasses.fields(options):
        if field.name in names and getattr(options, field.name) != field.default:
            raise ValueError(f"--{field.name.replace('_', '-')} {why}")


def check_at_least(least: int, **values: int | None) -> None:
    """Numbers that were given, by the names of their flags."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {least}")


def check_at_most(most: int, **values: int | None) -> None:
    """The same of numbers that may be too large."""
    for name, value in values.items():
        if value is not None and value > most:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at most {most}")


MOST_THREADS = 1024
"""Far more, and torch ends the process without a word."""


def use_threads(threads: int | None) -> None:
    """All of torch's threads are set here and nowhere else; threads.py shares them out."""
    check_at_least(1, threads=threads)
    check_at_most(MOST_THREADS, threads=threads)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def device_named(name: str | None) -> str:
    """A device that is there; the GPU, if there is one, when none is named."""
    import torch

    found = ["cpu"]
    if torch.cuda.is_available():
        found += ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name is not None and name not in found:
        raise ValueError(
            f"--device {name} is not on this machine: choose one of {', '.join(found)}"
        )
    return name or ("cuda" if "cuda" in found else "cpu")


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table; bare columns with one space between where a terminal is too narrow for it, and where
    there is none: what is piped is for programs, or for a file."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    width = Console(width=1000).measure(table).maximum
    if width > console.width or not console.is_terminal:
        table.box, table.show_edge, table.pad_edge, table.padding = SIMPLE_HEAD, False, False, 0
        width = Console(width=1000).measure(table).maximum
    # Figures are never cut short, however narrow the terminal.
    console.width = max(console.width, width)
    print(title)
    console.print(table)
