"""The Hugging Face coat: what transformers does with it is what the core would have done."""

import contextlib
import copy
import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import make_store, start
from torch import Tensor
from zoo import KINDS, VOCAB, WINDOW, ZOO, cases, make, random_tokens

from melodi import LanguageModel, MemoryState, ModelConfig, load
from melodi.cli import main
from melodi.config import PRESETS
from melodi.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, train_tokenizer
from melodi.files import write_json

transformers = pytest.importorskip("transformers")

from melodi.hf import MelodiConfig, MelodiForCausalLM, MemoryCache  # noqa: E402
from melodi.hf.export import export, tokenizer_for  # noqa: E402

NEW = 3 * WINDOW + 2
"""Tokens that are generated: three edges of windows are passed."""
TOLERANCE = dict(rtol=0, atol=1e-10)
SINGLE = dict(rtol=0, atol=1e-5)
"""`generate` gives its logits in float32."""
MELODI = ZOO["melodi-default"]
DEFAULT = {name: ZOO[f"{name}-default"] for name in KINDS}
NOISE = 9 * torch.randn(NEW, VOCAB, generator=torch.Generator().manual_seed(1))


class Varied(transformers.LogitsProcessor):
    """Adds fixed noise: random tied models would say the same token for ever."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + NOISE[input_ids.size(1) - self.prompt]


class Chained(transformers.LogitsProcessor):
    """Adds noise by the last token, so that beams differ and overtake each other."""

    noise = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return (scores / 3 + 2 * self.noise[input_ids[:, -1]]).log_softmax(-1)


def wrapped(config: ModelConfig) -> MelodiForCausalLM:
    return MelodiForCausalLM.from_core(make(config))


def check_greedy(core: LanguageModel, ids: Tensor, noisy: bool = True) -> Tensor:
    """Each of the last NEW ids is what the core, reading all before it at once, finds most likely;
    so a loop of whole passes would have said them all. Gives the logits."""
    with torch.no_grad():
        logits = core(ids[:, :-1], core.empty_state(len(ids)))[0][:, -NEW:]
    scores = logits + NOISE[:NEW] if noisy else logits
    assert torch.equal(scores.argmax(-1), ids[:, -NEW:])
    return logits


def slow(core: LanguageModel, ids: Tensor, count: int) -> Tensor:
    """Greedy decoding by whole passes over everything so far."""
    for _ in range(count):
        logits = core(ids, core.empty_state(len(ids)))[0][:, -1:]
        ids = torch.cat([ids, logits.argmax(-1)], dim=1)
    return ids


def varied(prompt: Tensor) -> dict[str, Any]:
    processors = transformers.LogitsProcessorList([Varied(prompt.size(1))])
    return dict(do_sample=False, logits_processor=processors, max_new_tokens=NEW)


def padded(rows: list[Tensor], side: str) -> dict[str, Tensor]:
    """Rows of different lengths and their mask; padding is a token like any other."""
    longest = max(map(len, rows))
    ids, mask = torch.full((len(rows), longest), 7), torch.zeros(len(rows), longest).long()
    for i, row in enumerate(rows):
        place = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[i, place], mask[i, place] = row, 1
    return dict(input_ids=ids, attention_mask=mask)


def ragged(*lengths: int) -> list[Tensor]:
    return [random_tokens(length, seed=i) for i, length in enumerate(lengths)]


def test_the_tested_transformers() -> None:
    """The coat is written against these versions, whose inner workings it relies on: widen the
    range only with this file green on the new one."""
    lowest, highest = (5, 20), (5, 24)
    major, minor = map(int, transformers.__version__.split(".")[:2])
    assert lowest <= (major, minor) < highest
    pyproject = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert 'hf = ["transformers>=5.20,<5.24"' in pyproject
    assert any(r.startswith("tokenizers") for r in requires("transformers") or ())


def test_the_core_does_without() -> None:
    """No module of ours but the coat imports transformers, nor does the command that calls it
    before it is called."""
    code = (
        "import sys, melodi.run, melodi.stream, melodi.evaluation.record, melodi.training.trainer; "
        "import melodi.meliad, melodi.cli.export; "
        "assert not {'transformers', 'accelerate'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_transformers_one_line(tmp_path: Path) -> None:
    """Where transformers is missing, the command says what to install, in one line."""
    code = (
        "import sys; sys.modules['transformers'] = None; "
        f"from melodi.cli import main; main(['export', 'run', {str(tmp_path / 'out')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install '.[hf]'" in done.stderr


@cases(ZOO)
def test_greedy_equals_whole_passes(config: ModelConfig) -> None:
    """`generate` says what the core says when it reads everything anew for each token, with the
    same logits, over three edges of windows."""
    model, prompt = wrapped(config), random_tokens(2, 4)
    check_greedy(model.core, model.generate(prompt, do_sample=False, max_new_tokens=NEW), False)
    how = dict(output_logits=True, return_dict_in_generate=True)
    out = model.generate(prompt, **varied(prompt), **how)
    logits = check_greedy(model.core, out.sequences)
    assert len(out.sequences[0].unique()) > 5
    torch.testing.assert_close(torch.stack(out.logits, 1), logits.float(), **SINGLE)


@cases(DEFAULT)
def test_padding_is_never_read(config: ModelConfig) -> None:
    """In a batch padded on the left, some prompts longer than a window, each row is continued as
    it is alone."""
    model, rows = wrapped(config), ragged(3, 2 * WINDOW + 1, WINDOW)
    batch = padded(rows, "left")
    together = model.generate(**batch, **varied(batch["input_ids"]))
    for row, ids in zip(rows, together, strict=True):
        check_greedy(model.core, ids[None, -NEW - len(row) :])


@pytest.mark.parametrize("how", [{"use_cache": False}, {"prefill_chunk_size": 4}], ids=str)
def test_padding_in_other_ways_of_reading(how: dict[str, Any]) -> None:
    """The same where everything is read anew for each token, and where the prompt is read in odd
    pieces, some of which are all padding."""
    model, rows = wrapped(MELODI), ragged(3, 2 * WINDOW + 1, WINDOW)
    batch = padded(rows, "left")
    together = model.generate(**batch, **varied(batch["input_ids"]), **how)
    for row, ids in zip(rows, together, strict=True):
        check_greedy(model.core, ids[None, -NEW - len(row) :])


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_and_loss_beside_padding(side: str) -> None:
    """Wherever padding is, logits and loss are those of each row alone, and padding has none."""
    model, rows = wrapped(MELODI), ragged(3, 2 * WINDOW + 1, WINDOW)
    batch = padded(rows, side)
    out = model(**batch, labels=batch["input_ids"])
    real = batch["attention_mask"].bool()
    nats = 0.0
    for i, row in enumerate(rows):
        alone = model(row[None])
        torch.testing.assert_close(out.logits[i, real[i]], alone.logits[0], **TOLERANCE)
        nats += model.core.nats(
            row[None, :-1], row[None, 1:], model.core.empty_state(1)
        ).nats_BT.sum()
        state = out.past_key_values.state.select([i])
        again = model.core(row[None, :1], state)[0]
        torch.testing.assert_close(
            again, model(row[None, :1], past_key_values=alone.past_key_values).logits, **TOLERANCE
        )
    assert not out.logits[~real].any()
    torch.testing.assert_close(
        out.loss.double(), nats / (sum(map(len, rows)) - len(rows)), **SINGLE
    )


@cases(DEFAULT)
def test_any_cut_with_a_cache(config: ModelConfig) -> None:
    """Reading in two calls equals reading at once, wherever the cut is, with a mask of the new
    tokens or of all, and whatever part of the logits is kept."""
    model, tokens = wrapped(config), random_tokens(2, 3 * WINDOW + 1)
    whole = model(tokens).logits
    for cut in (1, WINDOW, 2 * WINDOW + 3):
        cache = model(tokens[:, :cut], past_key_values=transformers.DynamicCache()).past_key_values
        assert isinstance(cache, MemoryCache)
        assert cache.get_seq_length() == cut
        mask = torch.ones_like(tokens)
        last = model(tokens[:, cut:], past_key_values=cache, attention_mask=mask, logits_to_keep=2)
        assert last.past_key_values is cache
        torch.testing.assert_close(last.logits, whole[:, -2:], **TOLERANCE)
    chosen = torch.tensor([0, WINDOW, 2])
    torch.testing.assert_close(model(tokens, logits_to_keep=chosen).logits, whole[:, chosen])


def test_returned_tuples_and_caches() -> None:
    """`return_dict=False` gives a tuple; without `use_cache` no memory comes back, and one that was
    given stays as it was."""
    model, tokens = wrapped(MELODI), random_tokens(1, 5)
    cache = model(tokens).past_key_values
    logits = model(tokens, past_key_values=cache, use_cache=False)
    assert logits.past_key_values is None
    assert cache.get_seq_length() == 5
    assert torch.equal(model(tokens, past_key_values=cache, return_dict=False)[0], logits.logits)
    assert cache.get_seq_length() == 10


def continued(model: MelodiForCausalLM, memory: MemoryCache, ids: Tensor, **how: Any) -> Tensor:
    return model.generate(ids, past_key_values=memory, **varied(ids), **how)


@cases(DEFAULT)
def test_going_on_from_a_returned_memory(config: ModelConfig) -> None:
    """A memory that `generate` returned is continued with new tokens, however their mask is given,
    without losing one of them; a copy of it can be continued again."""
    model, prompt, more = wrapped(config), random_tokens(2, 9), random_tokens(2, 12, seed=1)
    out = model.generate(prompt, **varied(prompt), return_dict_in_generate=True)
    read = 9 + NEW - 1  # the last token has been said and not read
    assert out.past_key_values.get_seq_length() == read
    new = torch.cat([out.sequences[:, -1:], more], dim=1)
    history = torch.cat([out.sequences, more], dim=1)
    expected = continued(model, copy.deepcopy(out.past_key_values), new)
    check_greedy(model.core, torch.cat([history, expected[:, new.size(1) :]], dim=1))
    ones = torch.ones_like(new)
    for how in (
        {"attention_mask": ones},
        {"attention_mask": torch.ones_like(history)},
        {"attention_mask": ones, "prefill_chunk_size": 5},
        {"prefill_chunk_size": 5},
    ):
        assert torch.equal(
            continued(model, copy.deepcopy(out.past_key_values), new, **how), expected
        )
    assert out.past_key_values.get_seq_length() == read


@torch.no_grad()
def test_going_on_with_padding() -> None:
    """New tokens of different lengths go on from one memory each, padded on the left."""
    model, prompt, rows = wrapped(MELODI), random_tokens(2, 9), ragged(3, WINDOW + 2)
    memory = model(prompt).past_key_values
    batch = padded(rows, "left")
    for how in ({}, {"prefill_chunk_size": 3}):
        ids = continued(
            model, copy.deepcopy(memory), batch["input_ids"], **batch_mask(batch), **how
        )
        for i, row in enumerate(rows):
            check_greedy(model.core, torch.cat([prompt[i], ids[i, -NEW - len(row) :]])[None])


def batch_mask(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"attention_mask": batch["attention_mask"]}


@cases(DEFAULT)
def test_beams_take_their_memory_along(config: ModelConfig) -> None:
    """Beam search with the memory says what beam search without a cache says, scores and all."""
    model, batch = wrapped(config), padded(ragged(3, WINDOW + 2), "left")
    how = dict(
        num_beams=3, num_return_sequences=2, max_new_tokens=NEW, do_sample=False,
        logits_processor=transformers.LogitsProcessorList([Chained()]),
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    ours = model.generate(**batch, **how)
    anew = model.generate(**batch, **how, use_cache=False)
    assert torch.equal(ours.sequences, anew.sequences)
    torch.testing.assert_close(ours.sequences_scores, anew.sequences_scores, **SINGLE)
    assert (ours.beam_indices != ours.beam_indices[:, :1]).any(), "no beam ever changed its row"


@torch.no_grad()
def test_the_cache_is_a_state() -> None:
    """Rows of the cache are reordered, repeated, chosen and forgotten as those of the state."""
    model, tokens = wrapped(MELODI), random_tokens(3, WINDOW + 2)
    cache, more = model(tokens).past_key_values, random_tokens(1, WINDOW, seed=1)
    before = cache.state

    def after() -> Tensor:
        return model(more.expand(cache.batch_size, -1), past_key_values=copy.deepcopy(cache)).logits

    expected = after()
    for change, rows in (
        (lambda: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda: cache.batch_select_indices(torch.tensor([1])), [1]),
    ):
        cache.state = before
        change()
        torch.testing.assert_close(after(), expected[rows], **TOLERANCE)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(after(), model(more).logits, **TOLERANCE)


def test_the_cache_does_not_grow() -> None:
    """The memory after a hundred windows has the floats that it has after three."""
    model = wrapped(MELODI)
    few = model(random_tokens(1, 3 * WINDOW + 1), logits_to_keep=1).past_key_values.state
    with torch.no_grad():
        many = model(random_tokens(1, 100 * WINDOW + 1), logits_to_keep=1).past_key_values.state

    def floats(state: MemoryState) -> int:
        tensors = [*state.layers, *(state.open_window or ())]
        return sum(tensor.numel() for memory in tensors for tensor in memory)

    assert floats(few) == floats(many)


def test_long_prompts_take_constant_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of many windows is read in pieces of sixteen, and one row of logits is made of it;
    with the memory inside a window that is filled first."""
    model, prompt = wrapped(MELODI), random_tokens(1, 40 * WINDOW + 3)
    pieces: list[int] = []
    hidden, logits = model.core.hidden, model.core.logits

    def counted(tokens: Tensor, *args: Any) -> Any:
        pieces.append(tokens.size(1))
        return hidden(tokens, *args)

    def one(x_BKD: Tensor) -> Tensor:
        assert x_BKD.size(1) == 1
        return logits(x_BKD)

    expected = slow(model.core, prompt, 3)
    monkeypatch.setattr(model.core, "hidden", counted)
    monkeypatch.setattr(model.core, "logits", one)
    assert torch.equal(model.generate(prompt, do_sample=False, max_new_tokens=3), expected)
    assert pieces == [96, 96, 48, 3, 1, 1]
    memory = MemoryCache(model.core.empty_state(1))
    pieces.clear()
    with torch.no_grad():
        model(prompt[:, :2], past_key_values=memory, logits_to_keep=1)
        model(prompt[:, 2:], past_key_values=memory, logits_to_keep=1)
    assert pieces == [2, 4, 96, 96, 42, 3]


