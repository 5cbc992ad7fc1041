"""Dialects: one answer to each question on which the paper and the official code disagree."""

import dataclasses
import difflib
import functools
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args


@dataclass(frozen=True)
class Dialect:
    """One answer to each question on which the paper and the official code disagree."""

    mixer: Literal["matrix", "residual"]
    """matrix: the bare linear map. residual: normalised inputs, a bias, and the summary added."""
    mixer_start: Literal["random", "tokens"]
    """random: of the size that keeps the variance. tokens: M_right hands on the last tokens of the
    window, M_long tokens at equal distances, M_up the summary, until training finds better."""
    block_start: Literal["random", "small"]
    """What attention and feed-forward add to the stream before training: something of the size of
    their inputs, or a tenth of it."""
    bias_start: Literal["zero", "near"]
    """What the position bias prefers before training: nothing, or in three of four heads what is
    near, see `near_bias`."""
    gate: Literal["head", "channel"]
    """head: σ(g) per head, on long-term. channel: σ(g) per head and channel, on self-attention."""
    long_term_store: Literal["pairs", "tokens"]
    """pairs: key-value pairs. tokens: projected anew, with the current weights, in every window."""
    empty_memory: Literal["masked", "zeros"]
    """masked: never attended to. zeros: attended to as zero keys and values."""
    causal_mask: Literal["inclusive", "strict"]
    """strict: a token does not attend to itself."""
    attention: Literal["scaled", "normalised", "normalised-root"]
    """scaled: q·k/√E. normalised: unit q and k times a learned scale per head that also multiplies
    the position bias and starts at 1; normalised-root: the same, starting at √E."""
    activation: Literal["relu", "relu2", "gelu"]
    ffn_bias: bool
    """Biases in the feed-forward of Melodi; the baselines never have them."""
    embedding: Literal["unit", "root"]
    """unit: N(0, 1), logits divided by √D. root: the same function stored divided by √D."""
    memorizing_bias: bool
    """Relative position bias in the Memorizing layer's local attention."""


STARTS = ("mixer_start", "block_start", "bias_start")
"""Answers of which training leaves nothing: a trained model is the same function with any."""

DIALECTS = {
    "paper": Dialect(
        mixer="matrix",
        mixer_start="random",
        block_start="random",
        bias_start="zero",
        gate="head",
        long_term_store="pairs",
        empty_memory="masked",
        causal_mask="inclusive",
        attention="scaled",
        activation="relu",
        ffn_bias=False,
        embedding="unit",
        memorizing_bias=True,
    ),
    "meliad": Dialect(
        mixer="residual",
        mixer_start="random",
        block_start="random",
        bias_start="zero",
        gate="channel",
        long_term_store="tokens",
        empty_memory="zeros",
        causal_mask="strict",
        attention="normalised",
        activation="relu",
        ffn_bias=True,
        embedding="unit",
        memorizing_bias=False,
    ),
}
DIALECTS["default"] = replace(
    DIALECTS["paper"],
    mixer_start="tokens",
    block_start="small",
    bias_start="near",
    attention="normalised-root",
    embedding="root",
)


@functools.cache
def parse_dialect(text: str) -> Dialect:
    """The named dialect, with the single answers that follow the name: "default,gate=channel"."""
    name, *changes = text.split(",")
    if name not in DIALECTS:
        raise ValueError(f"dialect={name!r} is unknown: choose one of {', '.join(DIALECTS)}")
    answers = dict(change.partition("=")[::2] for change in changes)
    check_keys(Dialect, answers)
    for key, answer in answers.items():
        known = get_args(Dialect.__annotations__[key]) or ("true", "false")
        if answer not in known:
            raise ValueError(f"dialect has {key}={answer!r}: choose one of {', '.join(known)}")
    values: Any = {k: v == "true" if v in ("true", "false") else v for k, v in answers.items()}
    return replace(DIALECTS[name], **values)


def check_keys(cls: type, values: dict[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(cls)]
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            hint = f": did you mean {near[0]!r}?" if near else f": known are {', '.join(names)}"
            raise ValueError(f"{cls.__name__} has no field {key!r}{hint}")
