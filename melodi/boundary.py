"""Every input that a model refuses, in one line with the value and the cure, before it computes.

Shapes: B rows, T tokens.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from melodi.config import ModelConfig
from melodi.device import upload
from melodi.memory import Fingerprint, MemoryState

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16)

_ids_are_checked = ContextVar("ids are checked", default=False)


@contextlib.contextmanager
def ids_checked() -> Iterator[None]:
    """For callers that have checked all ids on the host: to look at them on a device would mean to
    wait for it."""
    before = _ids_are_checked.set(True)
    try:
        yield
    finally:
        _ids_are_checked.reset(before)


def check_batch_size(batch_size: int) -> None:
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r} must be a whole number of at least 1")


def checked_tokens(
    tokens_BT: Tensor, state: MemoryState, lengths: Tensor | None, config: ModelConfig, like: Tensor
) -> Tensor:
    """The tokens as int64, padding as 0. `like` is a weight of the model."""
    check_tensor("tokens", tokens_BT)
    if not isinstance(state, MemoryState):
        raise ValueError(
            f"state is a {type(state).__name__}: give a MemoryState, model.empty_state(rows) say"
        )
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
    for what, device in (("tokens", tokens_BT.device), ("state", state.device)):
        if device != like.device:
            raise ValueError(f"{what} on {device}, model on {like.device}: move it with .to()")
    check_dtype(state, like.dtype)
    tokens_BT = tokens_BT.long()
    if lengths is not None:
        padding_BT = torch.arange(length, device="cpu") >= lengths[:, None]
        tokens_BT = tokens_BT.masked_fill(upload(padding_BT, tokens_BT.device), 0)
    check_ids("token", tokens_BT, 0, config.vocab_size)
    return tokens_BT


def checked_lengths(tokens_BT: Tensor, lengths: Tensor | Sequence[int] | None) -> Tensor | None:
    """None where nothing is padding."""
    if lengths is None:
        return None
    check_tensor("tokens", tokens_BT)
    try:
        lengths = torch.as_tensor(lengths, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"lengths={lengths!r} must be whole numbers, one for each row") from None
    length = tokens_BT.size(-1)
    bad_type = lengths.dtype not in INTEGERS or lengths.shape != tokens_BT.shape[:1]
    if bad_type or bool(((lengths < 0) | (lengths > length)).any()):
        raise ValueError(
            f"lengths={lengths.tolist()} must be one whole number from 0 to {length} for each "
            f"of the {len(tokens_BT)} rows"
        )
    return None if bool((lengths == length).all()) else lengths.long()


def checked_targets(tokens_BT: Tensor, targets_BT: Tensor, config: ModelConfig) -> Tensor:
    """The targets as int64."""
    check_tensor("targets", targets_BT)
    if targets_BT.shape != tokens_BT.shape or targets_BT.device != tokens_BT.device:
        raise ValueError(
            f"targets of shape {tuple(targets_BT.shape)} on {targets_BT.device} must be as the "
            f"tokens, {tuple(tokens_BT.shape)} on {tokens_BT.device}"
        )
    if targets_BT.dtype not in INTEGERS:
        raise ValueError(f"targets of type {targets_BT.dtype} must be integers")
    targets_BT = targets_BT.long()
    check_ids("target", targets_BT, -1, config.vocab_size)
    return targets_BT


def check_tensor(what: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{what} are a {type(value).__name__}: give a tensor of integers")


def check_ids(what: str, ids: Tensor, lowest: int, vocab_size: int) -> None:
    if ids.is_meta or _ids_are_checked.get():
        return
    low, high = (int(bound) for bound in torch.stack(ids.aminmax()).tolist())
    if low < lowest or high >= vocab_size:
        raise ValueError(
            f"{what} id {low if low < lowest else high} is outside the vocabulary: "
            f"ids go from 0 to {vocab_size - 1}" + (", and -1 is ignored" if lowest < 0 else "")
        )


def check_dtype(state: MemoryState, dtype: torch.dtype) -> None:
    if state.dtype != dtype:
        raise ValueError(
            f"the state is {state.dtype} and the model is {dtype}: "
            "use a state made by this model's empty_state"
        )


def check_owner(state: MemoryState, ours: Fingerprint, empty: MemoryState) -> None:
    """A state from elsewhere must come from the same architecture and, once something has been
    read, from the same weights.

    `empty` is a state of this model, with an empty open window, to compare shapes with.
    """
    architecture = state.config.digest()
    if architecture != ours.config:
        raise ValueError(
            f"the state belongs to another architecture ({architecture}, this model is "
            f"{ours.config}): use it with the model that made it"
        )
    theirs = state.owner.fingerprint() if state.tokens_B.any() else ours
    if theirs != ours:
        raise ValueError(
            f"the state was made with other weights ({theirs.weights}, this model has "
            f"{ours.weights}): use it with the model that made it, or read the document again"
        )
    check_dtype(state, empty.dtype)
    for memories, like in ((state.layers, empty.layers), (state.open_window, empty.open_window)):
        for i, (memory, expected) in enumerate(zip(memories or (), like or (), strict=False)):
            shapes = [tuple(tensor.shape[1:]) for tensor in memory]
            if shapes != [tuple(tensor.shape[1:]) for tensor in expected]:
                raise ValueError(f"the state is damaged: layer {i} has shapes {shapes}")
