"""Checkpoints: folders that are whole or absent, checked on reading, the last few kept.

1. A checkpoint is written beside, as `step-00000100.partial`; its checksums are written last, and
   then the folder is renamed. A kill at any moment leaves the earlier checkpoints as they were.
2. Reading starts with the newest. What its checksums do not match is set aside, with a line, as
   `step-00000100.damaged`; if none is whole, nothing is touched and the run stops.
3. Where the model is sharded, a checkpoint is written behind: training goes on meanwhile, and the
   folder is renamed when all processes have said that their part is on the disk.
4. What is in it (snapshot.py) can be taken over by another number of processes. Everything is
   safetensors and JSON: no code runs on loading.
"""

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from melodi.files import checksum, read_json, sync, write_json
from melodi.memory import MemoryState
from melodi.training.distributed import Processes

CHECKSUMS = "checksums.json"
WEIGHTS, MOMENTS, TRAINER = "model.safetensors", "optimizer.safetensors", "trainer.json"
SHARDS = "sharded"
"""The folder that stands for the first two where the model is sharded."""
Fill = Callable[[Path, Processes], None]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._behind: Future[None] | None = None

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, which may be damaged, but is not known to be."""
        return sorted(int(path.name[5:]) for path in self.folder.glob("step-*[0-9]"))

    def write(self, step: int, fill: Fill, group: Processes) -> None:
        """Every process fills the folder with its own files; the first one makes it final."""
        partial = self._begin(step, group)
        fill(partial, group)
        group.barrier()
        if group.first:
            self._seal(step, checksums(partial, files_in(partial)))
        group.barrier()

    def write_behind(self, step: int, fill: Fill, group: Processes) -> None:
        """The same while training goes on; what became of it is said by `wait`, or by the next."""
        self.wait()
        self._begin(step, group, SHARDS)
        self._behind = self._thread.submit(self._fill_and_seal, step, fill, group)

    def wait(self) -> None:
        """Until nothing is being written behind."""
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.result()

    def _begin(self, step: int, group: Processes, inner: str = "") -> Path:
        """The folder that is to be filled, and one inside it."""
        partial = self.path(step).with_suffix(".partial")

        def make() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / inner).mkdir(parents=True)

        group.on_first(make)
        return partial

    def _fill_and_seal(self, step: int, fill: Fill, group: Processes) -> None:
        """Only if all processes have written their part. A process that fails says so: the others
        would wait for it."""
        partial = self.path(step).with_suffix(".partial")
        failure = None
        try:
            fill(partial, group)
        except Exception as error:
            failure = " ".join(str(error).split()) or type(error).__name__
        if failures := [told for told in group.gather_behind(failure) if told is not None]:
            raise OSError(f"checkpoint {self.path(step)} was not written: {failures[0]}")
        mine = files_in(partial)[group.rank :: group.world]
        parts = group.gather_behind(checksums(partial, mine))
        if group.first:
            self._seal(step, dict(sorted(item for part in parts for item in part.items())))

    def _seal(self, step: int, sums: dict[str, str]) -> None:
        final = self.path(step)
        partial = final.with_suffix(".partial")
        write_json(partial / CHECKSUMS, sums)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        sync(self.folder)
        self._prune()

    def newest_whole(self, say: Callable[[str], None]) -> int | None:
        """The newest step whose checkpoint is whole; None if the run has no checkpoint at all."""
        steps, damaged = self.steps(), []
        while steps and (reason := damage(self.path(steps[-1]))) is not None:
            damaged.append((self.path(steps.pop()), reason))
        if damaged and not steps:
            told = "; ".join(f"{path.name}: {reason}" for path, reason in damaged)
            raise ValueError(
                f"every checkpoint in {self.folder} is damaged ({told}): restore one from a copy, "
                "or begin a new run in another --out"
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
        names = expected.keys() if isinstance(expected, dict) else set()
        sharded = any(name.startswith(f"{SHARDS}/") for name in names)
        if not {TRAINER} | (set() if sharded else {WEIGHTS, MOMENTS}) <= names:
            return f"{CHECKSUMS} is not the list of its files"
        for name, digest in expected.items():
            if checksum(path / name) != digest:
                return f"{name} does not match its checksum"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def checksums(folder: Path, files: list[Path]) -> dict[str, str]:
    return {file.relative_to(folder).as_posix(): checksum(file) for file in files}


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