def test_sampling_and_streaming() -> None:
    """Sampling with a seed repeats itself; several answers to a prompt are independent; a streamer
    sees what is returned."""
    model, prompt = wrapped(MELODI), random_tokens(1, 4)
    how = dict(do_sample=True, top_k=5, temperature=2.0, num_return_sequences=3, max_new_tokens=NEW)
    answers = []
    for _ in range(2):
        torch.manual_seed(0)
        answers.append(model.generate(prompt, **how))
    assert torch.equal(*answers)
    assert len(answers[0].unique(dim=0)) == 3

    class Seen(transformers.generation.streamers.BaseStreamer):
        ids: list[int] = []

        def put(self, value: Tensor) -> None:
            self.ids += value.flatten().tolist()

        def end(self) -> None: ...

    out = model.generate(prompt, do_sample=False, max_new_tokens=5, streamer=Seen())
    assert out[0].tolist() == Seen.ids


def test_what_cannot_be_is_refused() -> None:
    """One line with the value and the cure."""
    model, tokens = wrapped(MELODI), random_tokens(2, 5)
    memory = model(tokens).past_key_values
    filled = transformers.DynamicCache()
    filled.update(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4), 0)
    for call, words in (
        (lambda: memory.crop(1), "cannot take back 1 tokens"),
        (lambda: memory.update(tokens, tokens, 0), "takes no keys and values"),
        (lambda: model(tokens[:1], past_key_values=memory), "has 2 rows and the tokens have 1"),
        (lambda: model(tokens, past_key_values=filled), "filled DynamicCache"),
        (lambda: model(), "input_ids=None"),
        (lambda: model(tokens, inputs_embeds=tokens), "inputs_embeds is not supported"),
        (lambda: model(tokens, output_attentions=True), "output_attentions is not supported"),
        (lambda: model(tokens, attention_mask=tokens[:, 1:]), "attention_mask (2, 4)"),
        (
            lambda: model(tokens, attention_mask=torch.ones(2, 1, 5, 5)),
            "attention_mask (2, 1, 5, 5)",
        ),
        (
            lambda: model.generate(tokens, num_beams=2, past_key_values=memory),
            "batch_repeat_interl",
        ),
        (lambda: model.generate(tokens[:1], assistant_model=model), "stateful"),
        (lambda: MelodiConfig(core={"width": 3, "depth": 4}), "depth"),
    ):
        with pytest.raises((ValueError, TypeError), match=re.escape(words)) as error:
            call()
        assert "\n" not in str(error.value)


