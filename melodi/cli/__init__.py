"""The `melodi` command: a coat, not bones. Each command parses, calls the core, and prints.

Errors that a user can cause are one line, without a traceback. Threads are set here and nowhere
else; heavy modules are imported by the command that needs them.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from melodi.cli.console import fail, parse, print_table, take_option
from melodi.config import PRESETS, ModelConfig, preset
from melodi.config.training import Execution, TrainConfig, recipe
from melodi.files import json_text
from melodi.run import Run, load

if TYPE_CHECKING:
    from melodi.data.store import TokenStore
    from melodi.evaluation.documents import Evaluation

Unprefixed = tyro.conf.arg(name="")


@dataclass
class PrepareArgs:
    sources: tyro.conf.Positional[tuple[str, ...]] = ()
    """Folders and files of .txt, .md, .tex, .py, .jsonl, .jsonl.gz, .jsonl.zst and .parquet; pg19,
    arxiv-math, c4-4k or hub:NAME[:CONFIG]. Without any: the standard library of this Python.
    A folder with parts named train and validation or test keeps these splits, and only these."""
    out: Path = Path("store")
    """Folder to make the token store in."""
    vocab_size: int | None = None
    """Train a byte-level vocabulary of this size on the training documents; 2048 by default."""
    tokenizer: str | None = None
    """Use this SentencePiece *.model or tokenizer.json instead, or bytes."""
    text_column: str = "text"
    """Where JSON lines, parquet and hub datasets have their text."""
    validation_share: float = 0.02
    """Share of the documents to hold out, unless the source has splits."""
    test_share: float = 0.02
    """Share of the documents to hold out, unless the source has splits."""
    workers: int | None = None
    """Threads that encode; as many as there are cores by default."""
    json: bool = False
    """Print the manifest as JSON instead of a table."""


def prepare(args: list[str]) -> None:
    """Corpus to tokenizer and token store; run again, an interrupted one continues.

    Example: melodi prepare books/ --out store --vocab-size 8192
    """
    from melodi.data import store as data

    options = parse(PrepareArgs, prepare, args)
    try:
        store = data.prepare(
            options.sources,
            options.out,
            options.vocab_size,
            options.tokenizer,
            options.workers,
            options.text_column,
            options.validation_share,
            options.test_share,
        )
    except KeyboardInterrupt:
        print("melodi: interrupted: the same command continues from here", file=sys.stderr)
        raise SystemExit(130) from None
    if options.json:
        print(json.dumps(store.manifest, indent=2))
    else:
        print_store(store)


def print_store(store: "TokenStore") -> None:
    from melodi.data.prepare import counts_in_words

    manifest = store.manifest
    print_table(
        f"{store.path}: {', '.join(manifest['sources'])}, vocabulary of {store.vocab_size:,}",
        ["split", "documents", "tokens", "bytes", "bytes/token"],
        [
            [
                split,
                *[f"{about[key]:,}" for key in ("documents", "tokens", "bytes")],
                f"{about['bytes'] / max(about['tokens'], 1):.2f}",
            ]
            for split, about in manifest["splits"].items()
        ],
    )
    for what in ("skipped", "repaired"):
        if manifest[what]:
            print(f"{what}: {counts_in_words(manifest[what])}")


@dataclass
class TrainArgs:
    train: Annotated[TrainConfig, Unprefixed]
    model: ModelConfig
    execution: Annotated[Execution, Unprefixed] = field(default_factory=Execution)
    data: Path | None = None
    """The token store; needed for a new run."""
    out: Path = Path("run")
    """The run folder."""
    resume: bool = False
    """Continue the run in --out if there is one."""
    threads: int | None = None
    """CPU threads; torch's own choice when not given."""
    device: str | None = None
    """cpu, cuda, cuda:1 …; the GPU where there is one."""


def train(args: list[str]) -> None:
    """Preset or config to run folder. Add --preset NAME first to see that preset's defaults.

    Example: melodi train --preset laptop-melodi --data store --out runs/first --steps 300
    """
    import torch

    from melodi.data.store import TokenStore
    from melodi.training.distributed import processes
    from melodi.training.trainer import train as train_run

    name, rest = take_option(args, "--preset")
    out, _ = take_option(rest, "--out")
    run = Run(out or "run")
    resumes = "--resume" in rest and run.exists
    if resumes:
        model, config, _ = run.configs()
        default = TrainArgs(config, model)
    else:
        chosen = name or "laptop-melodi"
        default = TrainArgs(recipe(chosen), preset(chosen))
    options = parse(TrainArgs, train, rest, default)
    if name is None and not resumes:
        raise ValueError("--preset is missing: melodi memory lists all presets")
    if options.threads:
        torch.set_num_threads(options.threads)
    if resumes:
        store = run.open_store(options.data)
    elif options.data is None:
        raise ValueError("--data is missing: make a store with melodi prepare --out STORE")
    else:
        store = TokenStore.open(options.data)
    if not resumes and not any(arg.startswith("--model.vocab-size") for arg in rest):
        options.model = replace(options.model, vocab_size=store.vocab_size)
    with processes(options.device) as group:
        result = train_run(
            *(run.folder, store, options.model, options.train, options.execution, group, resumes),
            preset=name,
        )
        if group.first:
            print(closing_line(run.folder, options.train.steps, result))


def closing_line(folder: Path, steps: int, result: "Evaluation") -> str:
    if not result.predictions:
        return f"{folder}: {steps} steps done, nothing was validated"
    return (
        f"{folder}: {steps} steps, validation perplexity {result.perplexity:.2f}, "
        f"{result.bits_per_byte:.3f} bits per byte"
    )


