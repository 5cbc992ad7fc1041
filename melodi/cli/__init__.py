"""The `melodi` command: a coat, not bones. Each command parses, calls the core, and prints.

This file is the table of commands and imports none of them, so that help costs no torch. What a
user can cause is one line on standard error and exit code 2; Ctrl-C is 130, SIGTERM 143.
"""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import NoReturn

COMMANDS = {
    "prepare": ("melodi.cli.prepare:prepare", "Corpus to tokenizer and token store."),
    "train": ("melodi.cli.train:train", "Preset and token store to run folder."),
    "eval": ("melodi.cli.evaluate:eval_", "Run folder to perplexity on whole documents."),
    "read": ("melodi.cli.read:read", "Documents to nats per token and a memory file."),
    "generate": ("melodi.cli.generate:generate", "A continuation of a prompt or a memory file."),
    "inspect": ("melodi.cli.inspect:inspect", "What a memory file holds."),
    "recall": ("melodi.cli.recall:recall", "How far back models and runs remember."),
    "reproduce": ("melodi.cli.reproduce:reproduce", "A table or figure of the paper."),
    "report": ("melodi.cli.report:report", "Run and recipe folders to tables and plots."),
    "memory": ("melodi.cli.memory:memory", "What a preset costs in floats and bytes."),
    "export": ("melodi.cli.export:export", "Run folder to Hugging Face folder."),
    "bench": ("melodi.cli.bench:bench", "Speed here, next to the alternatives."),
    "completion": ("melodi.cli.completion:completion", "Commands and flags for your shell's Tab."),
}


def main(args: list[str] | None = None) -> None:
    """The entry point of the `melodi` command."""
    args = sys.argv[1:] if args is None else args
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale without "…" prints "?" instead
            stream.reconfigure(errors="replace")
    try:
        with sigterm_interrupts():
            dispatch(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, `head` say, has gone
        sys.stderr.close()
        sys.exit(1)
    except (NotADirectoryError, FileExistsError) as error:
        fail(f"{error.filename or error}: a file is where a folder should be: choose another place")
    except PermissionError as error:
        fail(f"{error.filename or error}: no permission: change that, or choose another place")
    except OSError as error:
        fail(spoken(error))
    except (ValueError, OverflowError) as error:
        fail(str(error))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        fail(f"out of memory: choose a smaller model, fewer rows or shorter segments. {error}")
    except KeyboardInterrupt as stop:
        # A command that ended in order says how to go on, and which signal it was.
        message = stop.args[0] if stop.args else "interrupted"
        number = stop.args[1] if len(stop.args) > 1 else signal.SIGINT
        print(f"melodi: {message}", file=sys.stderr)
        sys.exit(128 + number)


def open_closed_streams() -> None:
    """Where a daemon has closed them, what is printed goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def spoken(error: OSError) -> str:
    """What the system says, without its number, and of which file, if it says that."""
    if error.strerror is None:  # ours, in whole sentences
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does, with what it saves on the way."""

    def interrupt(number: int, _frame: object) -> NoReturn:
        raise KeyboardInterrupt("interrupted", number)

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def dispatch(args: list[str]) -> None:
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return
    if args[0] == "--version":
        from melodi import __version__

        print(__version__)
        return
    name, *rest = args
    if name not in COMMANDS:
        raise ValueError(f"command {name!r} is unknown: choose one of {', '.join(COMMANDS)}")
    module, function = COMMANDS[name][0].split(":")
    getattr(import_module(module), function)(rest)


def usage() -> str:
    return "\n".join(
        [
            "usage: melodi COMMAND [OPTIONS]",
            "",
            *[f"  {name:<10} {help_line}" for name, (_, help_line) in COMMANDS.items()],
            "",
            "melodi COMMAND --help explains a command and gives an example.",
            "melodi --version prints the version.",
        ]
    )


def fail(message: str) -> NoReturn:
    print(f"melodi: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def out_of_memory(error: Exception) -> bool:
    """Torch's own errors are RuntimeErrors, and that of the CPU is known by its words only."""
    words = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in words
        or "not enough memory" in words
    )
