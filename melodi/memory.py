"""What is carried from window to window and from call to call.

- Every memory is a queue of slots: a window appends its entries at the end, the oldest fall out.
  Short-term memory and the Transformer-XL cache are queues that one window fills completely.
- Emptiness is two integers per row, kept on the host: windows read, and tokens in the open window.
  They tell which slots are valid; what they exclude is masked, so stale slots are never seen.
- Each layer kind has its own NamedTuple of tensors, all with rows first. The open window (its
  keys, values and partial mixer sums) is carried beside the memory, only while there is one.
- A file is safetensors plus a JSON header: no code runs on loading.

Shapes: B rows, S short-term tokens, M slots, W window, P past slots, H heads, E head width,
D width, R recurrent states, O output tokens of all mixers of a layer.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from melodi.config import ModelConfig

FORMAT, VERSION = "melodi-memory", 1


class ShortTermMemory(NamedTuple):
    """short, plain (S = 0): the paper's z."""

    z_BSD: Tensor


class LongTermMemory(NamedTuple):
    """long, long-only (S = 0): z, and the queue m of compressed key-value pairs."""

    z_BSD: Tensor
    keys_BHME: Tensor
    values_BHME: Tensor


class LongTermTokenMemory(NamedTuple):
    """As LongTermMemory in the dialect that stores tokens instead of pairs."""

    z_BSD: Tensor
    tokens_BMD: Tensor


class XLMemory(NamedTuple):
    """xl: the key-value pairs of the previous window."""

    cache_keys_BHWE: Tensor
    cache_values_BHWE: Tensor


class RecurrentMemory(NamedTuple):
    """recurrent: the previous window's pairs, and the state vectors c."""

    cache_keys_BHWE: Tensor
    cache_values_BHWE: Tensor
    c_BRD: Tensor


class MemorizingMemory(NamedTuple):
    """memorizing: the previous window's pairs, and the queue of all earlier pairs."""

    cache_keys_BHWE: Tensor
    cache_values_BHWE: Tensor
    keys_BHME: Tensor
    values_BHME: Tensor


class OpenWindow(NamedTuple):
    """What an unfinished window has left in one layer, so that nothing is computed twice."""

    past_keys_BHPE: Tensor
    past_values_BHPE: Tensor
    keys_BHWE: Tensor
    values_BHWE: Tensor
    sums_BOD: Tensor


LayerMemory = (
    ShortTermMemory
    | LongTermMemory
    | LongTermTokenMemory
    | XLMemory
    | RecurrentMemory
    | MemorizingMemory
)


def memory_class(config: ModelConfig, kind: str) -> type[LayerMemory]:
    tokens = config.rules.long_term_store == "tokens"
    long_term = LongTermTokenMemory if tokens else LongTermMemory
    classes: dict[str, type[LayerMemory]] = {
        "plain": ShortTermMemory,
        "short": ShortTermMemory,
        "long": long_term,
        "long-only": long_term,
        "xl": XLMemory,
        "recurrent": RecurrentMemory,
        "memorizing": MemorizingMemory,
    }
    return classes[kind]


def push(queue: Tensor, new: Tensor, dim: int) -> Tensor:
    """Appends at the end of a queue of fixed length; the oldest entries fall out."""
    slots, count = queue.size(dim), new.size(dim)
    if count >= slots:
        return new.narrow(dim, count - slots, slots).to(queue.dtype)
    return torch.cat([queue.narrow(dim, count, slots - count), new.to(queue.dtype)], dim)


class Fingerprint(NamedTuple):
    """Which architecture and which weights a memory belongs to."""

    config: str
    weights: str

    def fingerprint(self) -> "Fingerprint":
        return self


class Owner(Protocol):
    """A model, or what a file says about one."""

    def fingerprint(self) -> Fingerprint: ...