@cases(DEFAULT)
def test_saved_and_loaded(config: ModelConfig, tmp_path: Path) -> None:
    """A saved model comes back through the auto classes, bit for bit, in its type, and continues
    the memory of the one that was saved; each weight is saved once."""
    model, tokens = wrapped(config), random_tokens(1, 2 * WINDOW + 1)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is MelodiForCausalLM
    assert again.core.config == config
    assert transformers.AutoConfig.from_pretrained(tmp_path).core == model.config.core
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert sum(tensor.numel() for tensor in ours.values()) == model.core.num_parameters
    memory = model(tokens).past_key_values
    memory.state.save(tmp_path / "memory")
    loaded = MemoryCache(MemoryState.load(tmp_path / "memory"))
    next_logits = [
        one(tokens, past_key_values=cache).logits
        for one, cache in ((model, memory), (again, loaded))
    ]
    torch.testing.assert_close(*next_logits, **TOLERANCE)


def test_a_new_model_is_a_new_core() -> None:
    """A model made from a config has the core's own first weights, not transformers'."""
    torch.manual_seed(0)
    core = LanguageModel(PRESETS["laptop-melodi"])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MelodiConfig())
    for name, tensor in core.state_dict().items():
        assert torch.equal(tensor, model.core.state_dict()[name]), name
    assert MelodiConfig().num_hidden_layers == len(core.config.layers)


