"""A slow, obvious reference of every model: one document, one token at a time, in float64.

It is written from the equations alone (the paper's Sec. 2, and for the official dialect and the
baselines what the official code computes) and shares no code with the package, so that an error in
one of them is not repeated in the other.

- There are no masks. Each query gets the list of what it may see: memory that is masked while empty
  is not in the list, memory that starts as zeros is in it as zeros, and a query that sees nothing
  attends to nothing and gets zero.
- Tokens, keys and values are single vectors in Python lists, oldest first.
- Autograd goes through everything, so the gradients are a reference as well.

Letters: D width, H heads, E head width, V vocabulary; O tokens that a mixer gives; N pairs that a
query sees. x: the window's tokens, u: its summary tokens, z and m: short- and long-term memory.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from melodi import ModelConfig

EPSILON = 1e-6
REMEMBERING = ("short", "long", "long-only", "armt")

Pair = tuple[Tensor, Tensor]
"""The key and the value of one token, each (H, E)."""


def read(
    config: ModelConfig, weights: dict[str, Tensor], document: list[int], cuts: Iterable[int] = ()
) -> Tensor:
    """Logits (len(document), V) of a document read from its start, in evaluation mode.

    `weights` are the model's parameters by name. `cuts` are the token indices at which a segment
    ends and all that is carried is detached.
    """
    cuts = set(cuts)
    for cut in cuts:
        if cut % config.window:
            raise ValueError(f"cut {cut} is not a multiple of the window of {config.window} tokens")
    embedding_VD = weights["embedding.weight"]
    root = math.sqrt(config.width)
    layers = [LAYERS[kind](config, weights, i) for i, kind in enumerate(config.layers)]
    logits_V = []
    for start in range(0, len(document), config.window):
        if start in cuts:
            for layer in layers:
                layer.detach()
        x = [embedding_VD[token] for token in document[start : start + config.window]]
        if config.answers.embedding == "root":
            x = [x_D * root for x_D in x]
        for x_D in layers[0].read_window(weights, layers, x):
            logit_V = embedding_VD @ rms_norm(x_D, weights["final_norm.weight"])
            logits_V.append(logit_V / root if config.answers.embedding == "unit" else logit_V)
    return torch.stack(logits_V)


def read_window(
    config: ModelConfig, weights: dict[str, Tensor], layers: list["Layer"], x: list[Tensor]
) -> list[Tensor]:
    """The window's tokens after the last layer. A full window is remembered, for which the summary
    tokens run along, up to the last layer that remembers with them."""
    full = len(x) == config.window
    compressing = [i for i, kind in enumerate(config.layers) if kind in REMEMBERING]
    mixing = "armt" not in config.layers
    u = list(weights["summary" if mixing else "memory"]) if compressing and full else []
    for i, layer in enumerate(layers):
        x, u = layer.block(x, u)
        if full:
            layer.remember(x, u)
        if u and i == compressing[-1]:
            u = []
        elif u and mixing:
            u = layer.mix("up", x, u)
    return x


def rms_norm(x_D: Tensor, gain_D: Tensor) -> Tensor:
    return x_D / (x_D.square().mean() + EPSILON).sqrt() * gain_D


def unit_norm(x_HE: Tensor) -> Tensor:
    return x_HE / (x_HE.square().sum(-1, keepdim=True) + EPSILON).sqrt()


def bucket(distance: int) -> int:
    """T5's bucket of a distance: 32 of them, one direction, the last from distance 113 on."""
    distance = max(distance, 0)
    if distance < 16:
        return distance
    return min(31, 16 + math.floor(16 * math.log(distance / 16) / math.log(8)))


