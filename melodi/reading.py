"""The window recurrence: which part of its window each row reads next, and who sees what in it.

- `turns` plans on the host, in whole numbers: in every turn each row reads what is left of its
  window, or of its tokens. While all rows read whole windows, turn k is window k of the paper.
- `sights` says who sees what in self-attention: positions are contiguous over [past; window; write
  tokens], and attention is causal on them. The rest is in the kind's row (config/kinds.py).
- `RaggedRows` cuts the tokens of a turn out and puts the hidden vectors of all turns together.

Shapes: B rows, T tokens, t tokens of a turn, k keys, D width, b = 1 or B.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from melodi.config import ModelConfig
from melodi.config.kinds import KINDS, Kind, LayerKind
from melodi.layers.frame import Probe, WindowPart
from melodi.layers.transformer import RelativePositionBias, Sight
from melodi.memory import MemoryState

MANY = 1 << 31
"""More windows than any queue holds."""


class Turn(NamedTuple):
    """The part of its window that each row reads, on the host."""

    start_B: Tensor
    """Where in the tokens given it begins."""
    length_B: Tensor
    windows_read_B: Tensor
    position_B: Tensor
    """Tokens already in the open window."""
    window: int

    @property
    def full_B(self) -> Tensor:
        """Rows that fill their window."""
        return self.position_B + self.length_B == self.window

    @property
    def whole(self) -> bool:
        """Every row reads exactly one whole window."""
        return bool((self.length_B == self.window).all())

    @property
    def place(self) -> int | None:
        """Where all rows stand in their windows, if they read equally much."""
        together = bool((self.position_B == self.position_B[0]).all())
        return int(self.position_B[0]) if together and self.even else None

    @property
    def token_place(self) -> int | None:
        """The same if each reads one token that does not fill its window."""
        return self.place if bool(((self.length_B == 1) & ~self.full_B).all()) else None

    @property
    def even(self) -> bool:
        """All rows read equally many tokens."""
        return bool((self.length_B == self.length_B[0]).all())

    def next_counters(self) -> tuple[Tensor, Tensor]:
        """Windows read, and tokens in the open window, after this turn."""
        open_B = self.position_B + self.length_B
        return self.windows_read_B + self.full_B, torch.where(self.full_B, 0, open_B)

    def part(
        self,
        device: torch.device,
        static_shapes: bool = False,
        in_place: bool = False,
        probe: Probe | None = None,
    ) -> WindowPart:
        """The same for the layers."""
        return WindowPart(
            whole=self.whole,
            opens=bool((self.position_B == 0).any()),
            closes=bool(self.full_B.any()),
            fewest_windows=0 if static_shapes else int(self.windows_read_B.min()),
            most_windows=MANY if static_shapes else int(self.windows_read_B.max()),
            windows_read_B=self.windows_read_B.to(device),
            position_B=self.position_B.to(device),
            length_B=self.length_B.to(device),
            full_B=self.full_B.to(device),
            place=self.place if in_place else None,
            probe=probe,
            windows_read=() if static_shapes else tuple(self.windows_read_B.tolist()),
        )


def inside(state: MemoryState) -> int | None:
    """The place at which all rows stand in their windows, if it is neither the first nor the
    last."""
    place, *others = set(state.open_B.tolist())
    return place if not others and 0 < place < state.config.window - 1 else None


def next_part(state: MemoryState, device: torch.device) -> WindowPart | None:
    """What `turns` gives where every row reads one token, and all stand inside their windows."""
    place = inside(state)
    if place is None:
        return None
    one_B, windows = torch.ones_like(state.open_B), state.windows_B.tolist()
    return WindowPart(
        whole=False,
        opens=False,
        closes=False,
        fewest_windows=min(windows),
        most_windows=max(windows),
        windows_read_B=state.windows_B.to(device),
        position_B=state.open_B.to(device),
        length_B=one_B.to(device),
        full_B=torch.zeros_like(one_B, dtype=torch.bool, device=device),
        place=place,
    )


def turns(state: MemoryState, lengths_B: Tensor) -> Iterator[Turn]:
    """Each row advances by at most one window at a time, from where it stands."""
    windows_B, open_B, window = state.windows_B, state.open_B, state.config.window
    start_B = torch.zeros_like(lengths_B)
    while bool((start_B < lengths_B).any()):
        length_B = torch.minimum(lengths_B - start_B, window - open_B)
        turn = Turn(start_B, length_B, windows_B, open_B, window)
        yield turn
        windows_B, open_B = turn.next_counters()
        start_B = start_B + length_B


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
    """By kind: the keys that a token sees, and where their distances are among those that fall from
    the most that there are slots; None where tokens need a mask."""
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
            closes = writes and bool(turn.full_B.any())
            view = view_of_window(config, KINDS[kind], turn, config.write_tokens if closes else 0)
            of_past = view_of_past(config, KINDS[kind], turn)
            past: dict[int, Sight] = {}
            if of_past is not None:
                past = of_past.sights(layers, position_bias, device, static_shapes)
            for i, sight in view.sights(layers, position_bias, device, static_shapes).items():
                found[i] = sight._replace(past=past.get(i))
    return tuple(found[i] for i in range(len(config.layers)))


class View(NamedTuple):
    """Which queries see which keys, and from how far; on the host."""

    visible_btk: Tensor
    distance_btk: Tensor

    def sights(
        self,
        layers: list[int],
        position_bias: RelativePositionBias,
        device: torch.device,
        static_shapes: bool,
    ) -> dict[int, Sight]:
        """The same for these layers, with the bias of each."""
        visible_btk = self.visible_btk
        if not static_shapes and bool((visible_btk == visible_btk[:1]).all()):
            visible_btk = visible_btk[:1]  # the rows agree: what is made of it broadcasts
        visible_b1tk = visible_btk[:, None].to(device)
        bias = position_bias(layers, self.distance_btk.to(device))
        return {i: Sight(visible_b1tk, bias.get(i)) for i in layers}


def view_of_window(config: ModelConfig, kind: Kind, turn: Turn, write_tokens: int) -> View:
    """Queries are [context; write tokens], keys [past; window; write tokens]."""
    past, window, tokens = kind.past(config), config.window, int(turn.length_B.max())
    key_k = torch.arange(past + window + write_tokens, device="cpu")
    position_b = turn.position_B
    if bool((position_b == position_b[0]).all()):
        position_b = position_b[:1]
    context_bt = past + position_b[:, None] + torch.arange(tokens, device="cpu")
    write_bt = key_k[past + window :].expand(len(context_bt), -1)
    distance_btk = torch.cat([context_bt, write_bt], dim=1)[:, :, None] - key_k
    visible_btk = distance_btk >= nearest(config)
    reach = kind.reach(config)
    if reach is not None:
        visible_btk = visible_btk & (distance_btk <= reach)
    if kind.write_sees(config) != "causal":
        visible_btk[:, tokens:, past + window :] = kind.write_sees(config) == "all"
    if config.answers.empty_memory == "masked":
        empty_B = past - filled_past(config, kind, turn)
        visible_btk = visible_btk & (key_k >= empty_B[:, None, None])
    return View(visible_btk, distance_btk)


def view_of_past(config: ModelConfig, kind: Kind, turn: Turn) -> View | None:
    """Of the past's tokens among themselves, where they run through the stack."""
    sees = kind.read_sees(config)
    if sees is None:
        return None
    slot_P = torch.arange(kind.past(config), device="cpu")
    distance_bPP = (slot_P[:, None] - slot_P)[None]
    visible_bPP = (distance_bPP >= nearest(config)) | (sees == "all")
    if config.answers.empty_memory == "masked":
        filled_BP = slot_P >= len(slot_P) - filled_past(config, kind, turn)[:, None]
        # An empty slot sees itself: attention to nothing has no value.
        itself_BPP = (distance_bPP == 0) & ~filled_BP[:, None]
        visible_bPP = (visible_bPP & filled_BP[:, None]) | itself_BPP
    return View(visible_bPP, distance_bPP)


