"""AutoCompressor (Chevalier et al. 2023): summaries of all windows, read again in every window.

- A window is [σ; x; s], causal throughout. s is one learned table, the same in every window; its
  vectors after the last layer and the final norm are the window's summary: σ' = [σ; N(u)].
- All of σ runs through the stack again in every window. Only slots that some row has filled run.
- Theirs grows with the document; ours is bounded: σ is a FIFO of Q windows. It starts empty.

As RMT, with two differences: write tokens start from the table, and memory is appended to instead
of replaced. Shapes as in frame.py; S summary tokens per window, M = S·Q slots.
"""

from torch import Tensor, nn

from melodi.config import ModelConfig
from melodi.layers.fifo import append
from melodi.layers.frame import Layer, Stream, WindowPart
from melodi.layers.rmt import RMTLayer, TokenMemory


class AutoCompressorLayer(RMTLayer):
    """A layer that summary tokens run through: those of earlier windows before this one, those that
    write behind it."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, index)
        self.entries_per_window = config.long_term_tokens

    def begin(
        self, x_BtD: Tensor, table_SD: Tensor | None, memory: TokenMemory, part: WindowPart
    ) -> Stream:
        stream = Layer.begin(self, x_BtD, table_SD, memory, part)
        filled = min(part.most_windows * self.config.long_term_tokens, self.past_slots)
        if not part.opens or not filled:
            return stream
        return stream._replace(r_BPD=memory.tokens_BMD[:, -filled:])

    def end(
        self, u_BSD: Tensor, final_norm: nn.Module, memory: TokenMemory, part: WindowPart
    ) -> TokenMemory:
        return TokenMemory(append(memory.tokens_BMD, final_norm(u_BSD), 1, part))