class Layer:
    """A transformer layer without memory, and what the other kinds have in common with it."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], index: int) -> None:
        self.config, self.answers, self.kind = config, config.answers, config.layers[index]
        prefix = f"layers.{index}."
        self.weights = {
            name.removeprefix(prefix): weight
            for name, weight in weights.items()
            if name.startswith(prefix)
        }
        if self.kind == "memorizing" and not self.answers.memorizing_bias:
            self.bias_table_HB = weights["embedding.weight"].new_zeros(config.num_heads, 32)
        else:
            self.bias_table_HB = weights[f"position_bias.tables.{index}"]

    def read_window(
        self, weights: dict[str, Tensor], layers: list["Layer"], x: list[Tensor]
    ) -> list[Tensor]:
        """Asked of the first layer: a window through the stack."""
        return read_window(self.config, weights, layers, x)

    def past(self) -> list[Pair]:
        """What self-attention sees of earlier windows, at the positions just before the window."""
        return []

    def sees(self, distance: int) -> bool:
        return distance >= (1 if self.answers.causal_mask == "strict" else 0)

    def and_memory(self, token_D: Tensor, self_HE: Tensor) -> Tensor:
        """The heads that go into the output projection, given those of self-attention."""
        return self_HE

    def remember(self, x: list[Tensor], u: list[Tensor]) -> None:
        """Takes a full window into memory; x and u as they come out of the block."""

    def detach(self) -> None:
        """Cuts the gradient into all that is carried."""

    def block(self, x: list[Tensor], u: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """[x'; û] = T([x; u] | memory)."""
        past = self.past()
        # The pairs of x stay here for the kinds that keep them as they are.
        self.x_pairs = [self.pair(x_D) for x_D in x]
        pairs = [*past, *self.x_pairs, *(self.pair(u_D) for u_D in u)]
        outputs = []
        for position, token_D in enumerate([*x, *u], start=len(past)):
            seen = [i for i in range(len(pairs)) if self.sees(position - i)]
            biases = [self.bias_table_HB[:, bucket(position - i)] for i in seen]
            self_HE = self.attend(
                self.query(token_D), [pairs[i] for i in seen], "block.scale", biases
            )
            heads_HE = self.and_memory(token_D, self_HE)
            y_D = token_D + self.weights["block.output.weight"] @ heads_HE.flatten()
            outputs.append(y_D + self.feed_forward(y_D))
        return outputs[: len(x)], outputs[len(x) :]

    def feed_forward(self, y_D: Tensor) -> Tensor:
        hidden = self.linear(
            "block.ffn.hidden", rms_norm(y_D, self.weights["block.ffn_norm.weight"])
        )
        if self.answers.activation == "gelu":
            hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        else:
            hidden = hidden.relu()
            if self.answers.activation == "relu2":
                hidden = hidden.square()
        return self.linear("block.ffn.output", hidden)

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = self.weights[f"{name}.weight"] @ x
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def query(self, token_D: Tensor, name: str = "block.query") -> Tensor:
        return self.direction(name, rms_norm(token_D, self.weights["block.attention_norm.weight"]))

    def pair(self, token_D: Tensor) -> Pair:
        normed_D = rms_norm(token_D, self.weights["block.attention_norm.weight"])
        return self.direction("block.key", normed_D), self.heads("block.value", normed_D)

    def direction(self, name: str, x_D: Tensor) -> Tensor:
        """A query or a key: of unit length where the dialect normalises them."""
        x_HE = self.heads(name, x_D)
        return x_HE if self.answers.attention == "scaled" else unit_norm(x_HE)

    def heads(self, name: str, x_D: Tensor) -> Tensor:
        projected = self.weights[f"{name}.weight"] @ x_D
        return projected.reshape(self.config.num_heads, self.config.head_size)

    def zero_pairs(self, count: int) -> list[Pair]:
        zero_HE = self.bias_table_HB.new_zeros(self.config.num_heads, self.config.head_size)
        return [(zero_HE, zero_HE)] * count

    def attend(
        self,
        query_HE: Tensor,
        pairs: list[Pair],
        scale: str,
        biases: list[Tensor] | None = None,
        top_k: int | None = None,
    ) -> Tensor:
        """One query over exactly these pairs, or over each head's `top_k` best of them. `biases`
        are position biases (H,), one per pair."""
        if not pairs:
            return torch.zeros_like(query_HE)
        key_NHE = torch.stack([key for key, _ in pairs])
        value_NHE = torch.stack([value for _, value in pairs])
        logit_HN = torch.einsum("he,nhe->hn", query_HE, key_NHE)
        if top_k is not None and top_k < len(pairs):
            best = [logit_N.topk(top_k).indices for logit_N in logit_HN]
            logit_HN = torch.stack([logit_HN[h, n] for h, n in enumerate(best)])
            value_NHE = torch.stack([value_NHE[n, h] for h, n in enumerate(best)], dim=1)
        bias_HN = 0 if biases is None else torch.stack(biases, dim=1)
        if self.answers.attention == "scaled":
            logit_HN = logit_HN / math.sqrt(self.config.head_size) + bias_HN
        else:
            logit_HN = self.weights[f"{scale}.factor"].abs()[:, None] * (logit_HN + bias_HN)
        return torch.einsum("hn,nhe->he", logit_HN.softmax(dim=-1), value_NHE)

    def mix(self, name: str, x: list[Tensor], u: list[Tensor]) -> list[Tensor]:
        """M_up, M_right or M_long: each output is a weighted sum of the tokens of [x'; û]."""
        if name != "long" and not self.config.branching:
            return u
        inputs = [*x, *u]
        if self.answers.mixer == "residual" and name != "long":
            context_norm = self.weights[f"{name}.context_norm.weight"]
            summary_norm = self.weights[f"{name}.summary_norm.weight"]
            inputs = [rms_norm(x_D, context_norm) for x_D in x]
            inputs += [rms_norm(u_D, summary_norm) for u_D in u]
        output_OD = self.weights[f"{name}.weight"].T @ torch.stack(inputs)
        if self.answers.mixer == "residual":
            output_OD = output_OD + self.weights[f"{name}.bias"][:, None]
            if name != "long":
                output_OD = output_OD + torch.stack(u)
        return list(output_OD)


class MelodiLayer(Layer):
    """Short-term memory z, long-term memory m, or both."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], index: int) -> None:
        super().__init__(config, weights, index)
        self.has_short = self.kind in ("short", "long")
        self.has_long = self.kind in ("long", "long-only")
        self.slots = config.long_term_tokens * config.long_term_windows
        self.z: list[Tensor] = []
        # Tokens or their pairs, by the dialect; the other list stays empty.
        self.m_tokens: list[Tensor] = []
        self.m_pairs: list[Pair] = []
        if self.answers.empty_memory == "zeros":
            zero_D = weights["embedding.weight"].new_zeros(config.width)
            if self.has_short:
                self.z = [zero_D] * config.short_term_tokens
            if self.has_long and self.answers.long_term_store == "tokens":
                self.m_tokens = [zero_D] * self.slots
            elif self.has_long:
                self.m_pairs = self.zero_pairs(self.slots)

    def past(self) -> list[Pair]:
        return [self.pair(z_D) for z_D in self.z]

    def block(self, x: list[Tensor], u: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        # Stored tokens are projected with the current weights, once per window.
        self.long_pairs = self.m_pairs + [self.pair(m_D) for m_D in self.m_tokens]
        return super().block(x, u)

    def and_memory(self, token_D: Tensor, self_HE: Tensor) -> Tensor:
        if not self.long_pairs:
            return self_HE
        long_HE = self.attend(self.query(token_D), self.long_pairs, "block.scale")
        gate = torch.sigmoid(self.weights["gate.logit"])
        if self.answers.gate == "channel":
            return gate * self_HE + (1 - gate) * long_HE
        return gate[:, None] * long_HE + (1 - gate[:, None]) * self_HE

    def remember(self, x: list[Tensor], u: list[Tensor]) -> None:
        if self.has_short:
            self.z = self.mix("right", x, u)
        if not self.has_long:
            return
        m = self.z if self.config.copy_short_to_long else self.mix("long", x, u)
        if self.answers.long_term_store == "tokens":
            self.m_tokens = (self.m_tokens + m)[-self.slots :]
        else:
            self.m_pairs = (self.m_pairs + [self.pair(m_D) for m_D in m])[-self.slots :]

    def detach(self) -> None:
        self.z = [z_D.detach() for z_D in self.z]
        self.m_tokens = [m_D.detach() for m_D in self.m_tokens]
        self.m_pairs = detached(self.m_pairs)


class XLLayer(Layer):
    """Transformer-XL: the pairs of the previous window, of which each token sees W back."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], index: int) -> None:
        super().__init__(config, weights, index)
        self.cache: list[Pair] = []
        if self.answers.empty_memory == "zeros":
            self.cache = self.zero_pairs(config.window)

    def past(self) -> list[Pair]:
        return self.cache

    def sees(self, distance: int) -> bool:
        return super().sees(distance) and distance <= self.config.window

    def remember(self, x: list[Tensor], u: list[Tensor]) -> None:
        self.cache = self.x_pairs

    def detach(self) -> None:
        self.cache = detached(self.cache)


class RecurrentLayer(XLLayer):
    """Block-Recurrent: states C that the tokens read and that are rewritten after each window."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], index: int) -> None:
        super().__init__(config, weights, index)
        self.states = list(self.weights["state.initial"])
        self.at_start = True

    def block(self, x: list[Tensor], u: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        self.normed = [
            rms_norm(state_D, self.weights["state.norm.weight"]) + position_D
            for state_D, position_D in zip(self.states, self.weights["state.position"], strict=True)
        ]
        self.state_pairs = [
            (self.direction("state.key", c_D), self.heads("state.value", c_D))
            for c_D in self.normed
        ]
        return super().block(x, u)

    def and_memory(self, token_D: Tensor, self_HE: Tensor) -> Tensor:
        query_HE = self.query(token_D, "read_query")
        return torch.cat([self_HE, self.attend(query_HE, self.state_pairs, "read_scale")])

    def remember(self, x: list[Tensor], u: list[Tensor]) -> None:
        keep_D = torch.sigmoid(self.weights["state.gate"])
        token_pairs = self.cache + self.x_pairs
        next_states = []
        for state_D, c_D in zip(self.states, self.normed, strict=True):
            self_query_HE = self.direction("state.self_query", c_D)
            token_query_HE = self.direction("state.token_query", c_D)
            self_HE = self.attend(self_query_HE, self.state_pairs, "state.self_scale")
            token_HE = self.attend(token_query_HE, token_pairs, "state.token_scale")
            y_D = self.weights["state.output.weight"] @ torch.cat([self_HE, token_HE]).flatten()
            next_states.append(keep_D * state_D + (1 - keep_D) * y_D)
        self.states = next_states
        self.at_start = False
        super().remember(x, u)

    def detach(self) -> None:
        super().detach()
        # The learned initial state is a parameter, not carried memory: it keeps its gradient.
        if not self.at_start:
            self.states = [state_D.detach() for state_D in self.states]


class MemorizingLayer(XLLayer):
    """Memorizing Transformer: the last `memory_slots` pairs, written without gradient."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], index: int) -> None:
        super().__init__(config, weights, index)
        self.external: list[Pair] = []

    def and_memory(self, token_D: Tensor, self_HE: Tensor) -> Tensor:
        pairs = self.external
        if self.answers.empty_memory == "zeros":
            # Empty slots are read too, but the k best are taken from the written ones first.
            readable = self.config.top_k or self.config.memory_slots
            pairs = pairs + self.zero_pairs(readable - len(pairs))
        if not pairs:
            return self_HE
        external_HE = self.attend(
            self.query(token_D), pairs, "block.scale", top_k=self.config.top_k
        )
        gate_H1 = torch.sigmoid(self.weights["gate.logit"])[:, None]
        return gate_H1 * external_HE + (1 - gate_H1) * self_HE

    def remember(self, x: list[Tensor], u: list[Tensor]) -> None:
        self.external = (self.external + detached(self.x_pairs))[-self.config.memory_slots :]
        super().remember(x, u)


class InfiniLayer(Layer):
    """Infini-attention: per head a matrix M of values by features of keys, and their sum z."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], index: int) -> None:
        super().__init__(config, weights, index)
        E = config.head_size
        self.M_HEE = weights["embedding.weight"].new_zeros(config.num_heads, E, E)
        self.z_HE = weights["embedding.weight"].new_zeros(config.num_heads, E)
        self.at_start = True

    def feature(self, q_HE: Tensor) -> Tensor:
        """elu + 1, of vectors with entries of about unit size."""
        if self.answers.attention != "scaled":
            q_HE = q_HE * math.sqrt(self.config.head_size)
        return torch.where(q_HE > 0, q_HE, q_HE.clamp(max=0).exp() - 1) + 1

    def look_up(self, feature_HE: Tensor) -> Tensor:
        weight_H1 = (feature_HE * self.z_HE).sum(-1, keepdim=True)
        return torch.einsum("hk,hkv->hv", feature_HE, self.M_HEE) / weight_H1

    def and_memory(self, token_D: Tensor, self_HE: Tensor) -> Tensor:
        if self.at_start:
            return self_HE
        gate_H1 = torch.sigmoid(self.weights["gate.logit"])[:, None]
        memory_HE = self.look_up(self.feature(self.query(token_D)))
        return gate_H1 * memory_HE + (1 - gate_H1) * self_HE

    def remember(self, x: list[Tensor], u: list[Tensor]) -> None:
        M_HEE, z_HE = self.M_HEE, self.z_HE
        for key_HE, value_HE in self.x_pairs:
            feature_HE = self.feature(key_HE)
            if self.config.infini_update == "delta" and not self.at_start:
                value_HE = value_HE - self.look_up(feature_HE)
            M_HEE = M_HEE + torch.einsum("hk,hv->hkv", feature_HE, value_HE)
            z_HE = z_HE + feature_HE
        self.M_HEE, self.z_HE, self.at_start = M_HEE, z_HE, False

    def detach(self) -> None:
        self.M_HEE, self.z_HE = self.M_HEE.detach(), self.z_HE.detach()


class ARMTLayer(Layer):
    """ARMT: a matrix A of values by features of their keys, written by tokens behind the window."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], index: int) -> None:
        super().__init__(config, weights, index)
        features = 6 * config.associative_width
        self.A_KD = weights["embedding.weight"].new_zeros(features, config.width)
        self.z_K = weights["embedding.weight"].new_zeros(features)
        self.at_start = True

    def feature(self, name: str, token_D: Tensor) -> Tensor:
        """DPFP-3: each entry of [relu(a); relu(-a)] times those 1, 2 and 3 places before it."""
        a = self.weights[f"{name}.weight"] @ token_D
        r = [*a.relu(), *(-a).relu()]
        return torch.stack([r[i] * r[(i - j) % len(r)] for j in (1, 2, 3) for i in range(len(r))])

    def look_up(self, feature_K: Tensor) -> Tensor:
        return feature_K @ self.A_KD / (feature_K @ self.z_K + 1e-5)

    def block(self, x: list[Tensor], u: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        if not self.at_start:
            x, u = (
                [token_D + self.look_up(self.feature("W_mq", token_D)) for token_D in tokens]
                for tokens in (x, u)
            )
        return super().block(x, u)

    def remember(self, x: list[Tensor], u: list[Tensor]) -> None:
        A_KD, z_K = self.A_KD, self.z_K
        for u_D in u:
            feature_K = self.feature("W_mk", u_D)
            value_D, new = self.weights["W_mv.weight"] @ u_D, 1.0
            if not self.at_start:
                value_D = value_D - self.look_up(feature_K)
                known = (feature_K @ self.z_K + 1e-5) / (feature_K @ feature_K + 1e-5)
                new = min(max(1 - known.item(), 0.0), 1.0)
            strength = torch.sigmoid(self.linear("W_mb", u_D))
            A_KD = A_KD + torch.outer(feature_K, strength * value_D)
            z_K = z_K + new * feature_K
        self.A_KD, self.z_K, self.at_start = A_KD, z_K, False

    def detach(self) -> None:
        self.A_KD, self.z_K = self.A_KD.detach(), self.z_K.detach()


def detached(pairs: list[Pair]) -> list[Pair]:
    return [(key_HE.detach(), value_HE.detach()) for key_HE, value_HE in pairs]


LAYERS: dict[str, type[Layer]] = {
    "plain": Layer,
    "short": MelodiLayer,
    "long": MelodiLayer,
    "long-only": MelodiLayer,
    "xl": XLLayer,
    "recurrent": RecurrentLayer,
    "memorizing": MemorizingLayer,
    "infini": InfiniLayer,
    "armt": ARMTLayer,
}
