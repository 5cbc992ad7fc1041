"""One token inside its window, in as few steps as possible.

`TokenLayer` is `Layer.forward` where nothing opens or closes and the window is written in place:
the same equations, without what only other parts need. Weights are used directly where modules are
what they seem (`is_bare`); what is adapted, sharded or watched takes the general way.

`NativeTokenLayer` is the same in two calls of token.c, on a CPU with a C compiler. In torch's own
calls a token of a small model takes several times as long as its bytes do.

Shapes as in frame.py; F width of the feed-forward, X = H·E.
"""

from typing import Generic

import torch
from torch import Tensor, nn

from melodi.layers.frame import Layer, Memory, OpenWindow, WindowPart
from melodi.layers.native import ACTIVATIONS, MOST_ROWS, Kernel, NativeProduct, address
from melodi.layers.products import Numbers, Product
from melodi.layers.transformer import (
    EPSILON,
    AttentionScale,
    Block,
    FeedForward,
    Linear,
    Pairs,
    Projections,
    RMSNorm,
    attend,
    root_of_epsilon,
)

BARE = (Block, AttentionScale, FeedForward, Linear, RMSNorm)


class TokenLayer(Generic[Memory]):
    """A layer, with all at hand that tokens need of it, until its modules or weights change."""

    def __init__(self, layer: Layer[Memory], bias_Hk: Tensor | None, numbers: Numbers) -> None:
        """`bias_Hk` is the bias at all distances, the farthest first."""

        def made(linear: Linear) -> Product:
            return Product(linear.weight, linear.bias, numbers)

        block, ffn = layer.block, layer.block.ffn
        self.layer, self.past_slots, self.keeps = layer, layer.past_slots, layer.keeps
        self.heads, self.head_width = layer.heads
        self.recalls = type(layer).recall is not Layer.recall
        self.reads = type(layer).read is not Layer.read
        self.attention_norm, self.ffn_norm = map(TokenNorm, (block.attention_norm, block.ffn_norm))
        self.query, self.key, self.value = map(made, (block.query, block.key, block.value))
        self.output, self.hidden, self.ffn_output = map(
            made, (block.output, ffn.hidden, ffn.output)
        )
        self.activation = ffn.activation
        self.bias_1H1k = None if bias_Hk is None else block.scale.bias(bias_Hk[None, :, None])
        self.root, factor, self.lengths_2H1 = block.scale.root, block.scale.factor, None
        if factor is not None:
            self.lengths_2H1 = torch.stack([factor.abs(), torch.ones_like(factor)])[..., None]
            self.epsilon = root_of_epsilon(factor.dtype, factor.device)

    def __call__(
        self,
        x_BD: Tensor,
        memory: Memory,
        window: OpenWindow,
        part: WindowPart,
        seen: slice,
        distances: slice,
    ) -> Tensor:
        """The tokens after the layer; their pairs, and what the kind keeps of them, are in the
        window. `seen` are the keys that they see, `distances` where the bias has theirs."""
        layer, place, rows = self.layer, part.place, x_BD.size(0)
        assert place is not None
        if self.recalls:
            x_BD = layer.recall(x_BD[:, None], memory, part)[:, 0]
        h_BD = self.attention_norm(x_BD)
        q_BHE, k_BHE = self._queries_and_keys(h_BD)
        v_BHE = self.value(h_BD).view(rows, self.heads, self.head_width)
        keys, values, kept = window
        keys.select(2, self.past_slots + place).copy_(k_BHE)
        values.select(2, self.past_slots + place).copy_(v_BHE)
        count, bias = seen.stop - seen.start, self.bias_1H1k
        bias = None if bias is None else bias.narrow(3, distances.start, count)
        q_BH1E, near = q_BHE[:, :, None], (2, seen.start, count)
        a_BH1E = attend(q_BH1E, keys.narrow(*near), values.narrow(*near), bias)
        if self.reads:
            pairs = Pairs(k_BHE[:, :, None], v_BHE[:, :, None])
            read = layer.read(a_BH1E, Projections(h_BD[:, None], q_BH1E, pairs), memory, part)
            a_BX = torch.cat([a.reshape(rows, -1) for a in read], dim=1)
        else:
            a_BX = a_BH1E.reshape(rows, -1)
        y_BD = self.output(a_BX).add_(x_BD)
        f_BF = self.activation(self.hidden(self.ffn_norm(y_BD)))
        y_BD += self.ffn_output(f_BF)
        if self.keeps:
            kept[:, place : place + 1] = layer.keep(y_BD[:, None], h_BD[:, None])
        return y_BD

    def _queries_and_keys(self, h_BD: Tensor) -> tuple[Tensor, Tensor]:
        """As `AttentionScale` has them: where they are unit vectors, both in the same steps."""
        q_BX, k_BX = self.query(h_BD), self.key(h_BD)
        shape = (h_BD.size(0), self.heads, self.head_width)
        if self.lengths_2H1 is None:
            return q_BX.div_(self.root).view(shape), k_BX.view(shape)
        qk_B2HE = torch.stack([q_BX.view(shape), k_BX.view(shape)], dim=1)
        norm_B2H1 = torch.linalg.vector_norm(qk_B2HE, dim=-1, keepdim=True).hypot_(self.epsilon)
        q_BHE, k_BHE = qk_B2HE.mul_(self.lengths_2H1 / norm_B2H1).unbind(1)
        return q_BHE, k_BHE


