"""Full attention, the usual way to read a long document: a Llama of `transformers`.

It has the width, depth, heads and vocabulary of ours; its gated feed-forward has three matrices of
two thirds of the width, so that parameters and operations are the same. It scores tokens by the
same code as ours, without holding all logits.

Shapes: B rows, T tokens, H heads, M slots, E head width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from melodi.bench.operations import TRAINING
from melodi.bench.sizes import Size
from melodi.bench.subjects import Subject, random_tokens
from melodi.config import ModelConfig
from melodi.layers.nats import linear_nats

NAME = "full attention"
GENERATED = 8
"""Tokens of a sample of generation: with a long context each is slow."""


def make_llama(c: ModelConfig) -> Any:
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    # Its annotations differ from what it takes, and from version to version.
    llama: Any = transformers
    return llama.LlamaForCausalLM(
        llama.LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.width,
            intermediate_size=2 * c.ffn_width // 3,
            num_hidden_layers=len(c.layers),
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_heads,
            head_dim=c.head_size,
            max_position_embeddings=1 << 21,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
    ).eval()


def make_subject(size: Size, context: int) -> Subject:
    """Trains and reads segments by themselves; generates with a context of that many tokens."""
    c = size.reference
    model = make_llama(c)
    tokens_BT = random_tokens(c, size.rows, size.segment)
    cache = filled_cache(model, c, context, bf16 := size.precision == "bf16")

    def train() -> None:
        nats(model, tokens_BT).sum().backward()
        model.zero_grad(set_to_none=True)

    @torch.inference_mode()
    def read() -> None:
        nats(model, tokens_BT)

    @torch.inference_mode()
    def generate() -> None:
        token_11 = tokens_BT[:1, :1]
        for _ in range(GENERATED):
            output = model(input_ids=token_11, past_key_values=cache, use_cache=True)
            token_11 = output.logits[:, -1:].argmax(-1)
        cache.crop(-GENERATED)

    work = 2 * operations(c, size.segment)
    floats = operations(c, 0) + 2 * c.num_heads * c.head_size * len(c.layers) * context
    return Subject(
        NAME, train, read, generate, GENERATED, TRAINING * work, work, (2 if bf16 else 4) * floats
    )


def operations(c: ModelConfig, length: int) -> float:
    """Multiply-adds per token of a document of this length, on average; its weights for 0."""
    inner, ffn = c.num_heads * c.head_size, 3 * c.width * (2 * c.ffn_width // 3)
    layer = 4 * c.width * inner + ffn + 2 * inner * (length + 1) / 2 * (length > 0)
    return len(c.layers) * layer + c.width * c.vocab_size


def nats(model: Any, tokens_BT: Tensor, past: Any = None) -> Tensor:
    """Of every token's successor in its row, the last one's being the first."""
    output = model.model(input_ids=tokens_BT, past_key_values=past, use_cache=past is not None)
    hidden_nD = output.last_hidden_state.flatten(0, 1)
    return linear_nats(hidden_nD, model.lm_head.weight, tokens_BT.roll(-1, 1).flatten(), 1.0)


@torch.inference_mode()
def read_whole(model: Any, c: ModelConfig, length: int) -> None:
    """A document in one piece, and its keys and values kept, to go on from."""
    from transformers import DynamicCache

    nats(model, random_tokens(c, 1, length), DynamicCache(config=model.config))


@torch.inference_mode()
def read_in_chunks(model: Any, c: ModelConfig, length: int, chunk: int) -> None:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for tokens_1T in random_tokens(c, 1, length).split(chunk, dim=1):
        nats(model, tokens_1T, cache)


def train_whole(model: Any, c: ModelConfig, rows: int, length: int) -> None:
    """One step on whole documents: no gradient is cut."""
    nats(model, random_tokens(c, rows, length)).sum().backward()
    model.zero_grad(set_to_none=True)


def filled_cache(model: Any, c: ModelConfig, context: int, bf16: bool) -> Any:
    """The cache that `generate` uses when it is asked for none, with random pairs in it."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        for layer in range(len(c.layers)):
            keys, values = torch.rand(2, 1, c.num_heads, context, c.head_size).to(
                torch.bfloat16 if bf16 else torch.float32
            )
            cache.update(keys, values, layer)
    return cache


Reader = Callable[[int], None]


def document_readers(c: ModelConfig, chunk: int) -> dict[str, Reader]:
    """The two ways in which full attention reads a document of some length."""
    model = make_llama(c)
    return {
        "one piece": lambda length: read_whole(model, c, length),
        "chunks": lambda length: read_in_chunks(model, c, length, chunk),
    }
