"""`melodi memory`: what presets, and variations of them, cost."""

import json
from dataclasses import dataclass
from typing import Annotated

from melodi.cli.console import UNPREFIXED, parse, parse_known, print_table
from melodi.config import PRESETS, ModelConfig, preset


@dataclass
class MemoryArgs:
    preset: str | None = None
    """Name of a preset; all of them when not given. With it, any of its fields can be changed:
    melodi memory --preset NAME --help lists them."""
    json: bool = False
    """Print a JSON list instead of a table."""


@dataclass(kw_only=True)
class VariedMemoryArgs(MemoryArgs):
    config: Annotated[ModelConfig, UNPREFIXED]


def memory(args: list[str]) -> None:
    """What a preset costs: memory in floats and bytes per document, and parameters.

    Example: melodi memory --preset paper-melodi-s128-l64 --window 256
    """
    start, others = parse_known(MemoryArgs, args)
    if start.preset is None:
        for flag in (arg.partition("=")[0] for arg in others if arg.startswith("--")):
            if flag.removeprefix("--").replace("-", "_") in ModelConfig.__dataclass_fields__:
                raise ValueError(f"{flag} changes a preset: add --preset NAME")
        parse(MemoryArgs, memory, args)
        configs = dict(PRESETS)
    else:
        default = VariedMemoryArgs(config=preset(start.preset))
        configs = {start.preset: parse(VariedMemoryArgs, memory, args, default).config}
    print_memory(configs, start.json)


def print_memory(configs: dict[str, ModelConfig], as_json: bool) -> None:
    from melodi.paper.costs import cost

    costs = {name: cost(config) for name, config in configs.items()}
    if as_json:
        print(json.dumps([{"preset": name, **row} for name, row in costs.items()], indent=2))
        return
    print_table(
        "Memory per document, in floats",
        ["preset", "short-term", "long-term", "all", "MB fp32", "parameters"],
        [
            [
                name,
                *[f"{row[key]:,}" for key in ("short", "long", "floats")],
                f"{row['bytes_fp32'] / 1e6:.1f}",
                f"{row['parameters']:,}",
            ]
            for name, row in costs.items()
        ],
    )