def test_weights_are_shared() -> None:
    """`from_core` copies nothing, and keeps the core's mode."""
    core = make(MELODI).train()
    model = MelodiForCausalLM.from_core(core)
    assert model.core is core
    assert model.training
    assert model.get_input_embeddings() is core.embedding
    assert model.get_output_embeddings() is None


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    """A checkpoint that lacks a weight is an error, not a model with random numbers in it."""
    model = wrapped(MELODI)
    tensors = model.state_dict()
    del tensors[
        "core.final_norm.scale" if "core.final_norm.scale" in tensors else list(tensors)[-1]
    ]
    model.save_pretrained(tmp_path, state_dict=tensors)
    with pytest.raises(ValueError, match="lacks 1 weights"):
        MelodiForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["melodi", "compressive-convolution"])
def test_the_loss_is_the_cores(kind: str) -> None:
    """Labels are shifted, -100 is ignored, and `num_items_in_batch` divides; loss and gradients are
    the core's, with the layers' own losses while training and without them otherwise."""
    model, tokens = wrapped(replace(KINDS[kind], dropout=0.0)), random_tokens(2, 3 * WINDOW)
    targets = tokens[:, 1:].clone()
    targets[0, :5] = -1
    labels = torch.cat([tokens[:, :1], targets], dim=1)
    labels[labels == -1] = -100
    scored = model.core.nats(tokens[:, :-1], targets, model.core.empty_state(2))
    count = (targets >= 0).sum()
    mean = scored.nats_BT.sum() / count
    torch.testing.assert_close(model(tokens, labels=labels).loss.double(), mean, **SINGLE)
    twice = model(tokens, labels=labels, num_items_in_batch=2 * count).loss
    torch.testing.assert_close(2 * twice.double(), mean, **SINGLE)
    model.train()
    expected, _ = model.core.loss(tokens[:, :-1], targets, model.core.empty_state(2))
    (expected_gradient,) = torch.autograd.grad(expected, model.core.embedding.weight)
    # The last token has no target, and is left out of the reading that is compared.
    shifted = torch.cat([labels[:, 1:]], dim=1)
    loss = model(tokens[:, :-1], labels=tokens[:, :-1], shift_labels=shifted).loss
    (gradient,) = torch.autograd.grad(loss, model.core.embedding.weight)
    torch.testing.assert_close(loss.double(), expected, **SINGLE)
    torch.testing.assert_close(gradient, expected_gradient, **SINGLE)
    # Of two accumulated batches each adds half, of the layers' own losses too.
    half = dict(shift_labels=shifted, num_items_in_batch=2 * count)
    halved = model(tokens[:, :-1], labels=tokens[:, :-1], **half).loss
    torch.testing.assert_close(2 * halved, loss, **SINGLE)


