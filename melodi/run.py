"""A run is a folder that can be repeated, resumed and compared; this file knows what is in it.

    config.json        the resolved model and training configs, and which store
    environment.json   versions, machine, commit
    metrics.jsonl      one JSON object per line
    checkpoints/       what is needed to go on, the last few (training/checkpoint.py)
    best.safetensors   weights with the lowest validation loss
    model.safetensors  weights at the last checkpoint
    tokenizer.*        a copy of the store's
    eval-SPLIT.json    what a whole split of the run's own store said (evaluation/record.py)

Everything that the result depends on is in `ModelConfig` and `TrainConfig`; `Execution` is how it
is carried out. `load` gives the model of a run.
"""

import dataclasses
import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from melodi.config import ModelConfig
from melodi.config.checks import from_dict
from melodi.config.dialects import STARTS
from melodi.config.training import TrainConfig
from melodi.data.store import TokenStore
from melodi.data.tokenizer import load_tokenizer
from melodi.files import json_text, read_json, read_object, read_tensors, write_json, write_text
from melodi.model import LanguageModel
from melodi.sharded import shard_like

Config = TypeVar("Config")
CONFIG, ENVIRONMENT = "config.json", "environment.json"
METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"
BEST, LAST = "best.safetensors", "model.safetensors"
SHIPPED = Path(__file__).parent / "shipped" / "laptop-melodi"
"""A run that comes with the package, for commands and calls that name none, or this one."""
DATA = ("path", "tokenizer_digest", "train_checksum")
"""What config.json says of the store."""


def load(run: str | Path, weights: str | None = None) -> LanguageModel:
    """The model of a run folder, ready to read: its best weights, or the file named `weights`.

    "laptop-melodi" is the model that ships with the package, unless there is a folder of that name.
    The tokenizer is `model.tokenizer`. Weights are float32, however they are stored.
    """
    folder = run_folder(run)
    data = Run(folder).read_config()["data"]
    path = weights_file(folder, weights)
    check_meaning(Run(folder))
    model = LanguageModel(Run(folder).part(ModelConfig, "model"))
    _, tensors = read_tensors(path, sealed=False)  # weights may come from elsewhere
    set_weights(model, tensors, path)
    model.tokenizer = load_tokenizer(folder)
    if model.tokenizer.digest() != data["tokenizer_digest"]:
        raise ValueError(
            f"the tokenizer in {folder} is not the one that the run was trained with "
            f"({model.tokenizer.digest()}, not {data['tokenizer_digest']}): copy that of its "
            f"store, {data['path']}"
        )
    return model.eval()


def check_meaning(run: "Run") -> None:
    """Refuses a model whose dialect meant another function when it was trained."""
    dialect, changed = run.part(ModelConfig, "model").dialect, run.changed_answers()
    known = {name: value for name, value in changed.items() if value is not None}
    odd = [f"{name}={str(value).lower()}" for name, value in known.items() if name not in STARTS]
    if odd:
        raise ValueError(
            f"{run.folder / CONFIG} is of a version in which dialect {dialect!r} had "
            f"{', '.join(odd)}: write {','.join([dialect, *odd])!r} there as its dialect"
        )


def run_folder(run: str | Path) -> Path:
    """The folder that is meant: one of that name, or else the run that ships with the package."""
    folder = Path(run)
    return default_run() if str(run) == SHIPPED.name and not folder.exists() else folder


def default_run() -> Path:
    """The run folder that commands use when none is given: that of a model in the package."""
    if not (SHIPPED / CONFIG).is_file():
        raise ValueError(
            f"no model is in this copy of melodi ({SHIPPED} is absent): give --run RUN"
        )
    return SHIPPED


def weights_file(folder: Path, name: str | None = None) -> Path:
    """The named file of weights; without a name the best, or the last where none was validated."""
    names = [BEST, LAST] if name is None else [name]
    found = [folder / one for one in names if (folder / one).exists()]
    if not found:
        raise FileNotFoundError(
            f"{folder} has no {' or '.join(names)}: train longer, or resume the run"
        )
    return found[0]


