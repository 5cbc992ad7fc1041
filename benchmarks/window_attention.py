"""Which attention is fastest inside a window here: the one the model uses, torch's other kernels,
or FlexAttention, which looks the position bias up inside its kernel.

    python benchmarks/window_attention.py [PRESET] [ROWS] [SECONDS]   # paper-melodi-s128-l64, 4, 20

Queries are [x; u], keys [z; x; u], as in a full window whose memory is filled; the bias has a
gradient. On a GPU in bfloat16, forward and backward; on a CPU in float32, and FlexAttention, which
has no backward pass there, in the forward pass alone. Ratios are medians over rounds in turn.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from melodi.bench.measure import Task, interleave, rate, ratio
from melodi.config import PRESETS, ModelConfig
from melodi.layers.transformer import RelativePositionBias, attend, masked

Attention = Callable[[], Tensor]
USED = "used by the model"


class FullWindow:
    """The attention of one full window, in several ways; B rows, H heads, t queries, k keys.

    The bias is looked up once, as for all windows of a segment; hiding keys is part of each way.
    """

    def __init__(self, config: ModelConfig, rows: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        past, queries = config.short_term_tokens, config.window + config.write_tokens
        keys = past + queries

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, self.dtype).requires_grad_()

        sizes = [(rows, config.num_heads, n, config.head_size) for n in (queries, keys, keys)]
        self.qkv = [leaf(torch.randn(size)) for size in sizes]
        place = torch.arange(keys)
        distance_tk = place[past:, None] - place
        tables = RelativePositionBias(config, [0])
        self.bias_1Htk = leaf(tables([0], distance_tk[None])[0])
        self.visible_11tk = (distance_tk >= 0)[None, None].to(device)
        self.bias_Hk = leaf(tables.by_distance([0], keys)[0])
        self.farthest, self.past = keys - 1, past
        self.block_mask = create_block_mask(
            lambda b, h, q, k: q + past >= k, None, None, queries, keys, device
        )
        self.compiled = torch.compile(flex_attention, dynamic=False)

    def inputs(self, bias: Tensor) -> list[Tensor]:
        """Queries, keys, values and bias, asking for a gradient where one is computed."""
        inputs = [*self.qkv, bias]
        return inputs if torch.is_grad_enabled() else [tensor.detach() for tensor in inputs]

    def used(self) -> Tensor:
        return attend(*self.inputs(self.bias_1Htk), self.visible_11tk)

    def by(self, backend: SDPBackend) -> Attention:
        def fused() -> Tensor:
            *qkv, bias_1Htk = self.inputs(self.bias_1Htk)
            mask_1Htk = masked(bias_1Htk, self.visible_11tk)
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*qkv, attn_mask=mask_1Htk, scale=1.0)

        return fused

    def flex(self) -> Tensor:
        *qkv, bias_Hk = self.inputs(self.bias_Hk)

        def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + bias_Hk[h, self.farthest - (q + self.past - k).clamp(min=0)]

        return self.compiled(*qkv, biased, self.block_mask, scale=1.0)

    def ways(self) -> dict[str, Attention]:
        found: dict[str, Attention] = {USED: self.used, "torch, math": self.by(SDPBackend.MATH)}
        if self.device.type == "cuda":
            found["torch, memory-efficient"] = self.by(SDPBackend.EFFICIENT_ATTENTION)
        return found

    def task(self, name: str, way: Attention, backward: bool) -> Task:
        def run() -> None:
            if backward:
                way().float().square().sum().backward()
            else:
                with torch.no_grad():
                    way()
            if self.device.type == "cuda":
                torch.cuda.synchronize()

        run()
        return Task(name, "backward" if backward else "forward", rate(run, 1))


def main(preset: str = "paper-melodi-s128-l64", rows: str = "4", seconds: str = "20") -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    window = FullWindow(PRESETS[preset], int(rows), device)
    ways = window.ways()
    with torch.no_grad():
        expected, found = window.used().float(), window.flex().float()
    print(f"{preset}, {rows} rows, {device.type}, {window.dtype}")
    print(f"FlexAttention differs by at most {(expected - found).abs().max():.1e}")
    for backward in (False, True):
        chosen = dict(ways)
        if device.type == "cuda" or not backward:
            chosen["FlexAttention"] = window.flex
        tasks = [window.task(name, way, backward) for name, way in chosen.items()]
        samples = {
            task.name: values for task, values in interleave(tasks, float(seconds), print, "")
        }
        print("forward and backward" if backward else "forward", "(speed to the one used)")
        for name, values in samples.items():
            gain = ratio(values, samples[USED])
            print(f"{name:>26}  {gain.median:.2f} ({gain.low:.2f} to {gain.high:.2f})")


if __name__ == "__main__":
    main(*sys.argv[1:])
