"""MemoryState: everything a model remembers of the documents in its rows.

- It is a plain value: reading takes one and gives another. Each layer's memory is a NamedTuple of
  tensors, rows first, declared beside its layer in melodi/layers.
- Emptiness is two integers per row, kept on the host: windows read, and tokens in the open window.
  They tell which slots are valid; what they exclude is masked, so stale slots are never seen.
- The open window (its keys, values, and what a layer keeps of its tokens) is carried beside the
  memory, only while there is one.
- What a file of it holds is in memory_file.py.

Shapes: B rows.
"""

import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from melodi.config import ModelConfig
from melodi.device import upload
from melodi.layers import layer_class
from melodi.layers.frame import LayerMemory, Memory, OpenWindow, named
from melodi.memory_file import Place, check_tensors, read_memory, write_memory


class Fingerprint(NamedTuple):
    """Which architecture and which weights a memory belongs to."""

    config: str
    weights: str

    def fingerprint(self) -> "Fingerprint":
        return self


class Fingerprinted(Protocol):
    def fingerprint(self) -> Fingerprint: ...


class Maker:
    """The model that made a state, held weakly: a state keeps no weights alive, and copies none."""

    def __init__(self, model: Fingerprinted) -> None:
        self._model = weakref.ref(model)

    def made(self, model: object) -> bool:
        return self._model() is model

    def is_of(self, other: "Maker") -> bool:
        """Whether both are of one model."""
        return self._model() is not None and other.made(self._model())

    def fingerprint(self) -> Fingerprint:
        model = self._model()
        if model is None:
            raise ValueError(
                "the model that made this state is gone, and with it what the state belongs to: "
                "keep the model as long as its states"
            )
        return model.fingerprint()

    def __deepcopy__(self, memo: object) -> "Maker":
        return self

    def __reduce__(self) -> tuple[type[Fingerprint], tuple[str, ...]]:
        return Fingerprint, tuple(self.fingerprint())


class Fill:
    """States that were read one from the other share the tensors of their open window: each sees
    only as far as it has read itself. Who reads on from the furthest may write in place."""

    def __init__(self, open_B: Tensor) -> None:
        self.open_B = open_B