def test_windows_computed_again() -> None:
    """`gradient_checkpointing_enable` switches the core's own; the gradient stays."""
    model, tokens = wrapped(MELODI).train(), random_tokens(2, 2 * WINDOW)
    gradients = []
    for switch in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        switch()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        gradients.append(torch.autograd.grad(loss, model.core.embedding.weight)[0])
    assert model.core.checkpoint_windows
    assert model.is_gradient_checkpointing
    torch.testing.assert_close(*gradients, **TOLERANCE)


def test_tokens_are_added(tmp_path: Path) -> None:
    """A larger vocabulary keeps the old logits, reads the new ids, and is saved with the model."""
    model, tokens = wrapped(MELODI), random_tokens(1, 5)
    before = model(tokens).logits
    model.resize_token_embeddings(VOCAB + 2)
    torch.testing.assert_close(model(tokens).logits[..., :VOCAB], before, **TOLERANCE)
    model.save_pretrained(tmp_path)
    again = MelodiForCausalLM.from_pretrained(tmp_path)
    assert again(tokens + 2).logits.shape == (1, 5, VOCAB + 2)


class Segments(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = random_tokens(2 * WINDOW, seed=i)
        return dict(input_ids=tokens, labels=tokens)


def test_the_trainer_trains(tmp_path: Path) -> None:
    """`Trainer` takes two steps, evaluates, and saves what the auto classes load."""
    pytest.importorskip("accelerate")
    model = MelodiForCausalLM.from_core(make(MELODI).float())
    before = model.core.embedding.weight.detach().clone()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[],
        gradient_accumulation_steps=2, gradient_checkpointing=True, use_cpu=True,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Segments(), eval_dataset=Segments()
    )
    assert trainer.train().global_step == 2
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.save_model(str(tmp_path / "saved"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert not torch.equal(model.core.embedding.weight, before)
    assert torch.equal(model.core.embedding.weight, again.core.embedding.weight)


def test_the_trainer_keeps_the_mask(tmp_path: Path) -> None:
    """Padding that a dataset's own mask names is not read, by `Trainer` either, which drops columns
    that a forward pass does not name."""
    pytest.importorskip("accelerate")
    model = MelodiForCausalLM.from_core(make(MELODI).float()).eval()
    batch = padded(ragged(2 * WINDOW, 5), "left")
    # `Trainer` counts labels itself, and would count the first of a row, which nothing precedes.
    before = torch.nn.functional.pad(batch["attention_mask"], (1, -1))
    batch["labels"] = batch["input_ids"].masked_fill(before == 0, -100)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    rows = [{name: tensor[i] for name, tensor in batch.items()} for i in range(2)]
    trainer = transformers.Trainer(model, arguments, eval_dataset=rows)
    with torch.no_grad():
        expected = model(**batch).loss
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-5)


def test_packed_documents_are_refused() -> None:
    """A collator that puts documents one after the other says so by their positions alone;
    positions of padded rows are none."""
    rows = [{"input_ids": row.tolist()} for row in ragged(6, 5)]
    packed = transformers.DataCollatorWithFlattening()(rows)
    packed = {name: value for name, value in packed.items() if isinstance(value, Tensor)}
    model = wrapped(MELODI)
    with pytest.raises(ValueError, match="packed documents are not supported"):
        model(**packed)
    batch = padded(ragged(6, 5), "left")
    positions = batch["attention_mask"].cumsum(1) - 1
    with_positions = model(**batch, position_ids=positions.masked_fill(positions < 0, 1)).logits
    assert torch.equal(with_positions, model(**batch).logits)


TEXTS = [
    "It was the best of times,\n\n  it was the worst of times.",
    "naïve café: 東京 🙂\u200d\t\r\x00",
    "spelt out: <|end_of_document|> and on",
    " leading, don't, trailing ",
    "",
]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_same_ids(kind: str, tmp_path: Path) -> None:
    """The tokenizer that transformers loads gives our ids and our text, and pads on the left."""
    ours: Tokenizer = ByteTokenizer() if kind == "bytes" else train_tokenizer(TEXTS * 9, 300)
    tokenizer_for(ours, tmp_path).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == ours.decode(ids) == text
    assert theirs.eos_token_id == theirs.pad_token_id == ours.end_of_document
    assert len(theirs) == ours.vocab_size
    assert theirs(["a", "bcd"], padding=True)["attention_mask"][0][0] == 0


def test_others_add_no_special_tokens(tmp_path: Path) -> None:
    """A tokenizer.json of somebody else that would add tokens to a text adds none: the run was
    trained without them."""
    definition = json.loads(train_tokenizer(TEXTS * 9, 300).definition)  # type: ignore[attr-defined]
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "a", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"a": {"id": "a", "ids": [66], "tokens": ["a"]}},
    }
    ours = BPETokenizer(json.dumps(definition))
    assert tokenizer_for(ours, tmp_path)("It was")["input_ids"] == ours.encode("It was")


