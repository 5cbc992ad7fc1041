"""The FIFO of long-term memory: a tensor of fixed length, whose newest entries are the last.

Every window appends its entries at the end, and the oldest fall out. How many slots hold something
follows from the number of windows that a row has read; the others are masked, or never read.

While several whole windows are read without a gradient, nobody else sees the FIFO: it then has room
behind it, where windows write without copying what is there (`with_room`).

Shapes: B rows, H heads, M slots, E head width.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from melodi.layers.frame import WindowPart
from melodi.layers.transformer import Pairs


def append(queue: Tensor, new: Tensor, dim: int, part: WindowPart) -> Tensor:
    """The FIFO with the entries of a window that is full; as it was in the other rows."""
    return part.commit(push(queue, new, dim), queue)


def with_room(queue: Pairs, entries: int) -> Pairs:
    """The FIFO in tensors of its own, with room behind it for so many entries, or for as many as
    it has slots."""
    slots = queue.keys_BHkE.size(2)

    def moved(tensor_BHME: Tensor) -> Tensor:
        rows, heads, _, width = tensor_BHME.shape
        room_BHkE = tensor_BHME.new_empty(rows, heads, slots + min(entries, slots), width)
        room_BHkE[:, :, :slots] = tensor_BHME
        return room_BHkE[:, :, :slots]

    return Pairs(*map(moved, queue))


def push_into_room(queue_BHkE: Tensor, new: Tensor, slots: int) -> Tensor:
    """What `with_room` gave, longer by the new entries, which are written behind it, in place; the
    newest `slots` are the FIFO. Where the room is full, these first move to its front."""
    rows, heads, used, width = queue_BHkE.shape
    new = new.narrow(2, max(new.size(2) - slots, 0), min(new.size(2), slots))
    strides = queue_BHkE.stride()
    if used + new.size(2) > strides[1] // width:
        queue_BHkE[:, :, :slots] = queue_BHkE[:, :, -slots:].clone()  # the two may overlap
        used = slots
    longer = queue_BHkE.as_strided((rows, heads, used + new.size(2), width), strides)
    longer[:, :, used:] = new
    return longer


def newest(queues: Iterable[Tensor], slots: int) -> list[Tensor]:
    """The FIFOs again, without the room."""
    return [queue_BHkE[:, :, -slots:].contiguous() for queue_BHkE in queues]


class FilledSlots(NamedTuple):
    """The part of a FIFO worth reading."""

    slots: int
    """How many slots, from the newest, hold something in at least one row."""
    visible_B11M: Tensor | None
    """Which of them hold something; None where all do. An empty row sees all of its zeros."""
    empty_B: Tensor | None
    """Rows that remember nothing; None where there are none."""

    def mask(self) -> Tensor | None:
        """What is added to q·k: -inf where nothing is held."""
        visible = self.visible_B11M
        if visible is None:
            return None
        return torch.zeros(visible.shape, device=visible.device).masked_fill(~visible, -torch.inf)


def filled_slots(part: WindowPart, slots: int, per_window: int, masked: bool) -> FilledSlots:
    """Which slots of a FIFO to read when every window has pushed `per_window` entries."""
    if not masked:
        return FilledSlots(slots, None, None)
    count = min(part.most_windows * per_window, slots)
    if part.fewest_windows * per_window >= count:
        return FilledSlots(count, None, None)
    empty_B = part.windows_read_B == 0
    visible_B11M = written_slots(part, count, per_window) | empty_B[:, None, None, None]
    return FilledSlots(count, visible_B11M, empty_B)


def written_slots(part: WindowPart, slots: int, per_window: int) -> Tensor:
    """Which of the newest slots of a FIFO have been written, (B, 1, 1, M)."""
    first_B = slots - part.windows_read_B * per_window
    slot_M = torch.arange(slots, device=first_B.device)
    return (slot_M >= first_B[:, None])[:, None, None, :]


def push(queue: Tensor, new: Tensor, dim: int) -> Tensor:
    """Appends at the end of a FIFO of fixed length; the oldest entries fall out."""
    slots, count = queue.size(dim), new.size(dim)
    if count >= slots:
        return new.narrow(dim, count - slots, slots).to(queue.dtype)
    return torch.cat([queue.narrow(dim, count, slots - count), new.to(queue.dtype)], dim)