@dataclass(frozen=True, eq=False)
class MemoryState:
    """The memory of each layer, row by row; made by `LanguageModel.empty_state` and by reading."""

    config: ModelConfig
    owner: Maker | Fingerprint
    windows_B: Tensor
    """Whole windows read, on the host."""
    open_B: Tensor
    """Tokens in the open window, on the host."""
    layers: tuple[LayerMemory, ...]
    open_window: tuple[OpenWindow, ...] | None = None
    """None while no row has an open window."""
    fill: "Fill | None" = None
    """How far the open window's tensors are filled, by this state or by one made from it."""

    @property
    def batch_size(self) -> int:
        return len(self.windows_B)

    @property
    def tokens_B(self) -> Tensor:
        """Tokens that each row has read."""
        return self.windows_B * self.config.window + self.open_B

    @property
    def device(self) -> torch.device:
        return self._first.device

    @property
    def dtype(self) -> torch.dtype:
        return self._first.dtype

    def made_by(self, model: object) -> bool:
        return isinstance(self.owner, Maker) and self.owner.made(model)

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
        index = torch.as_tensor(rows, device="cpu")
        if index.dtype == torch.bool:
            self._check_mask(index)
            index = index.nonzero().flatten()
        outside = ((index < 0) | (index >= self.batch_size)).any()
        if index.dim() != 1 or index.is_floating_point() or outside:
            raise ValueError(
                f"rows={index.tolist()} must be indices from 0 to {self.batch_size - 1}, or a mask"
            )
        index = index.long()  # of bytes torch would make a mask
        index_on_device = upload(index, self.device)
        state = self._map(lambda tensor: tensor[index_on_device])
        return replace(
            state, windows_B=self.windows_B[index], open_B=self.open_B[index]
        )._close_if_done()

    def forget(self, rows: Tensor | Sequence[bool] | NDArray[np.bool_]) -> "MemoryState":
        """These rows, a mask, start a new document: their memory is dropped."""
        mask_B = torch.as_tensor(rows, device="cpu")
        self._check_mask(mask_B)
        if not mask_B.any():
            return self
        mask_on_device_B = upload(mask_B, self.device)

        def drop(tensor: Tensor) -> Tensor:
            return tensor.masked_fill(mask_on_device_B.view(-1, *[1] * (tensor.dim() - 1)), 0)

        return replace(
            self._map(drop),
            windows_B=self.windows_B.masked_fill(mask_B, 0),
            open_B=self.open_B.masked_fill(mask_B, 0),
        )._close_if_done()

    @classmethod
    def cat(cls, states: "Sequence[MemoryState]") -> "MemoryState":
        """The rows of several states of one model, one after the other, between two windows."""
        if not states:
            raise ValueError("no states to join: give at least one")
        first = states[0]
        if any(state.open_window is not None for state in states):
            raise ValueError("states with an open window cannot be joined: read to a window's end")
        for state in states:
            if not same_owner(state.owner, first.owner) and _print(state) != _print(first):
                raise ValueError(
                    "states of different models cannot be joined: these were made with weights "
                    f"{_print(first).weights} and {_print(state).weights}"
                )
        layers = [
            named(type(memories[0]), map(torch.cat, zip(*memories, strict=True)))
            for memories in zip(*[state.layers for state in states], strict=True)
        ]
        return replace(
            first,
            windows_B=torch.cat([state.windows_B for state in states]),
            open_B=torch.cat([state.open_B for state in states]),
            layers=tuple(layers),
        )

    def save(self, path: str | Path, dtype: str | None = None, place: Place | None = None) -> None:
        """Writes a safetensors file with the digests of the model that it belongs to; with "bf16"
        as dtype in half of the space. `place` is what a reader adds."""
        tensors = {"windows": self.windows_B, "open": self.open_B}
        for group, memories in (("layers", self.layers), ("open_window", self.open_window or ())):
            for i, memory in enumerate(memories):
                for name, tensor in zip(_fields(type(memory)), memory, strict=True):
                    tensors[f"{group}.{i}.{name}"] = tensor
        config_digest, weights_digest = self.owner.fingerprint()
        header = {
            "config": json.dumps(self.config.to_dict()),
            "config_digest": config_digest,
            "weights_digest": weights_digest,
        }
        if place is not None:
            tensors |= place.tensors()
            header |= place.header()
        write_memory(Path(path), tensors, header, dtype)

    @classmethod
    def load(cls, path: str | Path) -> "MemoryState":
        """Reads what `save` wrote; the model checks the digests when the state is first used."""
        return cls.load_with_place(path)[0]

    @classmethod
    def load_with_place(cls, path: str | Path) -> "tuple[MemoryState, Place | None]":
        """The same with what a reader had added, if one wrote the file."""
        header, tensors = read_memory(Path(path))
        try:
            config = ModelConfig.from_dict(json.loads(header["config"]))
            check_tensors(tensors, config.window)
            layers = tuple(
                _gather(layer_class(kind).memory_class(config), f"layers.{i}", tensors)
                for i, kind in enumerate(config.layers)
            )
            opened = bool(tensors["open"].any())
            state = cls(
                config=config,
                owner=Fingerprint(header["config_digest"], header["weights_digest"]),
                windows_B=tensors["windows"],
                open_B=tensors["open"],
                layers=layers,
                open_window=tuple(
                    _gather(OpenWindow, f"open_window.{i}", tensors)
                    for i in range(len(config.layers) if opened else 0)
                )
                or None,
            )
            return state, Place.found(header, tensors)
        except KeyError as error:
            raise ValueError(f"{path} lacks {error}: it is damaged; save the memory anew") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None

    @property
    def _first(self) -> Tensor:
        tensor: Tensor = self.layers[0][0]
        return tensor

    def _map(self, change: Callable[[Tensor], Tensor]) -> "MemoryState":
        def map_layer(memory: Memory) -> Memory:
            return named(type(memory), map(change, memory))

        return replace(
            self,
            layers=tuple(map_layer(memory) for memory in self.layers),
            open_window=self.open_window and tuple(map(map_layer, self.open_window)),
            fill=None,
        )

    def writable_window(self) -> "tuple[tuple[OpenWindow, ...], Fill] | None":
        """The open window's tensors, to be written to in place behind what this state has read;
        copied if another state has already done so, or if torch forbids it."""
        if self.open_window is None:
            return None
        fill, tensor = self.fill, self.open_window[0].keys_BHkE
        inference = tensor.is_inference() == torch.is_inference_mode_enabled()
        if fill is not None and inference and torch.equal(fill.open_B, self.open_B):
            return self.open_window, fill
        return self._map(torch.clone).open_window or (), Fill(self.open_B)

    def _close_if_done(self) -> "MemoryState":
        """Drops the open window's tensors when no row has an open window."""
        return self if self.open_B.any() else replace(self, open_window=None)

    def _check_mask(self, mask_B: Tensor) -> None:
        if mask_B.dtype != torch.bool or mask_B.shape != (self.batch_size,):
            raise ValueError(
                f"rows of shape {tuple(mask_B.shape)} and type {mask_B.dtype} must be a mask: "
                f"one bool for each of the {self.batch_size} rows"
            )


def same_owner(a: Maker | Fingerprint, b: Maker | Fingerprint) -> bool:
    """Whether it can be told without a look at all weights."""
    return a is b or (isinstance(a, Maker) and isinstance(b, Maker) and a.is_of(b))


def _print(state: MemoryState) -> Fingerprint:
    return state.owner.fingerprint()


def _gather(memory: type[Memory], prefix: str, tensors: dict[str, Tensor]) -> Memory:
    return named(memory, [tensors[f"{prefix}.{field}"] for field in _fields(memory)])


def _fields(memory: type[LayerMemory]) -> tuple[str, ...]:
    """The names of a NamedTuple's fields: keys of memory files."""
    names: tuple[str, ...] = getattr(memory, "_fields")  # noqa: B009
    return names