@dataclass
class EvalArgs:
    run: tyro.conf.Positional[Path]
    """A run folder."""
    data: Path | None = None
    """A token store made with the same tokenizer; the run's own when not given."""
    split: str = "test"
    """train, validation or test."""
    rows: int = 8
    """Documents that are read at the same time."""
    max_tokens: int | None = None
    """Read whole documents until they hold about this many tokens; all of them when not given."""
    threads: int | None = None
    """CPU threads; torch's own choice when not given."""
    device: str | None = None
    """cpu, cuda …; the GPU where there is one."""
    json: bool = False
    """Print one JSON object instead of a table."""


def eval_(args: list[str]) -> None:
    """Run folder to perplexity on whole documents, with memory and with memory dropped.

    Example: melodi eval runs/first --split validation --json
    """
    import torch

    from melodi.evaluation.record import evaluate_run, write_record
    from melodi.training.distributed import device_of

    options = parse(EvalArgs, eval_, args)
    if options.threads:
        torch.set_num_threads(options.threads)
    run = Run(options.run)
    model = load(options.run).to(device_of(options.device))
    store = run.open_store(options.data)
    record = evaluate_run(model, run, store, options.split, options.rows, options.max_tokens)
    if options.json:
        print(json_text(record, indent=2))
    else:
        print_evaluation(options.run, record)
    write_record(run, record)


def print_evaluation(run: Path, record: dict[str, Any]) -> None:
    print_table(
        f"{run}: {record['documents']} {record['split']} documents, "
        f"{record['predictions']:,} predictions",
        ["", "perplexity", "bits per byte"],
        [
            ["memory kept", f"{record['perplexity']:.3f}", f"{record['bits_per_byte']:.4f}"],
            [
                "memory dropped at every window",
                f"{record['perplexity_without_memory']:.3f}",
                f"{record['bits_per_byte_without_memory']:.4f}",
            ],
        ],
    )


@dataclass
class GenerateArgs:
    run: Path
    """A run folder."""
    prompt: str = "\n"
    """Text to go on from."""
    max_tokens: int = 200
    temperature: float = 0.8
    """0 always takes the most likely token."""
    top_k: int | None = None
    """Sample among the k most likely tokens only."""
    seed: int | None = None


def generate(args: list[str]) -> None:
    """A continuation of a prompt, from a run.

    Example: melodi generate --run runs/first --prompt "def read(" --max-tokens 100 --seed 1
    """
    from melodi.stream import StreamReader

    options = parse(GenerateArgs, generate, args)
    model = load(options.run)
    ids = model.tokenizer.encode(options.prompt)
    if not ids:
        raise ValueError("--prompt is empty: give some text to go on from")
    reader = StreamReader(model)
    reader.read(ids)
    shown = options.prompt
    print(shown, end="", flush=True)
    for token in reader.generate(
        options.max_tokens,
        options.temperature,
        options.top_k,
        options.seed,
        stop=model.tokenizer.end_of_document,
    ):
        ids.append(token)
        # A character may need several tokens: wait until it is whole.
        text = model.tokenizer.decode(ids)
        if not text.endswith("�"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print()


@dataclass
class ReportArgs:
    run: tyro.conf.Positional[Path]
    """A run folder."""


def report(args: list[str]) -> None:
    """Run folder to plots: loss, gates, and what the memory is worth (extra: plot).

    Example: melodi report runs/first
    """
    from melodi.paper.report import plot_run

    print(plot_run(parse(ReportArgs, report, args).run))


@dataclass
class MemoryArgs:
    preset: str | None = None
    """Name of a preset; all of them when not given. With it, any of its fields can be changed."""
    json: bool = False
    """Print a JSON list instead of a table."""


@dataclass
class VariedMemoryArgs:
    config: Annotated[ModelConfig, Unprefixed]
    json: bool = False
    """Print a JSON list instead of a table."""


def memory(args: list[str]) -> None:
    """What a preset costs: memory in floats and bytes per document, and parameters.

    Example: melodi memory --preset paper-melodi-s128-l64 --window 256 --long-term-windows 256
    """
    name, rest = take_option(args, "--preset")
    if name is None:
        for flag in (arg for arg in rest if arg.startswith("--")):
            if flag.removeprefix("--").replace("-", "_") in ModelConfig.__dataclass_fields__:
                raise ValueError(f"{flag} changes a preset: add --preset NAME")
        overview = parse(MemoryArgs, memory, rest)
        print_memory(dict(PRESETS), overview.json)
    else:
        varied = parse(VariedMemoryArgs, memory, rest, VariedMemoryArgs(preset(name)))
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


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "prepare": prepare,
    "train": train,
    "eval": eval_,
    "generate": generate,
    "report": report,
    "memory": memory,
}


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
    except BrokenPipeError:  # the reader of the output, `head` say, has gone
        sys.stderr.close()
        sys.exit(1)
    except (ValueError, OSError) as error:
        fail(" ".join(str(error).split()))
    except KeyboardInterrupt as stop:
        print(f"melodi: {stop or 'interrupted'}", file=sys.stderr)
        sys.exit(130)


def usage() -> str:
    lines = [
        f"  {name:<10} {(command.__doc__ or '').partition(chr(10))[0]}"
        for name, command in COMMANDS.items()
    ]
    return "\n".join(
        [
            "usage: melodi COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "melodi COMMAND --help explains a command and gives an example.",
        ]
    )