def nearest(config: ModelConfig) -> int:
    """How far away the nearest token is that a token sees, where attention is causal."""
    return 1 if config.answers.causal_mask == "strict" else 0


def filled_past(config: ModelConfig, kind: Kind, turn: Turn) -> Tensor:
    return torch.tensor([kind.filled_past(config, n) for n in turn.windows_read_B.tolist()])


class RaggedRows:
    """Tokens in, hidden vectors out, one turn at a time, each row at its own place."""

    def __init__(self, tokens_BT: Tensor, nothing_B0D: Tensor) -> None:
        self.tokens_BT = tokens_BT
        self.hidden = [nothing_B0D]
        self.place_BT = torch.full(tokens_BT.shape, -1, device="cpu")
        self.in_order = True

    def tokens(self, turn: Turn) -> Tensor:
        """The tokens of a turn, (B, t); rows that read fewer are padded with anything."""
        index_Bt = turn.start_B[:, None] + torch.arange(int(turn.length_B.max()), device="cpu")
        if bool((turn.start_B == turn.start_B[0]).all()):
            return self.tokens_BT[:, int(index_Bt[0, 0]) : int(index_Bt[0, -1]) + 1]
        index_Bt = index_Bt.clamp(max=self.tokens_BT.size(1) - 1)
        return self.tokens_BT.gather(1, index_Bt.to(self.tokens_BT.device))

    def add(self, x_BtD: Tensor, turn: Turn) -> None:
        before = sum(hidden.size(1) for hidden in self.hidden)
        for row, (start, length) in enumerate(
            zip(turn.start_B.tolist(), turn.length_B.tolist(), strict=True)
        ):
            self.place_BT[row, start : start + length] = torch.arange(before, before + length)
        self.in_order &= bool((turn.length_B == x_BtD.size(1)).all())
        self.hidden.append(x_BtD)

    def joined(self) -> Tensor:
        """All hidden vectors in the order of the tokens; zeros where a row had padding."""
        x_BTD = torch.cat(self.hidden, dim=1)
        if self.in_order and x_BTD.size(1) == self.tokens_BT.size(1):
            return x_BTD
        # Padding is taken from one more vector, which is zero.
        x_BTD = F.pad(x_BTD, (0, 0, 0, 1))
        place_BT = torch.where(self.place_BT < 0, x_BTD.size(1) - 1, self.place_BT)
        index_BTD = place_BT.to(x_BTD.device)[:, :, None].expand(-1, -1, x_BTD.size(2))
        return x_BTD.gather(1, index_BTD)
