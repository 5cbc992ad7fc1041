"""`melodi inspect`: what a memory file holds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from melodi.cli.console import parse, print_table

MemoryFile = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
AGES = 8
"""Ages of windows that are shown; the others only as JSON."""


@dataclass
class InspectArgs:
    file: MemoryFile
    """A memory file, written by melodi read or MemoryState.save."""
    json: bool = False
    """Print one JSON object instead of tables."""


def inspect(args: list[str]) -> None:
    """What a memory file holds, how large it is by layer and age, and for which model.

    Example: melodi inspect book.memory
    """
    options = parse(InspectArgs, inspect, args)
    from melodi.evaluation.contents import contents
    from melodi.files import json_text

    found = contents(options.file)
    if options.json:
        print(json_text(found, indent=2))
    else:
        print_contents(found)


def print_contents(found: dict[str, Any]) -> None:
    print(f"{found['path']}: {found['bytes']:,} bytes, stored as {found['stored_as']}")
    for row in range(found["rows"]):
        name = f"row {row}" if found["rows"] > 1 else "document"
        print(
            f"{name}: {found['tokens'][row]:,} tokens, {found['windows'][row]:,} whole windows and "
            f"{found['open_tokens'][row]} tokens"
        )
    config = found["config"]
    print(
        f"model: {len(config['layers'])} layers of width {config['width']}, window "
        f"{config['window']}, vocabulary {config['vocab_size']}, {config['dialect']} dialect"
    )
    for name in ("config_digest", "weights_digest", "tokenizer_digest", "text_digests"):
        value = found[name]
        for digest in value if isinstance(value, list) else [value]:
            print(f"{name.replace('_', ' ').removesuffix('s')}: {digest or 'not known'}")
    if found["expects_next"]:
        print("the next token can be scored, or generated, at once")
    else:
        print("one more token must be read before the next can be scored or generated")
    print_table(
        f"{found['floats_per_document']:,} floats per document",
        ["layer", "carried", "size", "mean norm"],
        [
            [
                f"{layer['layer']} {layer['kind']}",
                one["name"],
                "x".join(map(str, one["shape"])),
                number(one["norm"]),
            ]
            for layer in found["layers"]
            for one in layer["carried"]
        ],
    )
    aged = [
        [f"{layer['layer']} {one['name']}", *map(number, one["norm_by_age"][:AGES])]
        for layer in found["layers"]
        for one in layer["carried"]
        if one.get("norm_by_age")
    ]
    if aged:
        ages = max(map(len, aged)) - 1
        padded = [row + [""] * (ages + 1 - len(row)) for row in aged]
        print_table("mean norm by age in windows", ["", *map(str, range(1, ages + 1))], padded)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
