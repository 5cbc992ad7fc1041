"""LanguageModel: reads tokens window by window and carries what it remembers in a MemoryState.

- `model(tokens, state) -> (logits, state)` for any number of tokens; the same logits however the
  stream is cut. `model.loss` is the same reading without holding all logits.
- Each row advances window by window at its own place (`_read`). While all rows read whole windows
  the fast path runs, and the position bias and the mask are built once for all of them.
- All checks of values happen here, at the public boundary, before anything is computed; the layers
  below see only tensors and can be compiled.
- Input and output embedding are one table; summary tokens start every window from another.

Shapes: B rows, T tokens, t tokens of a piece, S summary tokens, D width, V vocabulary, b = 1 or B.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from melodi.config import ModelConfig
from melodi.layers.melodi import Layer, LongTermLayer, Piece, ShortTermLayer
from melodi.layers.transformer import RelativePositionBias, RMSNorm, randomise
from melodi.layers.transformer_xl import MemorizingLayer, RecurrentLayer, XLLayer
from melodi.memory import Fingerprint, MemoryState, OpenWindow

LOSS_CHUNK = 2048
"""Predictions whose logits exist at the same time in `LanguageModel.loss`."""
MANY = 1 << 31
"""More windows than any queue holds."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class LanguageModel(nn.Module):
    roles: ClassVar[dict[str, str]] = {"summary": "embeddings"}
    tokenizer: Any
    """Set by `load`: the tokenizer that the model was trained with."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_windows = False
        """Keep only what windows carry, and compute the rest again in the backward pass."""
        self.static_shapes = False
        """Read whole queues, full or not, so that compiled layers see one shape."""
        unit = config.rules.embedding == "unit"
        self.input_scale = 1.0 if unit else math.sqrt(config.width)
        self.output_scale = 1 / math.sqrt(config.width) if unit else 1.0
        self.embedding = Embedding(config.vocab_size, config.width, std=1 / self.input_scale)
        self.summary = None
        if config.has_summary:
            self.summary = nn.Parameter(torch.empty(config.short_term_tokens, config.width))
            randomise(self.summary, 0.25)
        self.position_bias = RelativePositionBias(config.num_heads, biased_layers(config))
        self.layers = nn.ModuleList(
            make_layer(config, i, kind) for i, kind in enumerate(config.layers)
        )
        self.final_norm = RMSNorm(config.width)

    def forward(
        self,
        tokens_BT: Tensor,
        state: MemoryState,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> tuple[Tensor, MemoryState]:
        """Logits for the token after each token, and the memory after the last.

        `lengths` gives the number of real tokens per row; the rest is padding at the right, which
        is not read, and whose logits are zero.
        """
        lengths = self._checked_lengths(tokens_BT, lengths)
        tokens_BT = self._checked(tokens_BT, state, lengths)
        x_BTD, state = self._read(tokens_BT, state, lengths)
        return self._logits(x_BTD), state

    def loss(
        self, tokens_BT: Tensor, targets_BT: Tensor, state: MemoryState
    ) -> tuple[Tensor, MemoryState]:
        """Mean nats per target, and the memory after the last token. Targets of -1 are ignored."""
        nats_BT, state = self.nats(tokens_BT, targets_BT, state)
        return nats_BT.sum() / (targets_BT >= 0).sum().clamp(min=1), state

    def nats(
        self, tokens_BT: Tensor, targets_BT: Tensor, state: MemoryState
    ) -> tuple[Tensor, MemoryState]:
        """Nats of each target, zero where it is -1. Few logits exist at the same time."""
        tokens_BT = self._checked(tokens_BT, state)
        targets_BT = self._checked_targets(tokens_BT, targets_BT)
        x_BTD, state = self._read(tokens_BT, state)
        x_nD, targets_n = x_BTD.flatten(0, 1), targets_BT.flatten()
        chunks = zip(x_nD.split(LOSS_CHUNK), targets_n.split(LOSS_CHUNK), strict=True)
        nats = [checkpoint(self._nats, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.cat(nats).view_as(targets_BT), state

    def empty_state(self, batch_size: int) -> MemoryState:
        """The memory of rows that have read nothing."""
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        return MemoryState(
            config=self.config,
            owner=self,
            windows_B=torch.zeros(batch_size, dtype=torch.long, device="cpu"),
            open_B=torch.zeros(batch_size, dtype=torch.long, device="cpu"),
            layers=tuple(layer.empty_memory(batch_size, self._zeros) for layer in self.stack),
        )

    def fingerprint(self) -> Fingerprint:
        """Digests of the architecture and of the weights as they are now."""
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode())
            if hasattr(tensor, "full_tensor"):  # sharded: every process must ask at the same time
                tensor = tensor.full_tensor()
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
        return Fingerprint(self.config.digest(), digest.hexdigest())

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def stack(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _read(
        self, tokens_BT: Tensor, state: MemoryState, lengths: Tensor | None = None
    ) -> tuple[Tensor, MemoryState]:
        """The final hidden vectors. Each row advances by at most one window at a time."""
        window, rows = self.config.window, state.batch_size
        windows_B, open_B = state.windows_B, state.open_B
        left_B = torch.full_like(open_B, tokens_BT.size(1)) if lengths is None else lengths
        start_B = torch.zeros_like(open_B)
        memory, opened = state.layers, state.open_window
        pages = Pages(tokens_BT, self._zeros(rows, 0, self.config.width))
        sights: dict[tuple[bool, ...], Sight] = {}
        while left_B.any():
            length_B = torch.minimum(left_B, window - open_B)
            if bool((length_B == window).all()):
                opened = None
                # Whole windows look alike but for which rows have a past.
                alike = tuple((windows_B > 0).tolist())
                if alike not in sights:
                    sights[alike] = self._sight(windows_B, open_B, length_B)
                sight = sights[alike]
            else:
                sight = self._sight(windows_B, open_B, length_B)
                if opened is None:
                    opened = tuple(layer.empty_window(rows, self._zeros) for layer in self.stack)
            piece = self._piece(windows_B, open_B, length_B, sight.visible_b1tk)
            x_BtD, memory, opened = self._run(
                pages.tokens(start_B, length_B), memory, opened, piece, sight.bias
            )
            pages.add(x_BtD, start_B, length_B)
            start_B, left_B = start_B + length_B, left_B - length_B
            full_B = open_B + length_B == window
            windows_B, open_B = windows_B + full_B, torch.where(full_B, 0, open_B + length_B)
        state = MemoryState(
            self.config, self, windows_B, open_B, memory, opened if open_B.any() else None
        )
        x_BTD = self.final_norm(pages.together())
        return F.dropout(x_BTD, self.config.dropout, self.training), state

    def _piece(
        self, windows_B: Tensor, open_B: Tensor, length_B: Tensor, visible_b1tk: Tensor
    ) -> Piece:
        full_B = open_B + length_B == self.config.window
        device = visible_b1tk.device
        return Piece(
            whole=bool((length_B == self.config.window).all()),
            opens=bool((open_B == 0).any()),
            closes=bool(full_B.any()),
            fewest_windows=0 if self.static_shapes else int(windows_B.min()),
            most_windows=MANY if self.static_shapes else int(windows_B.max()),
            windows_B=windows_B.to(device),
            position_B=open_B.to(device),
            length_B=length_B.to(device),
            full_B=full_B.to(device),
            visible_b1tk=visible_b1tk,
        )

    def _run(self, *args: Any) -> Any:
        """One piece through the stack; under `checkpoint_windows` only its edges are kept."""
        if self.checkpoint_windows and torch.is_grad_enabled():
            return checkpoint(self._run_stack, *args, use_reentrant=False)
        return self._run_stack(*args)

    def _run_stack(
        self,
        tokens_Bt: Tensor,
        memory: tuple[Any, ...],
        opened: tuple[OpenWindow, ...] | None,
        piece: Piece,
        bias: dict[str, Tensor],
    ) -> tuple[Tensor, tuple[Any, ...], tuple[OpenWindow, ...] | None]:
        """Summary tokens run only when a window is full, and up to the last layer with memory."""
        x_BtD = self.embedding(tokens_Bt) * self.input_scale
        u_BSD = None
        if piece.closes and self.summary is not None:
            u_BSD = self.summary.expand(x_BtD.size(0), -1, -1)
        memories, windows = [], []
        for i, layer in enumerate(self.layers):
            window = None if opened is None else opened[i]
            x_BtD, u_BSD, layer_memory, window = layer(
                x_BtD, u_BSD, memory[i], window, piece, bias.get(str(i))
            )
            if i >= self.config.last_summary_layer:
                u_BSD = None
            memories.append(layer_memory)
            windows.append(window)
        return x_BtD, tuple(memories), None if opened is None else tuple(windows)

    def _sight(self, windows_B: Tensor, open_B: Tensor, length_B: Tensor) -> "Sight":
        """Positions are contiguous over [past; window; summary]; attention is causal on them."""
        config, rules = self.config, self.config.rules
        past, window, tokens = config.past_slots, config.window, int(length_B.max())
        closes = bool((open_B + length_B == window).any())
        summary = config.short_term_tokens if closes and config.has_summary else 0
        key_k = torch.arange(past + window + summary, device="cpu")
        context_bt = past + _agreed(open_B)[:, None] + torch.arange(tokens, device="cpu")
        summary_bt = key_k[past + window :].expand(len(context_bt), -1)
        query_bt = torch.cat([context_bt, summary_bt], dim=1)
        distance_btk = query_bt[:, :, None] - key_k
        visible_btk = distance_btk >= (1 if rules.causal_mask == "strict" else 0)
        if not config.has_summary:
            visible_btk = visible_btk & (distance_btk <= window)
        if rules.empty_memory == "masked":
            empty_b = _agreed(windows_B == 0)
            visible_btk = visible_btk & ~(empty_b[:, None, None] & (key_k < past))
        device = self.embedding.weight.device
        return Sight(
            visible_b1tk=visible_btk[:, None].to(device),
            bias=self.position_bias(distance_btk.to(device)),
        )

    def _logits(self, x_BTD: Tensor) -> Tensor:
        return F.linear(x_BTD, self.embedding.weight) * self.output_scale

    def _nats(self, x_nD: Tensor, targets_n: Tensor) -> Tensor:
        logits_nV = self._logits(x_nD)
        exact = torch.promote_types(logits_nV.dtype, torch.float32)
        return F.cross_entropy(logits_nV.to(exact), targets_n, ignore_index=-1, reduction="none")

    def _zeros(self, *size: int) -> Tensor:
        weight = self.embedding.weight
        return torch.zeros(size, device=weight.device, dtype=weight.dtype)

    def _checked(
        self, tokens_BT: Tensor, state: MemoryState, lengths: Tensor | None = None
    ) -> Tensor:
        """The tokens, padding as 0. Bad input is refused in one line, before any computation."""
        if tokens_BT.dim() != 2 or tokens_BT.dtype not in INTEGERS:
            raise ValueError(
                f"tokens of shape {tuple(tokens_BT.shape)} and type {tokens_BT.dtype} must be "
                "integers of shape (rows, tokens)"
            )
        rows, length = tokens_BT.shape
        if tokens_BT.numel() == 0:
            raise ValueError(f"tokens of shape {rows, length} are empty: give at least one per row")
        if rows != state.batch_size:
            raise ValueError(
                f"the state has {state.batch_size} rows and the tokens have {rows}: "
                "use model.empty_state(rows), or state.select(rows)"
            )
        weight = self.embedding.weight
        for what, device in (("tokens", tokens_BT.device), ("state", state.device)):
            if device != weight.device:
                raise ValueError(
                    f"{what} on {device}, model on {weight.device}: move it with .to()"
                )
        if state.dtype != weight.dtype:
            raise ValueError(
                f"the state is {state.dtype} and the model is {weight.dtype}: "
                "use a state made by this model's empty_state"
            )
        self._check_owner(state)
        if lengths is not None:
            padding_BT = torch.arange(length) >= lengths[:, None]
            tokens_BT = tokens_BT.masked_fill(padding_BT.to(tokens_BT.device), 0)
        return self._checked_ids("token", tokens_BT, lowest=0)

    def _checked_lengths(self, tokens_BT: Tensor, lengths: Any) -> Tensor | None:
        if lengths is None:
            return None
        lengths, length = torch.as_tensor(lengths).cpu(), tokens_BT.size(-1)
        bad_type = lengths.dtype not in INTEGERS or lengths.shape != tokens_BT.shape[:1]
        if bad_type or bool(((lengths < 0) | (lengths > length)).any()):
            raise ValueError(
                f"lengths={lengths.tolist()} must be one whole number from 0 to {length} for each "
                f"of the {len(tokens_BT)} rows"
            )
        return lengths.long()

    def _checked_targets(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        if targets_BT.shape != tokens_BT.shape or targets_BT.device != tokens_BT.device:
            raise ValueError(
                f"targets of shape {tuple(targets_BT.shape)} on {targets_BT.device} must be as the "
                f"tokens, {tuple(tokens_BT.shape)} on {tokens_BT.device}"
            )
        if targets_BT.dtype not in INTEGERS:
            raise ValueError(f"targets of type {targets_BT.dtype} must be integers")
        return self._checked_ids("target", targets_BT, lowest=-1)

    def _checked_ids(self, what: str, ids: Tensor, lowest: int) -> Tensor:
        if ids.is_meta:
            return ids.long()
        low, high = (int(bound) for bound in torch.stack(ids.aminmax()).tolist())
        if low < lowest or high >= self.config.vocab_size:
            raise ValueError(
                f"{what} id {low if low < lowest else high} is outside the vocabulary: "
                f"ids go from 0 to {self.config.vocab_size - 1}"
                + (", and -1 is ignored" if lowest < 0 else "")
            )
        return ids.long()

    def _check_owner(self, state: MemoryState) -> None:
        """A state that this model did not make must come from the same architecture and weights."""
        if state.owner is self:
            return
        meta = self.embedding.weight.is_meta
        theirs = Fingerprint(state.config.digest(), "") if meta else state.owner.fingerprint()
        ours = Fingerprint(self.config.digest(), "") if meta else self.fingerprint()
        if theirs.config != ours.config:
            raise ValueError(
                f"the state belongs to another architecture ({theirs.config}, this model is "
                f"{ours.config}): use it with the model that made it"
            )
        if theirs.weights != ours.weights:
            raise ValueError(
                f"the state was made with other weights ({theirs.weights}, this model has "
                f"{ours.weights}): use it with the model that made it, or read the document again"
            )
        for i, (layer, empty) in enumerate(
            zip(state.layers, self.empty_state(1).layers, strict=True)
        ):
            shapes = [tuple(tensor.shape[1:]) for tensor in layer]
            if shapes != [tuple(tensor.shape[1:]) for tensor in empty]:
                raise ValueError(f"the state is damaged: layer {i} has shapes {shapes}")


class Embedding(nn.Embedding):
    roles: ClassVar[dict[str, str]] = {"weight": "embeddings"}

    def __init__(self, vocab_size: int, width: int, std: float) -> None:
        self.std = std
        super().__init__(vocab_size, width)

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=self.std)


class Sight(NamedTuple):
    """Who sees what in self-attention, and at which bias; shared by windows that are alike."""

    visible_b1tk: Tensor
    bias: dict[str, Tensor]


class Pages:
    """Tokens in, hidden vectors out, one piece at a time, each row at its own place."""

    def __init__(self, tokens_BT: Tensor, nothing_B0D: Tensor) -> None:
        self.tokens_BT = tokens_BT
        self.pieces = [nothing_B0D]
        self.place_BT = torch.full(tokens_BT.shape, -1, device="cpu")
        self.in_order = True

    def tokens(self, start_B: Tensor, length_B: Tensor) -> Tensor:
        index_Bt = start_B[:, None] + torch.arange(int(length_B.max()), device="cpu")
        if bool((start_B == start_B[0]).all()):
            return self.tokens_BT[:, int(index_Bt[0, 0]) : int(index_Bt[0, -1]) + 1]
        index_Bt = index_Bt.clamp(max=self.tokens_BT.size(1) - 1)
        return self.tokens_BT.gather(1, index_Bt.to(self.tokens_BT.device))

    def add(self, x_BtD: Tensor, start_B: Tensor, length_B: Tensor) -> None:
        before = sum(piece.size(1) for piece in self.pieces)
        for row, (start, length) in enumerate(
            zip(start_B.tolist(), length_B.tolist(), strict=True)
        ):
            self.place_BT[row, start : start + length] = torch.arange(before, before + length)
        self.in_order &= bool((length_B == x_BtD.size(1)).all())
        self.pieces.append(x_BtD)

    def together(self) -> Tensor:
        """All hidden vectors in the order of the tokens; zeros where a row had padding."""
        x_BTD = torch.cat(self.pieces, dim=1)
        if self.in_order and x_BTD.size(1) == self.tokens_BT.size(1):
            return x_BTD
        # Padding is taken from one more vector, which is zero.
        x_BTD = F.pad(x_BTD, (0, 0, 0, 1))
        place_BT = torch.where(self.place_BT < 0, x_BTD.size(1) - 1, self.place_BT)
        index_BTD = place_BT.to(x_BTD.device)[:, :, None].expand(-1, -1, x_BTD.size(2))
        return x_BTD.gather(1, index_BTD)


def make_layer(config: ModelConfig, index: int, kind: str) -> Layer:
    if kind in ("long", "long-only"):
        return LongTermLayer(config, index, remembers=kind == "long")
    if kind in ("short", "plain"):
        return ShortTermLayer(config, index, remembers=kind == "short")
    return {"xl": XLLayer, "recurrent": RecurrentLayer, "memorizing": MemorizingLayer}[kind](config)


def biased_layers(config: ModelConfig) -> list[int]:
    """The layers that have a relative position bias."""
    everywhere = config.rules.memorizing_bias
    return [i for i, kind in enumerate(config.layers) if everywhere or kind != "memorizing"]


def _agreed(values_B: Tensor) -> Tensor:
    """One value where all rows agree, so that what is built from it broadcasts."""
    return values_B[:1] if bool((values_B == values_B[0]).all()) else values_B
