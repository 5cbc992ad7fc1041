"""Checkpoints: folders that are whole or absent, checked on reading, the last few kept.

1. A checkpoint is written beside, as `step-00000100.partial`; its checksums are written last, and
   then the folder is renamed. A kill at any moment leaves the earlier checkpoints as they were.
2. Reading starts with the newest. What its checksums do not match is set aside, with a line, as
   `step-00000100.damaged`; if none is whole, nothing is touched and the run stops.
3. Weights and optimizer are whole tensors, and memory is stored by global row, so that another
   number of processes can take over. Everything is safetensors and JSON: no code runs on loading.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from melodi.files import checksum, read_json, sync, write_json
from melodi.memory import MemoryState

CHECKSUMS = "checksums.json"
WEIGHTS, MOMENTS, TRAINER = "model.safetensors", "optimizer.safetensors", "trainer.json"


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, which may be damaged, but is not known to be."""
        return sorted(int(path.name[5:]) for path in self.folder.glob("step-*[0-9]"))

    def write(
        self, step: int, fill: Callable[[Path], None], first: bool, barrier: Callable[[], None]
    ) -> None:
        """Every process fills the folder with its own files; the first one makes it final."""
        final = self.path(step)
        partial = final.with_suffix(".partial")
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        barrier()
        fill(partial)
        barrier()
        if first:
            files = sorted(partial.iterdir())
            write_json(partial / CHECKSUMS, {file.name: checksum(file) for file in files})
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            sync(self.folder)
            self._prune()
        barrier()

    def newest_whole(self, say: Callable[[str], None]) -> int | None:
        """The newest step whose checkpoint is whole; None if the run has no checkpoint at all."""
        steps, damaged = self.steps(), []
        while steps and (reason := damage(self.path(steps[-1]))) is not None:
            damaged.append((self.path(steps.pop()), reason))
        if damaged and not steps:
            told = "; ".join(f"{path.name}: {reason}" for path, reason in damaged)
            raise ValueError(
                f"every checkpoint in {self.folder} is damaged ({told}): restore one from a copy, "
                "or remove them all to start from the beginning"
            )
        for path, reason in damaged:
            aside = path.with_suffix(".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            say(f"{path} is damaged ({reason}): set aside for the checkpoint before it")
        return steps[-1] if steps else None

    def _prune(self) -> None:
        for step in self.steps()[: -self.keep]:
            shutil.rmtree(self.path(step))
        for path in self.folder.glob("*.partial"):
            shutil.rmtree(path)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None if nothing is."""
    try:
        expected = read_json(path / CHECKSUMS)
        if not isinstance(expected, dict) or not {WEIGHTS, MOMENTS, TRAINER} <= expected.keys():
            return f"{CHECKSUMS} is not the list of its files"
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
