"""Validation during training: whole documents, shared out over the processes, in the precision of
the run."""

from torch import nn

from melodi.config.training import TrainConfig
from melodi.data.store import Documents
from melodi.evaluation.documents import Evaluation, choose, evaluate
from melodi.evaluation.probes import memory_shares
from melodi.model import LanguageModel
from melodi.precision import autocast
from melodi.training.distributed import Processes

SHARE_WINDOWS = 16
"""Windows of a validation document over which attention to memory is measured."""


def validate(
    model: LanguageModel,
    forward: nn.Module,
    documents: Documents,
    config: TrainConfig,
    group: Processes,
) -> Evaluation:
    """The sums over all processes, which read their own rows of the same documents."""
    chosen = choose(documents, config.validation_tokens)
    if not chosen:
        return Evaluation()
    rows = -(-min(len(chosen), 8) // group.world) * group.world
    with autocast(config.precision, group.device):
        result = evaluate(
            model,
            documents,
            chosen,
            rows=rows,
            segment_windows=config.segment_windows,
            nats=forward,
            mine=group.share(rows),
        )
    return Evaluation.from_array(group.total(*result.to_array()))


def attention_to_memory(
    model: LanguageModel, forward: nn.Module, documents: Documents, config: TrainConfig
) -> dict[str, float]:
    """The share of attention that the first validation document spends on its past."""
    first = choose(documents, config.validation_tokens)[0]
    sample = documents[first][: SHARE_WINDOWS * model.config.window]
    with autocast(config.precision, model.embedding.weight.device):
        return memory_shares(model, sample, forward)
