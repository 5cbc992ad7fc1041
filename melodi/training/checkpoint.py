"""Checkpoints: folders that are whole or absent, checked on reading, the last few kept.

1. A checkpoint is written beside, as `step-00000100.partial`; its checksums are written last, and
   then the folder is renamed. A kill at any moment leaves the earlier checkpoints as they were.
2. Reading starts with the newest and passes over, with a line, what its checksums do not match.
3. Weights and optimizer are whole tensors, and memory is stored by global row, so that another
   number of processes can take over. Everything is safetensors and JSON: no code runs on loading.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from melodi.config import ModelConfig
from melodi.data.tokenizer import load_tokenizer
from melodi.files import checksum, read_json, sync, write_json
from melodi.memory import MemoryState
from melodi.model import LanguageModel

CHECKSUMS = "checksums.json"


def load(run: str | Path, weights: str | None = None) -> LanguageModel:
    """The model of a run folder, ready to read: its best weights, or the file named `weights`.

    The tokenizer is `model.tokenizer`.
    """
    run = Path(run)
    if not (run / "config.json").exists():
        raise FileNotFoundError(f"{run} is not a run folder: it has no config.json")
    config = read_json(run / "config.json")
    names = ["best.safetensors", "model.safetensors"] if weights is None else [weights]
    found = [run / name for name in names if (run / name).exists()]
    if not found:
        raise FileNotFoundError(
            f"{run} has no {' or '.join(names)}: train longer, or resume the run"
        )
    model = LanguageModel(ModelConfig.from_dict(config["model"]))
    load_weights(model, load_file(found[0]))
    model.tokenizer = load_tokenizer(run)
    return model.eval()


def load_weights(model: LanguageModel, tensors: dict[str, Tensor]) -> None:
    ours = model.state_dict()
    if tensors.keys() != ours.keys():
        odd = sorted(tensors.keys() ^ ours.keys())[0]
        raise ValueError(f"the weights do not fit the model: {odd!r} is on one side only")
    for name, tensor in tensors.items():
        if tensor.shape != ours[name].shape:
            raise ValueError(
                f"the weights do not fit the model: {name!r} is {tuple(tensor.shape)}, not "
                f"{tuple(ours[name].shape)}"
            )
    model.load_state_dict(tensors)


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def write(
        self, step: int, fill: Callable[[Path], None], rank: int, barrier: Callable[[], None]
    ) -> None:
        """Every process fills the folder with its own files; the first one makes it final."""
        final = self.path(step)
        partial = final.with_suffix(".partial")
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        barrier()
        fill(partial)
        barrier()
        if rank == 0:
            for file in partial.iterdir():
                sync(file)
            write_json(
                partial / CHECKSUMS, {f.name: checksum(f) for f in sorted(partial.iterdir())}
            )
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            sync(self.folder)
            self._prune()
        barrier()

    def newest(self, say: Callable[[str], None]) -> Path | None:
        """The newest checkpoint that is whole; damaged ones are passed over, saying so."""
        for path in sorted(self.folder.glob("step-*[0-9]"), reverse=True):
            if (reason := damage(path)) is None:
                return path
            say(f"{path} is damaged ({reason}): using the checkpoint before it")
        return None

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def _prune(self) -> None:
        for path in sorted(self.folder.glob("step-*[0-9]"))[: -self.keep]:
            shutil.rmtree(path)
        for path in self.folder.glob("*.partial"):
            shutil.rmtree(path)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None if nothing is."""
    try:
        expected = read_json(path / CHECKSUMS)
        for name, digest in expected.items():
            if checksum(path / name) != digest:
                return f"{name} does not match its checksum"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def save_rows(folder: Path, first: int, state: MemoryState) -> None:
    """The memory of consecutive global rows, from `first` on."""
    state.save(folder / f"memory-rows-{first:06}-{first + state.batch_size - 1:06}.safetensors")


def load_rows(folder: Path, first: int, count: int) -> MemoryState:
    """The memory of `count` global rows from `first` on, whoever wrote them."""
    parts = []
    for path in sorted(folder.glob("memory-rows-*.safetensors")):
        low, high = (int(number) for number in path.stem.split("-")[2:])
        rows = [row - low for row in range(first, first + count) if low <= row <= high]
        if rows:
            parts.append(MemoryState.load(path).select(rows))
    return MemoryState.cat(parts)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes beside and moves into place: the file is whole or absent."""
    partial = path.with_name(path.name + ".partial")
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial
    )
    sync(partial)
    partial.replace(path)
