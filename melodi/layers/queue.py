"""A FIFO of key-value pairs that a layer reads through a gate: Melodi's and Memorizing's long-term
memory.

It takes the form that suits what is done with it. Between calls it is whole. While a segment is
learned from, it is the FIFO as it was and the pairs appended since (growing.py); while windows are
read without a gradient, it has room behind it (fifo.py). Each form is a NamedTuple that begins with
what else the layer carries; the last two fields, or four, are the FIFO.

Shapes as in frame.py; M slots of the FIFO.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from melodi.layers.fifo import (
    FilledSlots,
    append,
    filled_slots,
    newest,
    push_into_room,
    with_room,
)
from melodi.layers.frame import Layer, Memory, WindowPart
from melodi.layers.gate import Gate
from melodi.layers.growing import attend_filled, begun, pushed
from melodi.layers.transformer import Pairs, Projections, attend


class Forms(NamedTuple):
    """Of one memory."""

    whole: type[Any]
    growing: type[Any]
    roomy: type[Any]


class QueueLayer(Layer[Memory]):
    """Reads the FIFO and appends to it, in whatever form it is."""

    forms: Forms
    slots: int
    gate: Gate
    grows = True
    """Whether it can be attended to in two parts."""

    def read(
        self, a_BHtE: Tensor, made: Projections, memory: Memory, part: WindowPart
    ) -> tuple[Tensor, ...]:
        """Cross-attention to the FIFO, and the gate: α·A_long + (1 - α)·A_self."""
        if isinstance(memory, self.forms.growing):
            base, fresh = Pairs(*memory[-4:-2]), Pairs(*memory[-2:])
            long_BHtE, empty_B = attend_filled(
                made.q_BHtE, base, fresh, part, self.entries_per_window, self.masked
            )
            return (a_BHtE if long_BHtE is None else self.gate(a_BHtE, long_BHtE, empty_B),)
        filled = filled_slots(part, self.slots, self.entries_per_window, self.masked)
        if filled.slots == 0:
            return (a_BHtE,)
        pairs = self.newest_pairs(memory, filled.slots)
        if part.probe is not None:
            part.probe.note(self.index, "long-term", made.q_BHtE, pairs, filled.mask())
        long_BHtE = self.attend_queue(made.q_BHtE, pairs, filled, part)
        return (self.gate(a_BHtE, long_BHtE, filled.empty_B),)

    def newest_pairs(self, memory: Memory, slots: int) -> Pairs:
        return Pairs(*memory[-2:]).slots(-slots)

    def attend_queue(
        self, q_BHtE: Tensor, pairs: Pairs, filled: FilledSlots, part: WindowPart
    ) -> Tensor:
        visible, dropout = filled.visible_B11M, self.block.drop_rate
        return attend(q_BHtE, *pairs, visible=visible, dropout=dropout)

    def append_pairs(
        self, own: Sequence[Tensor], memory: Memory, new: Pairs, part: WindowPart
    ) -> Memory:
        """The memory after a window that leaves these pairs; own: its other fields, as they are
        then."""
        if isinstance(memory, self.forms.growing):
            fresh = Pairs(*memory[-2:]).join(new)
            return self.forms.growing(*own, *memory[-4:-2], *fresh)
        if isinstance(memory, self.forms.roomy):
            longer = map(push_into_room, memory[-2:], new, [self.slots] * 2)
            return self.forms.roomy(*own, *longer)
        return self.forms.whole(*own, *map(append, memory[-2:], new, [2] * 2, [part] * 2))

    def begin_segment(self, memory: Memory, windows: int) -> Memory:
        """Where old slots have a gradient, the queue stays whole."""
        if not isinstance(memory, self.forms.whole):
            return memory
        *own, keys, values = memory
        base = Pairs(keys, values)
        if not torch.is_grad_enabled():
            roomy = with_room(base, windows * self.entries_per_window)
            return self.forms.roomy(*own, *roomy)
        if not self.grows or any(tensor.requires_grad for tensor in base):
            return memory
        base, fresh = begun(base)
        return self.forms.growing(*own, *base, *fresh)

    def end_segment(self, memory: Memory) -> Memory:
        if isinstance(memory, self.forms.roomy):
            *own, keys, values = memory
            return self.forms.whole(*own, *newest((keys, values), self.slots))
        if isinstance(memory, self.forms.growing):
            queue = pushed(Pairs(*memory[-4:-2]), Pairs(*memory[-2:]))
            return self.forms.whole(*memory[:-4], *queue)
        return memory
