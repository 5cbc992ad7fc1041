"""A run folder to a folder that transformers loads: weights, tokenizer, and a card with the facts.

    config.json, model.safetensors, generation_config.json   as transformers writes them
    tokenizer.json, tokenizer_config.json                     of byte-level and byte vocabularies
    tokenizer.model, tokenizer_config.json                    of SentencePiece ones
    README.md                                                 the model card

The folder is whole or absent.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from melodi.data.tokenizer import (
    END_OF_DOCUMENT,
    BPETokenizer,
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from melodi.files import read_header, read_object, umask, write_text
from melodi.hf.modeling import MelodiForCausalLM
from melodi.hf.pieces import MelodiSentencePiece
from melodi.model import LanguageModel
from melodi.run import Run, load, run_folder, weights_file


def export(run: str | Path, folder: str | Path) -> Path:
    """The run's best weights, as `load` gives them. The folder must be new or empty."""
    folder, place = Path(folder), Path(folder).resolve()
    if place == Path.cwd():
        raise ValueError(f"{folder} is the folder that you are in: name a new one")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is already there: choose a new or empty folder")
    run = run_folder(run)
    core = load(run)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent) as beside:
        partial = Path(beside) / place.name
        partial.mkdir()
        save(core, partial)
        write_text(partial / "README.md", card(Run(run), core))
        for file in partial.iterdir():  # safetensors writes files that only their owner can read
            file.chmod(0o666 & ~umask())
        partial.replace(place)
    return folder


def save(core: LanguageModel, folder: Path) -> None:
    model = MelodiForCausalLM.from_core(core)
    tokenizer = tokenizer_for(core.tokenizer, folder)
    for config in (model.config, model.generation_config):
        config.eos_token_id = core.tokenizer.end_of_document
        config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tokenizer_for(tokenizer: Tokenizer, folder: Path) -> PreTrainedTokenizerBase:
    """The same ids from transformers. As in ours no special token is added to a text, and one that
    is spelt out is read as characters. A SentencePiece model is written into the folder first."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        tokenizer.save(folder)
        return MelodiSentencePiece(str(folder / tokenizer.FILE))
    if isinstance(tokenizer, ByteTokenizer):
        return fast_tokenizer(byte_definition(), tokenizer.end_of_document)
    assert isinstance(tokenizer, BPETokenizer)
    return fast_tokenizer(json.loads(tokenizer.definition), tokenizer.end_of_document)


def fast_tokenizer(
    definition: dict[str, Any], end_of_document: int | None
) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer as Engine

    definition.update(post_processor=None, truncation=None, padding=None)
    end = END_OF_DOCUMENT if end_of_document is not None else None
    # Only a special token can pad: decoding leaves it out. A vocabulary without one cannot.
    special = [token["content"] for token in definition["added_tokens"] if token["special"]]
    return PreTrainedTokenizerFast(
        tokenizer_object=Engine.from_str(json.dumps(definition)),
        eos_token=end,
        pad_token=end or next(iter(special), None),
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def byte_definition() -> dict[str, Any]:
    """A tokenizer.json whose ids are the bytes: byte-level BPE without merges."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Engine

    # Byte-level vocabularies write bytes that have no glyph of their own as characters from 256 on.
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in shown]
    names = {chr(byte if byte in shown else 256 + hidden.index(byte)): byte for byte in range(256)}
    engine = Engine(models.BPE(vocab=names, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True)])
    definition: dict[str, Any] = json.loads(engine.to_str())
    return definition


def card(run: Run, core: LanguageModel) -> str:
    """The model card: what the folder is, how it is loaded, and what the run says of itself."""
    facts = [
        "| | |",
        "|---|---|",
        *[f"| {name} | {value} |" for name, value in run_facts(run, core).items()],
    ]
    return CARD.format(facts="\n".join(facts), evaluations=evaluations(run))


def run_facts(run: Run, core: LanguageModel) -> dict[str, str]:
    config, train, _ = run.configs()
    weights = weights_file(run.folder)
    made_with = run.environment()
    return {
        "preset": str(run.read_config().get("preset") or "none"),
        "layers": ", ".join(config.layers),
        "parameters": f"{core.num_parameters:,}",
        "window": f"{config.window} tokens",
        "memory": f"{sum(config.memory_floats()):,} floats per document",
        "vocabulary": f"{config.vocab_size:,} ({type(core.tokenizer).__name__})",
        "weights": f"{weights.name}, step {read_header(weights).get('step', 'unknown')} of a run "
        f"over {train.steps} steps, seed {train.seed}",
        "made with": f"melodi {made_with.get('melodi')}, torch {made_with.get('torch')}, "
        f"commit {made_with.get('commit')}",
    }


def evaluations(run: Run) -> str:
    """A line for each whole split that `melodi eval` has read."""
    records = [
        read_object(path, "split", "documents", "step", "perplexity", "perplexity_without_memory")
        for path in sorted(run.folder.glob("eval-*.json"))
    ]
    lines = [
        f"| {record['split']}, {record['documents']} documents, step {record['step']} "
        f"| {shown(record['perplexity'])} | {shown(record['perplexity_without_memory'])} |"
        for record in records
    ]
    head = ["| | perplexity | with memory dropped at every window |", "|---|---|---|"]
    return "\n".join([*head, *lines] if lines else ["Not evaluated: `melodi eval` was not run."])


def shown(perplexity: float | None) -> str:
    """One that is not finite is null in a record."""
    return "-" if perplexity is None else f"{perplexity:.2f}"


CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- melodi
- long-context
- memory
---

# A Melodi language model

It reads documents of any length through a short window and carries a small memory of fixed size.

```python
import melodi.hf  # melodi, with its extra hf; tells transformers what "melodi" is
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")  # this folder
tokenizer = AutoTokenizer.from_pretrained(".")
inputs = tokenizer("It was", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```

## The run

{facts}

## Evaluation

{evaluations}
"""