def set_weights(model: LanguageModel, tensors: dict[str, Tensor], path: Path) -> None:
    """Copies the whole tensors of a file into parameters, which may be sharded."""
    ours = dict(model.named_parameters())
    if tensors.keys() != ours.keys():
        odd = sorted(tensors.keys() ^ ours.keys())[0]
        raise ValueError(f"{path} does not fit the model: {odd!r} is on one side only")
    for name, tensor in tensors.items():
        if tensor.shape != ours[name].shape:
            raise ValueError(
                f"{path} does not fit the model: {name!r} is {tuple(tensor.shape)}, not "
                f"{tuple(ours[name].shape)}"
            )
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(shard_like(tensors[name], parameter))


class Run:
    """The files of a run."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.metrics = self.folder / METRICS
        self.checkpoints = self.folder / CHECKPOINTS

    @property
    def exists(self) -> bool:
        return (self.folder / CONFIG).exists()

    @property
    def started(self) -> bool:
        """Whether there is anything that a step has left behind."""
        return any((self.folder / name).exists() for name in (METRICS, CHECKPOINTS, BEST, LAST))

    def check_new(self) -> None:
        """A run begins in a folder of its own: new, empty, or where one failed before it began."""
        if self.exists and self.started:
            raise ValueError(
                f"{self.folder} already holds a run: continue it with --resume, or choose "
                "another --out"
            )
        ours = {CONFIG, ENVIRONMENT, *self._tokenizers()} if self.exists else set()
        for path in sorted(self.folder.iterdir()) if self.folder.exists() else ():
            if path.name not in {".lock", *ours} and path.suffix != ".partial":
                raise ValueError(
                    f"{self.folder} holds {path.name} and no run: choose a new or empty folder as "
                    "--out"
                )

    def create(
        self, model: ModelConfig, train: TrainConfig, store: TokenStore, preset: str | None = None
    ) -> None:
        self.check_new()
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in self._tokenizers():
            (self.folder / name).unlink()
        # First of all, so that a folder in which a kill left the rest out is known as ours.
        write_json(
            self.folder / CONFIG,
            {
                "preset": preset,
                "model": model.to_dict(),
                "answers": dataclasses.asdict(model.answers),
                "train": dataclasses.asdict(train),
                "data": {
                    "path": str(store.path.resolve()),
                    "tokenizer_digest": store.manifest["tokenizer_digest"],
                    "train_checksum": checksum(store, "train"),
                    "held_out_checksums": held_out_checksums(store),
                },
            },
        )
        self.adopt(store)

    def adopt(self, store: TokenStore, steps: int = 0) -> None:
        """Notes where the store is now, and to which step the run goes on if that is farther; and
        completes what a kill at the very start left out."""
        config, own = self.read_config(), self.part(TrainConfig, "train").steps
        path = str(store.path.resolve())
        if config["data"]["path"] != path or steps > own:
            config["data"]["path"], config["train"]["steps"] = path, max(steps, own)
            write_json(self.folder / CONFIG, config)
        if not (self.folder / ENVIRONMENT).exists():
            write_json(self.folder / ENVIRONMENT, environment())
        if not self._tokenizers():
            store.tokenizer.save(self.folder)

    def read_config(self) -> dict[str, Any]:
        """What config.json says, with all its parts."""
        path = self.folder / CONFIG
        if not self.exists:
            self._check_there()
            raise FileNotFoundError(f"{self.folder} is not a run folder: it has no {CONFIG}")
        config = read_json(path)
        if isinstance(config, dict) and "model_type" in config:
            raise ValueError(
                f"{self.folder} is for Hugging Face: give the run folder that it was exported from"
            )
        for keys in (["model"], ["train"], *[["data", key] for key in DATA]):
            inner = config
            for key in keys:
                if not isinstance(inner, dict) or key not in inner:
                    raise ValueError(f"{path} lacks {'.'.join(keys)!r}: it is damaged")
                inner = inner[key]
        return config

    def configs(self) -> tuple[ModelConfig, TrainConfig, dict[str, Any]]:
        """The model, how it is trained, and what is known of the store."""
        return (
            self.part(ModelConfig, "model"),
            self.part(TrainConfig, "train"),
            self.read_config()["data"],
        )

    def part(self, cls: type[Config], key: str) -> Config:
        """One of the configs in config.json."""
        values = self.read_config()[key]
        try:
            return from_dict(cls, values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.folder / CONFIG} is damaged in {key!r}: {error}") from None

    def answers(self) -> dict[str, Any] | None:
        """What the name of its dialect meant when the run was begun; None where an earlier version
        did not say."""
        return self.read_config().get("answers")

    def changed_answers(self) -> dict[str, Any]:
        """What its dialect answered then where it answers otherwise now; None for what was not
        asked yet."""
        then = self.answers() or {}
        now = dataclasses.asdict(self.part(ModelConfig, "model").answers)
        return {name: then.get(name) for name in now if then.get(name) != now[name]}

    def open_store(self, path: str | Path | None = None) -> TokenStore:
        """The run's own store, or another that was made with the same tokenizer."""
        data = self.read_config()["data"]
        if path is None and not Path(data["path"]).exists():
            raise ValueError(
                f"the store of run {self.folder} is gone: {data['path']} does not exist; say with "
                "--data where it is, or prepare one with --tokenizer and this run"
            )
        store = TokenStore.open(path or data["path"])
        check_store(store, data["tokenizer_digest"])
        return store

    def _check_there(self) -> None:
        if not self.folder.exists():
            raise FileNotFoundError(f"{self.folder} does not exist: give the folder of a run")

    def log(self, record: dict[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json_text(record) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All records; a last line that a kill cut short is no record."""
        if not self.metrics.exists():
            self._check_there()
            raise FileNotFoundError(f"{self.folder} has no {METRICS}: is it a run folder?")
        records, lines = [], self.metrics.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                records.append(metrics_of(line))
            except ValueError as error:
                if line.endswith(b"\n"):
                    raise ValueError(
                        f"{self.metrics} is damaged in line {number} ({error}): remove that line"
                    ) from None
        return records

    def environment(self) -> dict[str, Any]:
        """What it was made with, as far as it is known."""
        path = self.folder / ENVIRONMENT
        return read_object(path) if path.exists() else {}

    def rewind(self, step: int, between: bool = False) -> None:
        """Drops the metrics of steps that will be taken again; where the run goes on between two
        lines of losses, also the line with which it had ended there: the next will cover it."""
        if self.metrics.exists():
            lines = self.metrics.read_bytes().splitlines()
            kept = [line.decode() for line in lines if _step_of(line) <= step]
            if between:
                kept = [line for line in kept if _step_of(line) < step or '"loss"' not in line]
            write_text(self.metrics, "".join(f"{line}\n" for line in kept))

    def _tokenizers(self) -> list[str]:
        return [path.name for path in self.folder.glob("tokenizer*")]


def check_store(store: TokenStore, digest: str) -> None:
    if store.manifest["tokenizer_digest"] != digest:
        raise ValueError(
            f"store {store.path} was made with another tokenizer than the run "
            f"({store.manifest['tokenizer_digest']}, not {digest}): give the run's own store, or "
            "one prepared with --tokenizer and the run's folder"
        )


def checksum(store: TokenStore, split: str) -> str:
    """Of the tokens of a split: equal for the same documents and vocabulary."""
    return str(store.manifest["splits"][split]["checksums"]["tokens"])


def held_out_checksums(store: TokenStore) -> dict[str, str]:
    return {split: checksum(store, split) for split in ("validation", "test")}


def other_splits(data: dict[str, Any], store: TokenStore) -> list[str]:
    """The splits whose documents are not those of the store that a run was begun with; what
    config.json says of it is `data`. Earlier versions noted the training documents only."""
    known = {"train": data["train_checksum"], **data.get("held_out_checksums", {})}
    return [split for split, noted in known.items() if checksum(store, split) != noted]


def check_documents(store: TokenStore, data: dict[str, Any]) -> None:
    if others := other_splits(data, store):
        raise ValueError(
            f"store {store.path} has other documents ({', '.join(others)}) than the run began "
            "with: give the run's own store"
        )


def environment() -> dict[str, Any]:
    """What the run was made with."""
    try:
        version: str | None = importlib.metadata.version("melodi-lm")
    except importlib.metadata.PackageNotFoundError:  # used from its source, not installed
        version = None
    return {
        "melodi": version,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.platform(),
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def commit(file: Path = Path(__file__)) -> str | None:
    """The commit of a source checkout, with a plus where tracked files have been changed; none
    where the package only lies inside somebody else's repository."""

    def git(*command: str) -> str:
        line = ["git", "-C", str(file.parent), *command]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def metrics_of(line: str | bytes) -> dict[str, Any]:
    """What a line of metrics says, of its step at least."""
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError("it has no step")
    return record


def _step_of(line: str | bytes) -> int:
    """The step of a line of metrics; a line cut short by a kill belongs to none."""
    try:
        return int(metrics_of(line)["step"])
    except ValueError:
        return sys.maxsize
