"""`melodi generate`: a run and a text to a continuation."""

from dataclasses import dataclass
from pathlib import Path

from melodi.cli.console import check_at_least, device_named, parse, use_threads


@dataclass
class GenerateArgs:
    run: Path
    """A run folder."""
    prompt: str | None = None
    """Text to go on from; a line break when not given."""
    max_tokens: int = 200
    """Tokens to write; fewer where the document ends."""
    temperature: float = 0.8
    """0 always takes the most likely token."""
    top_k: int | None = None
    """Sample among the k most likely tokens only; among all when not given."""
    seed: int | None = None
    """The same seed gives the same text; another one each time when not given."""
    threads: int | None = None
    """CPU threads; torch's own choice when not given."""
    device: str | None = None
    """cpu, cuda …; the GPU where there is one when not given."""


def generate(args: list[str]) -> None:
    """A continuation of a prompt, from a run.

    Example: melodi generate --run runs/first --prompt "def read(" --max-tokens 100 --seed 1
    """
    options = parse(GenerateArgs, generate, args)
    check_at_least(1, top_k=options.top_k)
    check_at_least(0, max_tokens=options.max_tokens, seed=options.seed)
    use_threads(options.threads)
    device = device_named(options.device)
    from melodi.data.detokenizer import Detokenizer
    from melodi.run import load
    from melodi.stream import StreamReader

    model = load(options.run)
    model.to(device)
    prompt = "\n" if options.prompt is None else options.prompt
    ids = model.tokenizer.encode(prompt)
    if not ids:
        raise ValueError("--prompt is empty: give some text to go on from")
    reader = StreamReader(model)
    reader.read(ids)
    text = Detokenizer(model.tokenizer, ids)
    print(prompt, end="", flush=True)
    try:
        for token in reader.generate(
            options.max_tokens,
            options.temperature,
            options.top_k,
            options.seed,
            stop=model.tokenizer.end_of_document,
        ):
            print(text.push(token), end="", flush=True)
    finally:  # an error, too, begins a line of its own
        print(text.rest())
