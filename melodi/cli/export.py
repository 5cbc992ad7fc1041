"""`melodi export`: a run folder to a folder that transformers loads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from melodi.cli.console import parse


@dataclass
class ExportArgs:
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """A run folder."""
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """A new or empty folder."""


def export(args: list[str]) -> None:
    """Run folder to Hugging Face folder, with tokenizer and model card (extra: hf).

    Example: melodi export runs/books exported
    """
    options = parse(ExportArgs, export, args)
    try:
        from melodi.hf.export import export as export_run
    except ImportError as error:
        raise ValueError(str(error)) from None
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder = export_run(options.run, options.folder)
    print(f"{folder}: load it with AutoModelForCausalLM.from_pretrained after `import melodi.hf`")
