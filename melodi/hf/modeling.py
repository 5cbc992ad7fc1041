"""A core model as a transformers model: `generate`, `Trainer`, `pipeline` and the rest work on it.

- The weights are the core's own: `MelodiForCausalLM` holds a `LanguageModel` and adds nothing.
- The memory is the cache. Its size does not grow with what was read, and it cannot be cropped:
  what has been compressed is not taken back token by token.
- Token ids that come with a memory are always new ones. Transformers takes them for the whole
  history if they come with a mask of their own length, and would drop the first of them.
- Padding, wherever a mask says it is, is never read: rows are packed to the left before reading,
  and logits are put back in their places.

Shapes: B rows, T tokens, t tokens of a piece, K tokens whose logits are kept, n of these that are
in a piece, D width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import field
from typing import Any, Self

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from melodi.config import PRESETS, ModelConfig
from melodi.memory import MemoryState
from melodi.model import Embedding, LanguageModel
from melodi.reading import portions
from melodi.stream.reader import CHUNK_WINDOWS

REFUSED = ("inputs_embeds", "output_attentions", "output_hidden_states", "cu_seq_lens_q", "seq_idx")
IGNORED_LABEL = -100
"""What transformers writes where there is nothing to predict."""


def default_core() -> dict[str, Any]:
    return PRESETS["laptop-melodi"].to_dict()


@strict
class MelodiConfig(PreTrainedConfig):
    """Our `ModelConfig` as `core`, a part of its own: some of its fields (`top_k`) have names that
    transformers takes for settings of generation."""

    model_type = "melodi"
    keys_to_ignore_at_inference = ["past_key_values"]

    core: dict[str, Any] = field(default_factory=default_core)
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # In a file the layers are a list, and here too: a config equals what is saved of it.
        core = ModelConfig.from_dict(self.core).to_dict()
        self.core = {**core, "layers": list(core["layers"])}
        super().__post_init__(**kwargs)

    def core_config(self) -> ModelConfig:
        return ModelConfig.from_dict(self.core)

    @property
    def vocab_size(self) -> int:
        return int(self.core["vocab_size"])

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:
        self.core["vocab_size"] = value

    @property
    def hidden_size(self) -> int:
        return int(self.core["width"])

    @property
    def num_hidden_layers(self) -> int:
        return len(self.core["layers"])

    @property
    def num_attention_heads(self) -> int:
        return int(self.core["num_heads"])


class MemoryCache(Cache):
    """A `MemoryState` where transformers expects keys and values. Reading replaces `state`, which
    is a value: whoever keeps an earlier one can go on from there."""

    is_croppable = False
    is_compileable = False
    is_initialized = True

    def __init__(self, state: MemoryState) -> None:
        super().__init__(layers=[])
        self.state = state

    def __repr__(self) -> str:
        return f"MemoryCache(rows={self.batch_size}, tokens={self.get_seq_length()})"

    def __len__(self) -> int:
        return len(self.state.layers)

    @property
    def batch_size(self) -> int:
        return self.state.batch_size

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read, by the row that has read most: padding is not read."""
        return int(self.state.tokens_B.max())

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise ValueError("a MemoryCache takes no keys and values: only reading changes it")

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            f"the memory cannot take back {tokens_to_remove} tokens: what is compressed stays; "
            "keep an earlier `state`, or read again"
        )

    def reset(self) -> None:
        self.state = self.state.forget([True] * self.batch_size)

    def reorder_cache(self, beam_idx: Tensor | Sequence[int]) -> None:
        self.state = self.state.select(beam_idx)

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        self.state = self.state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.state = self.state.select(torch.arange(self.batch_size).repeat_interleave(repeats))


class MelodiForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = MelodiConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _is_stateful = True

    def __init__(self, config: MelodiConfig, core: LanguageModel | None = None) -> None:
        super().__init__(config)
        self.core = LanguageModel(config.core_config()) if core is None else core
        self.post_init()

    @classmethod
    def from_core(cls, core: LanguageModel) -> Self:
        """The same model with another coat: the weights are shared."""
        config = MelodiConfig(core=core.config.to_dict(), dtype=core.embedding.weight.dtype)
        return cls(config, core).train(core.training)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As in transformers, but weights that are not there are an error, not a random number."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        if info["missing_keys"]:
            missing = sorted(info["missing_keys"])
            raise ValueError(
                f"{args[0] if args else 'the folder'} lacks {len(missing)} weights, {missing[0]!r} "
                "the first: it is damaged, or its config.json belongs to another model"
            )
        return (model, info) if output_loading_info else model

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits for the token after each; the last `logits_to_keep` of them, all when 0.

        Labels are shifted here, as everywhere in transformers. The loss has the layer kinds' own
        losses in it only while training.
        """
        for name in REFUSED:
            if kwargs.get(name) is not None and kwargs[name] is not False:
                raise ValueError(f"{name} is not supported by {type(self).__name__}: leave it out")
        if input_ids is None:
            raise ValueError(f"input_ids=None: {type(self).__name__} reads token ids")
        memory = self._memory(past_key_values, len(input_ids))
        real_BT = real_tokens(attention_mask, input_ids)
        check_not_packed(kwargs.pop("position_ids", None), real_BT)
        place_BT = torch.where(real_BT, real_BT.cumsum(1) - 1, -1)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_BKD, state, extra_loss = self._read(input_ids, real_BT, place_BT[:, keep], memory)
        logits_BKV = self.core.logits(hidden_BKD)
        loss = None
        if labels is not None:
            # Where padding stands, nothing was predicted: not the first token of a row either.
            seen_BT = F.pad(real_BT, (1, -1), value=True)
            labels = labels.masked_fill(~(seen_BT & real_BT), IGNORED_LABEL)
            loss = self.loss_function(logits_BKV, labels, self.config.vocab_size, **kwargs)
            if extra_loss is not None and self.training:
                # Of accumulated batches each adds its share, as it does to the cross-entropy.
                of_all = kwargs.get("num_items_in_batch")
                shifted = kwargs.get("shift_labels")
                targets = labels[:, 1:] if shifted is None else shifted
                share = 1 if of_all is None else (targets != IGNORED_LABEL).sum() / of_all
                loss = loss + share * extra_loss
        if self.config.use_cache if use_cache is None else use_cache:
            memory.state = state
            return CausalLMOutputWithPast(loss=loss, logits=logits_BKV, past_key_values=memory)
        return CausalLMOutputWithPast(loss=loss, logits=logits_BKV)

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. With `past_key_values`, a `MemoryCache`, the ids are new tokens, and
        so is their mask."""
        memory: Any = kwargs.get("past_key_values")
        mask: Any = kwargs.get("attention_mask")
        ids = kwargs.get("input_ids") if inputs is None else inputs
        if isinstance(ids, Tensor) and mask is None:
            kwargs["attention_mask"] = mask = torch.ones_like(ids)
        given = isinstance(ids, Tensor) and isinstance(mask, Tensor) and ids.shape == mask.shape
        if given and isinstance(memory, MemoryCache):
            # A mask that is longer than the ids tells transformers that they are new ones; it cuts
            # the mask by the tokens read, which matters only where there is padding.
            before = 1 if bool(mask.all()) else memory.get_seq_length()
            kwargs["attention_mask"] = F.pad(mask, (before, 0), value=1)
        return super().generate(inputs, *args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        return self.core.embedding

    def set_input_embeddings(self, value: Embedding) -> None:
        self.core.embedding = value

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        embedding = super().resize_token_embeddings(*args, **kwargs)
        self.core.config = self.config.core_config()
        return embedding

    @property
    def gradient_checkpointing(self) -> bool:
        return self.core.checkpoint_windows

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self.core.checkpoint_windows = value

    def _init_weights(self, module: nn.Module) -> None:
        """The core has made its weights itself; only a table that is to replace its own is new."""
        if isinstance(module, nn.Embedding) and module is not self.core.embedding:
            init.normal_(module.weight, std=self.core.embedding.std)

    def _memory(self, cache: Cache | None, rows: int) -> MemoryCache:
        """The memory to read on from; an empty cache of transformers' own is replaced."""
        if isinstance(cache, MemoryCache):
            if cache.batch_size != rows:
                raise ValueError(
                    f"the memory has {cache.batch_size} rows and the tokens have {rows}: use "
                    "batch_repeat_interleave for beams and several answers, or batch_select_indices"
                )
            return cache
        if cache is None or int(cache.get_seq_length()) == 0:
            return MemoryCache(self.core.empty_state(rows))
        raise ValueError(f"past_key_values is a filled {type(cache).__name__}: give a MemoryCache")

    def _read(
        self, tokens_BT: Tensor, real_BT: Tensor, place_BK: Tensor, memory: MemoryCache
    ) -> tuple[Tensor, MemoryState, Tensor | None]:
        """Reads what is real, without a gradient in pieces of some windows, so that a prompt of any
        length takes the same room. Of the hidden vectors only those at `place_BK`, counted in real
        tokens, are kept; those of padding, at -1, are zero."""
        lengths_B, state, extra_loss = real_BT.sum(1).cpu(), memory.state, None
        if not real_BT.all():
            order_BT = (~real_BT).int().argsort(dim=1, stable=True)
            tokens_BT = tokens_BT.gather(1, order_BT)
        longest, place = int(lengths_B.max()), int(state.open_B.max())
        cuts = [slice(0, longest)]
        if not torch.is_grad_enabled():
            cuts = list(portions(longest, place, self.core.config.window, CHUNK_WINDOWS))
        x_BKD = self.core.embedding.weight.new_zeros(*place_BK.shape, self.config.hidden_size)
        for cut in cuts:
            lengths = (lengths_B - cut.start).clamp(0, cut.stop - cut.start)
            x_BtD, state, extra_loss = self.core.hidden(tokens_BT[:, cut], state, lengths)
            row_n, column_n = ((place_BK >= cut.start) & (place_BK < cut.stop)).nonzero(
                as_tuple=True
            )
            x_BKD = x_BKD.to(x_BtD.dtype)
            x_BKD[row_n, column_n] = x_BtD[row_n, place_BK[row_n, column_n] - cut.start]
        return x_BKD, state, extra_loss


def real_tokens(mask: Tensor | None, tokens_BT: Tensor) -> Tensor:
    """Which tokens are no padding. A mask may also cover tokens that were read before."""
    if mask is None:
        return torch.ones_like(tokens_BT, dtype=torch.bool)
    rows, length = tokens_BT.shape
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.size(1) < length:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask {shape} must be a tensor of shape {rows, length}, or longer by the "
            "tokens read before; if cache_implementation was given, leave that out"
        )
    return mask[:, mask.size(1) - length :].bool()


def check_not_packed(position_BT: Tensor | None, real_BT: Tensor) -> None:
    """Positions that begin again inside a row are several documents in it, which would be read as
    one."""
    if position_BT is None or position_BT.shape != real_BT.shape:
        return
    falls_BT = (position_BT.diff(dim=1) < 0) & real_BT[:, 1:] & real_BT[:, :-1]
    if falls_BT.any():
        raise ValueError(
            "position_ids begin again inside a row: packed documents are not supported, give each "
            "a row of its own"
        )


AutoConfig.register("melodi", MelodiConfig)
AutoModelForCausalLM.register(MelodiConfig, MelodiForCausalLM)
