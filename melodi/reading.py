"""The window recurrence: which part of its window each row reads next.

- `turns` plans on the host, in whole numbers: in every turn each row reads what is left of its
  window, or of its tokens. While all rows read whole windows, turn k is window k of the paper.
- `counters` takes what the layers need of all turns to the device at once.
- `RaggedRows` cuts the tokens of a turn out and puts the hidden vectors of all turns together.
- `Opening` is what windows that are not full yet have left in the layers.
- `Handover` is what the layers remember of a window that is still on its way through them.

Shapes: B rows, T tokens, t tokens of a turn, D width.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from melodi.device import upload
from melodi.layers.frame import LayerMemory, OpenWindow, Probe, WindowPart
from melodi.memory import Fill, MemoryState

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
        counters_4B: Tensor,
        static_shapes: bool = False,
        in_place: bool = False,
        probe: Probe | None = None,
    ) -> WindowPart:
        """The same for the layers, with what `counters` gave for it."""
        windows_read_B, position_B, length_B, full_B = counters_4B.unbind()
        return WindowPart(
            all_close=bool(self.full_B.all()),
            opens=bool((self.position_B == 0).any()),
            closes=bool(self.full_B.any()),
            fewest_windows=0 if static_shapes else int(self.windows_read_B.min()),
            most_windows=MANY if static_shapes else int(self.windows_read_B.max()),
            windows_read_B=windows_read_B,
            position_B=position_B,
            length_B=length_B,
            full_B=full_B.bool(),
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
    windows, rows = state.windows_B.tolist(), state.batch_size
    return WindowPart(
        all_close=False,
        opens=False,
        closes=False,
        fewest_windows=min(windows),
        most_windows=max(windows),
        windows_read_B=upload(state.windows_B, device),
        position_B=torch.full((rows,), place, device=device),
        length_B=torch.ones(rows, dtype=torch.long, device=device),
        full_B=torch.zeros(rows, dtype=torch.bool, device=device),
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


def portions(length: int, place: int, window: int, most: int) -> Iterator[slice]:
    """Cuts of so many tokens that are read from this place in a window: what fills it, whole
    windows, at most so many at a time, which are read fastest, and what is left."""
    start = min((window - place) % window, length)
    if start:
        yield slice(0, start)
    whole = length - (length - start) % window
    while start < whole:
        end = min(start + most * window, whole)
        yield slice(start, end)
        start = end
    if start < length:
        yield slice(start, length)


def counters(turns: Sequence[Turn], device: torch.device) -> tuple[Tensor, ...]:
    """Of each turn the windows read, the position, the length, and which rows are full, (4, B);
    copied to the device in one go."""
    numbers = [
        torch.stack([turn.windows_read_B, turn.position_B, turn.length_B, turn.full_B.long()])
        for turn in turns
    ]
    return upload(torch.stack(numbers), device).unbind() if numbers else ()


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
        return self.tokens_BT.gather(1, upload(index_Bt, self.tokens_BT.device))

    def add(self, x_BtD: Tensor, turn: Turn) -> None:
        before = sum(hidden.size(1) for hidden in self.hidden)
        for row, (start, length) in enumerate(
            zip(turn.start_B.tolist(), turn.length_B.tolist(), strict=True)
        ):
            self.place_BT[row, start : start + length] = torch.arange(
                before, before + length, device="cpu"
            )
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
        index_BTD = upload(place_BT, x_BTD.device)[:, :, None].expand(-1, -1, x_BTD.size(2))
        return x_BTD.gather(1, index_BTD)


class Opening:
    """The open windows of all layers, from turn to turn; none where all rows read whole ones."""

    def __init__(self, state: MemoryState, in_place: bool) -> None:
        self.in_place = in_place
        self.windows, self.fill = state.open_window, None
        if in_place and (writable := state.writable_window()) is not None:
            self.windows, self.fill = writable

    def before(
        self, turn: Turn, empty: Callable[[int], tuple[OpenWindow, ...]]
    ) -> tuple[OpenWindow, ...] | None:
        """As the layers need them; `empty` makes some for so many rows."""
        if turn.whole:
            self.windows, self.fill = None, None
        elif self.windows is None:
            self.windows, self.fill = empty(len(turn.length_B)), self._filled(turn.position_B)
        return self.windows

    def after(self, turn: Turn, windows: tuple[OpenWindow, ...] | None) -> None:
        """As the layers have left them."""
        _, open_B = turn.next_counters()
        if self.fill is not None and turn.place is not None:  # written to in place
            self.fill.open_B = open_B
        else:
            self.fill = self._filled(open_B)
        self.windows = windows
        if not open_B.any():
            self.windows, self.fill = None, None

    def _filled(self, open_B: Tensor) -> Fill | None:
        return Fill(open_B) if self.in_place else None


class Handover(Sequence[LayerMemory]):
    """What each layer remembers of a window, while another thread takes that window through the
    stack: whoever asks for it waits until the layer is done. What the window before has left is
    dropped as soon as it was read."""

    def __init__(self, before: Sequence[LayerMemory]) -> None:
        self.before = before
        self.layers: list[Future[LayerMemory]] = [Future() for _ in range(len(before))]
        self.done = 0

    def append(self, memory: LayerMemory) -> None:
        """Of the next layer."""
        if isinstance(self.before, Handover):
            self.before.layers[self.done] = Future()
        self.layers[self.done].set_result(memory)
        self.done += 1

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """An error of the thread is one of all who wait for it."""
        try:
            yield
        except BaseException as error:
            for layer in self.layers:
                if not layer.done():
                    layer.set_exception(error)
            raise

    @overload
    def __getitem__(self, layer: int) -> LayerMemory: ...
    @overload
    def __getitem__(self, layer: slice) -> Sequence[LayerMemory]: ...
    def __getitem__(self, layer: int | slice) -> LayerMemory | Sequence[LayerMemory]:
        if isinstance(layer, slice):
            return [future.result() for future in self.layers[layer]]
        return self.layers[layer].result()

    def __len__(self) -> int:
        return len(self.layers)