class NativeTokenLayer(TokenLayer[Memory]):
    """The same by a kernel, which points to the tensors that are held here."""

    def __init__(
        self, layer: Layer[Memory], bias_Hk: Tensor | None, numbers: Numbers, kernel: Kernel
    ) -> None:
        super().__init__(layer, bias_Hk, numbers)
        self.kernel, block = kernel, layer.block
        products = (self.query, self.key, self.value, self.output, self.hidden, self.ffn_output)
        made = [NativeProduct(kernel, product) for product in products]
        lengths_H = None if self.lengths_2H1 is None else self.lengths_2H1[0].contiguous()
        bias_Hk = None if self.bias_1H1k is None else self.bias_1H1k[0, :, 0].contiguous()
        norms = (block.attention_norm.weight.detach(), block.ffn_norm.weight.detach())
        self.held = (*norms, lengths_H, bias_Hk, made)
        self.slots = layer.past_slots + layer.window
        self.about = kernel.Layer(
            layer.width,
            self.heads,
            self.head_width,
            self.slots,
            0 if bias_Hk is None else bias_Hk.size(1),
            ACTIVATIONS[layer.config.answers.activation],
            *map(address, (*norms, lengths_H, bias_Hk)),
            1 / self.root,
            EPSILON,
            *[one.about for one in made],
        )

    def __call__(
        self,
        x_BD: Tensor,
        memory: Memory,
        window: OpenWindow,
        part: WindowPart,
        seen: slice,
        distances: slice,
    ) -> Tensor:
        layer, place, rows = self.layer, part.place, x_BD.size(0)
        assert place is not None
        keys, values, kept = window
        if rows > MOST_ROWS or not self.kernel.fits(x_BD, keys, values):
            return super().__call__(x_BD, memory, window, part, seen, distances)
        if self.recalls:
            x_BD = self._plain(layer.recall(x_BD[:, None], memory, part)[:, 0])
        inner = self.heads * self.head_width
        h_BD, spare_BD, y_BD = x_BD.new_empty(3, *x_BD.shape).unbind()
        q_BX, k_BX, v_BX, a_BX = x_BD.new_empty(4, rows, inner).unbind()
        room = x_BD.new_empty(rows * max(self.heads * self.slots, self.hidden.outputs))
        self.kernel.begin_token(
            self.about,
            rows,
            *[tensor.data_ptr() for tensor in (x_BD, keys, values)],
            *(self.past_slots + place, seen.start, seen.stop - seen.start, distances.start),
            *[tensor.data_ptr() for tensor in (h_BD, q_BX, k_BX, v_BX, room, a_BX)],
        )
        if self.reads:
            shape = (rows, self.heads, 1, self.head_width)
            q_BH1E, a_BH1E = q_BX.view(shape), a_BX.view(shape)
            pairs = Pairs(k_BX.view(shape), v_BX.view(shape))
            read = layer.read(a_BH1E, Projections(h_BD[:, None], q_BH1E, pairs), memory, part)
            a_BX = self._plain(torch.cat([a.reshape(rows, -1) for a in read], dim=1))
        self.kernel.finish_token(
            self.about, rows, *[t.data_ptr() for t in (x_BD, a_BX, spare_BD, room, y_BD)]
        )
        if self.keeps:
            kept[:, place] = layer.keep(y_BD[:, None], h_BD[:, None])[:, 0]
        return y_BD

    def _plain(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.kernel.dtype).contiguous()


class TokenNorm:
    """RMSNorm in fewer calls: √(|x|² + D·ε) is a hypotenuse."""

    def __init__(self, norm: RMSNorm) -> None:
        width = norm.weight.numel()
        self.weight_D = norm.weight * width**0.5
        self.root = root_of_epsilon(self.weight_D.dtype, self.weight_D.device) * width**0.5

    def __call__(self, x_BD: Tensor) -> Tensor:
        norm_B1 = torch.linalg.vector_norm(x_BD, dim=1, keepdim=True).hypot_(self.root)
        return (x_BD * self.weight_D).div_(norm_B1)


def is_bare(layer: Layer[Memory]) -> bool:
    """The layer's block is made of our own modules, and nobody watches any of them."""
    block = layer.block
    parts = (block, *block.children(), *block.ffn.children())
    return all(type(part) in BARE for part in parts) and not any(map(is_watched, (layer, *parts)))


def is_watched(part: nn.Module) -> bool:
    """Whether somebody hears of what it computes, or computes it in another way."""
    return bool(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))
