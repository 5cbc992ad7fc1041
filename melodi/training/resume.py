"""What a run must share with the one that it continues: all that its result depends on."""

import dataclasses
from dataclasses import replace

from melodi.config import ModelConfig
from melodi.config.training import TrainConfig
from melodi.data.store import TokenStore
from melodi.run import Run, check_documents, check_store


def continued(
    run: Run, model: ModelConfig, wanted: TrainConfig, store: TokenStore, preset: str | None = None
) -> TrainConfig:
    """The config with which the run goes on; anything that would change its result is refused."""
    own_model, own_train, data = run.configs()
    check_store(store, data["tokenizer_digest"])
    check_documents(store, data)
    own_preset = run.read_config().get("preset")
    if None not in (preset, own_preset) and preset != own_preset:
        raise ValueError(
            f"--preset {preset} differs from the run's {own_preset}: resume without it, or begin "
            "a new run"
        )
    if model != own_model:
        raise ValueError(
            f"the model differs from that of {run.folder}: resume without --model flags, or begin "
            "a new run"
        )
    return extended(own_train, wanted)


def extended(ours: TrainConfig, wanted: TrainConfig) -> TrainConfig:
    """The config of a run that goes on: only the steps may change, and only within the schedule."""
    horizon = ours.horizon or ours.steps
    if wanted.steps > horizon:
        raise ValueError(
            f"--steps {wanted.steps} goes beyond the schedule of this run, which ends at step "
            f"{horizon}: a run of {wanted.steps} steps would have had other learning rates from "
            f"the start; begin a new one, with --horizon if it is to stop on the way"
        )
    if wanted.precision == "auto":  # was found out when the run began
        wanted = replace(wanted, precision=ours.precision)
    wanted = replace(wanted, horizon=horizon)
    for field in dataclasses.fields(TrainConfig):
        before, after = (
            getattr(config, field.name) for config in (replace(ours, horizon=horizon), wanted)
        )
        if before != after and field.name != "steps":
            raise ValueError(
                f"{field.name}={after} differs from the run's {before}: resume without it, or "
                "begin a new run"
            )
    return wanted


def check_vocabulary(model: ModelConfig, store: TokenStore) -> None:
    if model.vocab_size < store.vocab_size:
        raise ValueError(
            f"vocab_size={model.vocab_size} is too small for store {store.path}, which has "
            f"{store.vocab_size} tokens: set it to {store.vocab_size}"
        )
