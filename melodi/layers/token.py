"""One token inside its window, in as few steps as torch allows.

`next_token` is `Layer.forward` where nothing opens or closes and the window is written in place:
the same equations, without what only other parts need. Generation is bound by its calls, of modules
and of torch, hardly by their arithmetic: so weights are used directly where modules are what they
seem (`is_bare`), and what is adapted, sharded or watched takes the general way.

Shapes as in frame.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from melodi.layers.frame import Layer, Memory, OpenWindow, WindowPart
from melodi.layers.transformer import (
    EPSILON,
    AttentionScale,
    Block,
    FeedForward,
    Linear,
    Pairs,
    Projections,
    RMSNorm,
    Sight,
    attend,
    merge_heads,
)

BARE = (Block, AttentionScale, FeedForward, Linear, RMSNorm)


def next_token(
    layer: Layer[Memory],
    x_B1D: Tensor,
    memory: Memory,
    window: OpenWindow,
    part: WindowPart,
    sight: Sight,
) -> Tensor:
    """The token after the layer; its pair, and what the kind keeps of it, are in the window."""
    block, scale, place = layer.block, layer.block.scale, part.place
    assert place is not None
    assert sight.keys is not None
    slot, (heads, head_width), (keys, values, kept) = layer.past_slots + place, layer.heads, window
    x_B1D = layer.recall(x_B1D, memory, part)
    h_B1D = rms_norm(x_B1D, block.attention_norm.weight)
    shape = (x_B1D.size(0), heads, 1, head_width)
    q_BH1E = scale.query(F.linear(h_B1D, block.query.weight).view(shape))
    k_BH1E = scale.key(F.linear(h_B1D, block.key.weight).view(shape))
    v_BH1E = F.linear(h_B1D, block.value.weight).view(shape)
    keys[:, :, slot : slot + 1] = k_BH1E
    values[:, :, slot : slot + 1] = v_BH1E
    seen, bias = sight.keys, scale.bias(sight.bias_bHtk)
    a_BH1E = attend(q_BH1E, keys[:, :, seen], values[:, :, seen], bias)
    made = Projections(h_B1D, q_BH1E, Pairs(k_BH1E, v_BH1E))
    heads_BH1E = layer.read(a_BH1E, made, memory, part)
    merged = [merge_heads(a) for a in heads_BH1E]
    a_B1X = merged[0] if len(merged) == 1 else torch.cat(merged, dim=-1)
    y_B1D = F.linear(a_B1X, block.output.weight).add_(x_B1D)
    ffn = block.ffn
    f_B1F = F.linear(rms_norm(y_B1D, block.ffn_norm.weight), ffn.hidden.weight, ffn.hidden.bias)
    y_B1D += F.linear(ffn.activation(f_B1F), ffn.output.weight, ffn.output.bias)
    if layer.keeps:
        kept[:, place : place + 1] = layer.keep(y_B1D, h_B1D)
    return y_B1D


def rms_norm(x_B1D: Tensor, weight_D: Tensor) -> Tensor:
    """As RMSNorm; of a single token its length as a number, which needs fewer calls."""
    width = weight_D.numel()
    if x_B1D.numel() > width or x_B1D.device.type != "cpu":
        return torch.rms_norm(x_B1D, (width,), weight_D, EPSILON)
    x_D = x_B1D.view(-1)
    mean_square = x_D.dot(x_D).item() / width
    return (x_B1D * weight_D).mul_((mean_square + EPSILON) ** -0.5)


def is_bare(layer: Layer[Memory]) -> bool:
    """The layer's block is made of our own modules, and nobody watches any of them."""
    block = layer.block
    parts = (block, *block.children(), *block.ffn.children())
    return all(
        type(part) in BARE and not part._forward_hooks and not part._forward_pre_hooks
        for part in parts
    ) and not (layer._forward_hooks or layer._forward_pre_hooks)