@dataclass(frozen=True, eq=False)
class MemoryState:
    """Everything a model remembers of the documents in its rows."""

    config: ModelConfig
    owner: Owner
    windows_B: Tensor
    """Whole windows read, on the host."""
    open_B: Tensor
    """Tokens in the open window, on the host."""
    layers: tuple[LayerMemory, ...]
    open_window: tuple[OpenWindow, ...] | None = None
    """None while no row has an open window."""

    @property
    def batch_size(self) -> int:
        return len(self.windows_B)

    @property
    def device(self) -> torch.device:
        return self.layers[0][0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0][0].dtype

    def num_floats(self) -> int:
        """Capacity for one document; the open window is not counted."""
        return sum(tensor[:1].numel() for layer in self.layers for tensor in layer)

    def detach(self) -> "MemoryState":
        """The edge of a segment: what is remembered stays, its gradient stops."""
        return self._map(Tensor.detach)

    def to(self, device: torch.device | str) -> "MemoryState":
        return self._map(lambda tensor: tensor.to(device))

    def select(self, rows: Tensor | Sequence[int]) -> "MemoryState":
        """These rows (indices, or a mask), in this order; a row may be taken several times."""
        index = torch.as_tensor(rows).cpu()
        if index.dtype == torch.bool:
            self._check_mask(index)
            index = index.nonzero().flatten()
        outside = ((index < 0) | (index >= self.batch_size)).any()
        if index.dim() != 1 or index.is_floating_point() or outside:
            raise ValueError(
                f"rows={index.tolist()} must be indices from 0 to {self.batch_size - 1}, or a mask"
            )
        state = self._map(lambda tensor: tensor[index.to(tensor.device)])
        return replace(
            state, windows_B=self.windows_B[index], open_B=self.open_B[index]
        )._close_if_done()

    def forget(self, rows: Tensor | Sequence[bool] | NDArray[np.bool_]) -> "MemoryState":
        """These rows, a mask, start a new document: their memory is dropped."""
        mask_B = torch.as_tensor(rows).cpu()
        self._check_mask(mask_B)
        if not mask_B.any():
            return self

        def drop(tensor: Tensor) -> Tensor:
            mask = mask_B.to(tensor.device).view(-1, *[1] * (tensor.dim() - 1))
            return tensor.masked_fill(mask, 0)

        return replace(
            self._map(drop),
            windows_B=self.windows_B.masked_fill(mask_B, 0),
            open_B=self.open_B.masked_fill(mask_B, 0),
        )._close_if_done()

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file with the digests of the model that it belongs to."""
        tensors = {"windows": self.windows_B, "open": self.open_B}
        for group, memories in (("layers", self.layers), ("open_window", self.open_window or ())):
            for i, memory in enumerate(memories):
                for name, tensor in memory._asdict().items():
                    tensors[f"{group}.{i}.{name}"] = tensor.detach().clone(
                        memory_format=torch.contiguous_format
                    )
        config_digest, weights_digest = self.owner.fingerprint()
        header = {
            "format": FORMAT,
            "version": str(VERSION),
            "config": json.dumps(self.config.to_dict()),
            "config_digest": config_digest,
            "weights_digest": weights_digest,
        }
        # Written beside and moved into place: a file is either whole or absent.
        partial = Path(f"{path}.partial")
        try:
            save_file(tensors, partial, header)
            partial.replace(path)
        except (SafetensorError, OSError) as error:
            partial.unlink(missing_ok=True)
            raise OSError(f"the memory cannot be written to {path}: {error}") from None

    @classmethod
    def cat(cls, states: "Sequence[MemoryState]") -> "MemoryState":
        """The rows of several states of one model, one after the other, between two windows."""
        first = states[0]
        if any(state.open_window is not None for state in states):
            raise ValueError("states with an open window cannot be joined: read to a window's end")
        layers = [
            type(memories[0])(*map(torch.cat, zip(*memories, strict=True)))
            for memories in zip(*[state.layers for state in states], strict=True)
        ]
        return replace(
            first,
            windows_B=torch.cat([state.windows_B for state in states]),
            open_B=torch.cat([state.open_B for state in states]),
            layers=tuple(layers),
        )

    @classmethod
    def load(cls, path: str | Path) -> "MemoryState":
        """Reads what `save` wrote; the model checks the digests when the state is first used."""
        header, tensors = _read(Path(path))
        try:
            config = ModelConfig.from_dict(json.loads(header["config"]))
            layers = tuple(
                _gather(memory_class(config, kind), f"layers.{i}", tensors)
                for i, kind in enumerate(config.layers)
            )
            open_window = tuple(
                _gather(OpenWindow, f"open_window.{i}", tensors)
                for i in range(len(config.layers))
                if f"open_window.{i}.sums_BOD" in tensors
            )
            if bool(tensors["open"].any()) != bool(open_window):
                raise KeyError("open_window")
            return cls(
                config=config,
                owner=Fingerprint(header["config_digest"], header["weights_digest"]),
                windows_B=tensors["windows"],
                open_B=tensors["open"],
                layers=layers,
                open_window=open_window or None,
            )
        except KeyError as error:
            raise ValueError(f"{path} lacks {error}: it is damaged; save the memory anew") from None
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from None

    def _map(self, change: Callable[[Tensor], Tensor]) -> "MemoryState":
        def map_layer(memory: Any) -> Any:
            return type(memory)(*[change(tensor) for tensor in memory])

        return replace(
            self,
            layers=tuple(map_layer(memory) for memory in self.layers),
            open_window=self.open_window and tuple(map(map_layer, self.open_window)),
        )

    def _close_if_done(self) -> "MemoryState":
        """Drops the open window's tensors when no row has an open window."""
        return self if self.open_B.any() else replace(self, open_window=None)

    def _check_mask(self, mask_B: Tensor) -> None:
        if mask_B.dtype != torch.bool or mask_B.shape != (self.batch_size,):
            raise ValueError(
                f"rows of shape {tuple(mask_B.shape)} and type {mask_B.dtype} must be a mask: "
                f"one bool for each of the {self.batch_size} rows"
            )


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: give the file that save wrote") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a memory file: {error}") from None
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} is not a memory file: give one that MemoryState.save wrote")
    if header.get("version") != str(VERSION):
        raise ValueError(
            f"{path} has version {header.get('version')}, this melodi reads {VERSION}: "
            "use the melodi that wrote it"
        )
    return header, tensors


def _gather(memory: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    return memory(*[tensors[f"{prefix}.{field}"] for field in memory._fields])