def test_others_pad_with_a_special_token(tmp_path: Path) -> None:
    """A vocabulary without an end of documents pads with any special token that it has; without
    one it says that it cannot, as tokenizers of transformers do."""
    definition = train_tokenizer(TEXTS * 9, 300).definition  # type: ignore[attr-defined]
    ours = BPETokenizer(definition.replace("<|end_of_document|>", "<pad>"))
    theirs = tokenizer_for(ours, tmp_path)
    batch = theirs(["It was", "It"], padding=True)
    assert batch["attention_mask"][1][0] == 0
    assert theirs.batch_decode(batch["input_ids"], skip_special_tokens=True) == ["It was", "It"]
    bare = json.loads(definition.replace("<|end_of_document|>", "<pad>"))
    bare["added_tokens"] = []
    assert tokenizer_for(BPETokenizer(json.dumps(bare)), tmp_path).pad_token is None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    start(folder / "run", make_store(folder), steps=2, validate_every=2).run_all()
    return folder / "run"


def test_an_exported_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`melodi export` makes a folder that the auto classes and the pipeline load; the model says
    what the run's says, and the card says where it comes from."""
    record = dict(split="test", documents=3, step=2, perplexity=5.5, perplexity_without_memory=None)
    write_json(run / "eval-test.json", record)
    out = tmp_path / "exported"
    main(["export", str(run), str(out)])
    assert capsys.readouterr().out.startswith(str(out))
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    core = load(run)
    prompts = ["melodi reads a book and remembers", "a book"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    how = dict(do_sample=False, max_new_tokens=20)
    together = model.generate(**batch, **how)
    for prompt, ids in zip(prompts, together, strict=True):
        alone = slow(core, torch.tensor([core.tokenizer.encode(prompt)]), 20)
        text = core.tokenizer.decode(alone[0].tolist())
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert model.generation_config.eos_token_id == 256
    write = transformers.pipeline("text-generation", str(out), device="cpu")
    said = write(prompts, batch_size=2, **how)
    assert [one[0]["generated_text"] for one in said] == tokenizer.batch_decode(
        together, skip_special_tokens=True
    )
    card = (out / "README.md").read_text()
    for fact in ("short, long, short", "6 tokens", "| 5.50 | - |", "step 2", "extra hf"):
        assert fact in card
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]


