"""`melodi generate`: a run and a text, or a memory file, to a continuation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from melodi.cli.console import Texts, check_at_least, device_named, parse, use_threads
from melodi.cli.read import reader_of_one
from melodi.config.training import Precision


@dataclass
class GenerateArgs:
    run: Path | None = None
    """A run folder; the model that ships with melodi, laptop-melodi, when not given."""
    memory: Path | None = None
    """Go on from this memory file, written by melodi read."""
    prompt: str | None = None
    """Text to go on from; when not given the end of what is remembered, or a line break."""
    max_tokens: int = 200
    """Tokens to write; fewer where the document ends."""
    temperature: float = 0.8
    """0 always takes the most likely token."""
    top_k: int | None = None
    """Sample among the k most likely tokens only; among all when not given."""
    top_p: float | None = None
    """Sample among the most likely tokens that hold this share of the probability."""
    min_p: float | None = None
    """Sample among tokens at least this many times as likely as the most likely."""
    repetition_penalty: float = 1.0
    """Above 1 makes the last 64 tokens less likely."""
    stop: Texts = ()
    """Texts before which to stop."""
    seed: int | None = None
    """The same seed gives the same text; another one each time when not given."""
    precision: Precision = "fp32"
    """In which numbers products are computed; auto: bf16 where this machine is faster with it."""
    weights: Literal["fp32", "int8"] = "fp32"
    """int8: tokens are written with weights of one byte, faster and nearly as good; on a CPU, with
    --precision fp32."""
    threads: int | None = None
    """CPU threads; torch's own choice when not given."""
    device: str | None = None
    """cpu, cuda …; the GPU where there is one when not given."""


def generate(args: list[str]) -> None:
    """A continuation of a prompt or of a memory file.

    Example: melodi generate --prompt "It was" --max-tokens 100 --seed 1
    """
    options = parse(GenerateArgs, generate, args)
    check_at_least(1, top_k=options.top_k)
    check_at_least(0, max_tokens=options.max_tokens, seed=options.seed)
    use_threads(options.threads)
    device = device_named(options.device)
    from melodi.data.tokenizer import opening
    from melodi.run import default_run, load
    from melodi.stream.sampling import Choices, Sampling

    prompt = options.prompt
    check_text(prompt=prompt or "", stop="".join(options.stop))
    if not all(options.stop):
        raise ValueError("--stop is empty: give some text")
    choices: Choices = {
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "repetition_penalty": options.repetition_penalty,
        "seed": options.seed,
        "stop_strings": options.stop,
    }
    Sampling(options.temperature, **choices)  # what cannot be is said before anything is written
    model = load(options.run or default_run()).to(device)
    choices["stop"] = model.tokenizer.end_of_document
    if prompt is not None and not model.tokenizer.encode(prompt):
        raise ValueError(f"--prompt {prompt!r} holds no token: give some text to go on from")
    int8 = options.weights == "int8"
    reader = reader_of_one(model, options.memory, options.precision, int8)
    if prompt is not None:
        reader.read(prompt)
    elif options.memory is None:
        reader.read(opening(model.tokenizer))
        prompt = "\n"
    print(prompt or "", end="", flush=True)
    try:
        for text in reader.generate_text(options.max_tokens, options.temperature, **choices):
            print(text, end="", flush=True)
    finally:  # an error, too, begins a line of its own
        print()


def check_text(**texts: str) -> None:
    """What a shell gives need not be text, and no tokenizer knows what is not."""
    for name, text in texts.items():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"--{name} holds bytes that are no UTF-8: give it as UTF-8") from None
