"""Copies what is needed to use a run, and nothing of the machine that it was made on.

    python tools/ship_run.py runs/best half --bf16            # numbers of two bytes
    melodi eval half --data store                             # what these weights are worth
    python tools/ship_run.py half melodi/shipped/laptop-melodi

Config, environment, metrics, tokenizer, the best weights as model.safetensors, and the records of
`melodi eval`; with --bf16 none of these, because they are of other weights. Paths of stores are cut
to their last names.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch

from melodi.files import read_header, read_json, read_tensors, write_json, write_tensors
from melodi.run import CONFIG, ENVIRONMENT, LAST, METRICS, Run, load, weights_file


def ship(source: Path, folder: Path, bf16: bool) -> Path:
    """A run folder from which `melodi.load` works as from the other."""
    if folder.exists():
        raise SystemExit(f"{folder} is already there: choose a new folder")
    config: dict[str, Any] = Run(source).read_config()
    config["data"]["path"] = Path(config["data"]["path"]).name
    tokenizer = load(source).tokenizer
    weights = weights_file(source)
    _, tensors = read_tensors(weights, sealed=False)
    folder.mkdir(parents=True)
    write_json(folder / CONFIG, config)
    for name in (ENVIRONMENT, METRICS):
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    tokenizer.save(folder)
    if bf16:
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    write_tensors(folder / LAST, tensors, read_header(weights))
    for path in () if bf16 else sorted(source.glob("*eval-*.json")):
        record = read_json(path)
        write_json(folder / path.name, {**record, "store": Path(record["store"]).name})
    load(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    folder = ship(options.run, options.folder, options.bf16)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size:,} bytes")


if __name__ == "__main__":
    main()
