"""Who sees what in self-attention: positions are contiguous over [past; window; write tokens], and
attention is causal on them. The rest is in the kind's row (config/kinds.py).

Sights are built on the device. What rows have in common is known on the host, so that one row
stands for all where they agree, and nothing is copied.

Shapes: B rows, t tokens of a turn, k keys, P slots of the past, b = 1 or B.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from melodi.config import ModelConfig
from melodi.config.kinds import KINDS, Kind, LayerKind
from melodi.device import upload
from melodi.layers.transformer import RelativePositionBias, Sight
from melodi.reading import Turn


def token_sights(
    config: ModelConfig,
    position_bias: RelativePositionBias,
    place: int,
    windows: Iterable[int],
) -> tuple[Sight, ...] | None:
    """The same as `sights` without a mask, where every row reads one token at the same place of a
    window that it does not fill: then the keys that it sees are consecutive."""
    ranges = token_ranges(config, place, filled_by_kind(config, windows))
    if ranges is None:
        return None
    bias = position_bias.by_distance(range(len(config.layers)), most_slots(config))
    return tuple(
        Sight(None, bias[i][None, :, None, ranges[kind][1]] if i in bias else None, ranges[kind][0])
        for i, kind in enumerate(config.layers)
    )


@functools.lru_cache(maxsize=1024)
def token_ranges(
    config: ModelConfig, place: int, filled: tuple[frozenset[int], ...]
) -> dict[LayerKind, tuple[slice, slice]] | None:
    """By kind: the slice of the keys that a token sees, and the slice of the biases by distance,
    farthest first and 0 last, that are theirs; None where tokens need a mask."""
    strict = config.answers.causal_mask == "strict"
    if place == 0 and any(KINDS[kind].read_sees(config) for kind in config.layers):
        return None  # memory tokens run through the stack, and need their own sight
    slots = most_slots(config)
    ranges: dict[LayerKind, tuple[slice, slice]] = {}
    for kind, counts in zip(dict.fromkeys(config.layers), filled, strict=True):
        row = KINDS[kind]
        own = row.past(config) + place
        reach = row.reach(config)
        first = row.past(config) - max(counts)
        first = first if reach is None else max(first, own - reach)
        stop = own if strict else own + 1
        if len(counts) > 1 or first >= stop:
            return None
        # The last entry of the bias is that of distance 0, which lies at `own`.
        ranges[kind] = slice(first, stop), slice(slots - 1 - own + first, slots - 1 - own + stop)
    return ranges


def filled_by_kind(config: ModelConfig, windows: Iterable[int]) -> tuple[frozenset[int], ...]:
    """How many slots of the past count as filled, in the rows that have read so many windows."""
    kinds = [KINDS[kind] for kind in dict.fromkeys(config.layers)]
    if config.answers.empty_memory == "zeros":
        return tuple(frozenset([kind.past(config)]) for kind in kinds)
    return tuple(frozenset(kind.filled_past(config, n) for n in windows) for kind in kinds)


@functools.cache
def most_slots(config: ModelConfig) -> int:
    """Of the past and the window, in the kind that has most."""
    return max(KINDS[kind].past(config) for kind in config.layers) + config.window


def alike(config: ModelConfig, turn: Turn) -> tuple[object, ...]:
    """Equal for turns with the same sights: where the rows stand in their windows, and how far the
    past of each kind is filled."""
    counts = turn.windows_read_B.tolist()
    filled = [
        KINDS[kind].filled_past(config, n) for kind in dict.fromkeys(config.layers) for n in counts
    ]
    return (*turn.position_B.tolist(), *turn.length_B.tolist(), *filled)


def sights(
    config: ModelConfig,
    position_bias: RelativePositionBias,
    turn: Turn,
    device: torch.device,
    static_shapes: bool,
) -> tuple[Sight, ...]:
    """Who sees what in each layer. With static shapes the masks always have all rows."""
    found: dict[int, Sight] = {}
    for kind in dict.fromkeys(config.layers):
        for writes in (True, False):
            layers = [
                i
                for i, other in enumerate(config.layers)
                if other == kind and (i <= config.last_writing_layer) == writes
            ]
            if not layers:
                continue
            row, closes = KINDS[kind], writes and bool(turn.full_B.any())
            write_tokens = config.write_tokens if closes else 0
            of_past = view_of_past(config, row, turn, device, static_shapes)
            past = {} if of_past is None else of_past.sights(layers, position_bias)
            view = view_of_window(config, row, turn, write_tokens, device, static_shapes)
            for i, sight in view.sights(layers, position_bias).items():
                found[i] = sight._replace(past=past.get(i))
    return tuple(found[i] for i in range(len(config.layers)))


class View(NamedTuple):
    """Which queries see which keys, and from how far."""

    visible_btk: Tensor
    distance_btk: Tensor

    def sights(self, layers: list[int], position_bias: RelativePositionBias) -> dict[int, Sight]:
        """The same for these layers, with the bias of each."""
        bias = position_bias(layers, self.distance_btk)
        return {i: Sight(self.visible_btk[:, None], bias.get(i)) for i in layers}


def view_of_window(
    config: ModelConfig,
    kind: Kind,
    turn: Turn,
    write_tokens: int,
    device: torch.device,
    static_shapes: bool = False,
) -> View:
    """Queries are [context; write tokens], keys [past; window; write tokens]."""
    past, window, tokens = kind.past(config), config.window, int(turn.length_B.max())
    key_k = torch.arange(past + window + write_tokens, device=device)
    position_b = by_row(turn.position_B.tolist(), device)
    context_bt = past + position_b[:, None] + torch.arange(tokens, device=device)
    write_bt = key_k[past + window :].expand(len(context_bt), -1)
    distance_btk = torch.cat([context_bt, write_bt], dim=1)[:, :, None] - key_k
    visible_btk = distance_btk >= nearest(config)
    reach = kind.reach(config)
    if reach is not None:
        visible_btk = visible_btk & (distance_btk <= reach)
    if kind.write_sees(config) != "causal":
        visible_btk[:, tokens:, past + window :] = kind.write_sees(config) == "all"
    if config.answers.empty_memory == "masked":
        empty_b = past - by_row(filled_past(config, kind, turn), device, static_shapes)
        visible_btk = visible_btk & (key_k >= empty_b[:, None, None])
    return View(visible_btk, distance_btk)


def view_of_past(
    config: ModelConfig,
    kind: Kind,
    turn: Turn,
    device: torch.device,
    static_shapes: bool = False,
) -> View | None:
    """Of the past's tokens among themselves, where they run through the stack."""
    sees = kind.read_sees(config)
    if sees is None:
        return None
    slot_P = torch.arange(kind.past(config), device=device)
    distance_bPP = (slot_P[:, None] - slot_P)[None]
    visible_bPP = (distance_bPP >= nearest(config)) | (sees == "all")
    if config.answers.empty_memory == "masked":
        filled_b = by_row(filled_past(config, kind, turn), device, static_shapes)
        filled_bP = slot_P >= len(slot_P) - filled_b[:, None]
        # An empty slot sees itself: attention to nothing has no value.
        itself_bPP = (distance_bPP == 0) & ~filled_bP[:, None]
        visible_bPP = (visible_bPP & filled_bP[:, None]) | itself_bPP
    return View(visible_bPP, distance_bPP)


def nearest(config: ModelConfig) -> int:
    """How far away the nearest token is that a token sees, where attention is causal."""
    return 1 if config.answers.causal_mask == "strict" else 0


def filled_past(config: ModelConfig, kind: Kind, turn: Turn) -> list[int]:
    return [kind.filled_past(config, n) for n in turn.windows_read_B.tolist()]


def by_row(numbers: Sequence[int], device: torch.device, all_rows: bool = False) -> Tensor:
    """One number for each row; where all are the same, one that stands for all."""
    if len(set(numbers)) > 1:
        return upload(torch.tensor(numbers, device="cpu"), device)
    return torch.full((len(numbers) if all_rows else 1,), numbers[0], device=device)