def test_export_is_whole_or_absent(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with something in it is refused in one line, and so is the one that one is in; what
    fails leaves nothing behind."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    monkeypatch.chdir(run.parent)
    for command in (["export", str(run), str(tmp_path / "full")], ["export", "nowhere", "x"],
                    ["export", str(run), "."]):  # fmt: skip
        with pytest.raises(SystemExit) as end:
            main(command)
        assert end.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr("melodi.hf.export.card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    monkeypatch.undo()
    export(run, tmp_path / "out")
    (tmp_path / "usual").touch()
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "usual").stat().st_mode & 0o777}
    main(["export", str(run), str(tmp_path / "again")])
    with pytest.raises(SystemExit):
        main(["eval", str(tmp_path / "out")])
    assert "is for Hugging Face: give the run folder" in capsys.readouterr().err


def test_the_page_runs(run: Path, tmp_path: Path) -> None:
    """The code of docs/huggingface.md runs from top to bottom, beside a run and what it was
    exported to."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "books").symlink_to(run)
    page = (Path(__file__).parents[1] / "docs" / "huggingface.md").read_text()
    names: dict[str, object] = {}
    with contextlib.chdir(tmp_path):
        main(["export", "runs/books", "exported"])
        for block in re.findall(r"```python\n(.*?)```", page, re.S):
            exec(block, names)
    assert str(names["text"])
