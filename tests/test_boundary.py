"""The public boundary: bad input is refused in one line before anything changes; states travel."""

import copy
import gc
import pickle
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from zoo import KINDS, VOCAB, WINDOW, ZOO, cases, make, random_tokens

from melodi import LanguageModel, MemoryState, ModelConfig
from melodi.config import sandwich
from melodi.files import read_tensors, write_tensors

CONFIG = KINDS["melodi"]
TOKENS = random_tokens(2, 5)
MODEL, OTHER = make(CONFIG), make(CONFIG, seed=1)
TOLERANCE = dict(rtol=0, atol=1e-10)


def call(tokens: object = TOKENS, state: object = None, **kwargs: object) -> object:
    model = make(CONFIG)
    return model(tokens, state or model.empty_state(2), **kwargs)


def config(**changes: object) -> ModelConfig:
    return replace(CONFIG, **changes)


REFUSED = {
    "short_term_tokens=9 exceeds window=6": lambda: config(short_term_tokens=9),
    "long_term_tokens=7 exceeds window=6": lambda: config(long_term_tokens=7),
    "short_term_tokens=0 leaves Melodi without summary": lambda: config(short_term_tokens=0),
    "long_term_tokens=0 leaves the long-term layer": lambda: config(long_term_tokens=0),
    "copy_short_to_long needs as many .* not 3 and 2": lambda: config(copy_short_to_long=True),
    "cannot copy in a 'long-only' layer": lambda: config(
        copy_short_to_long=True, long_term_tokens=3, layers=("long-only",)
    ),
    "long-term layer 13 is outside the stack of 13": lambda: sandwich(13, long_term=(13,)),
    "short-term layer -1 is outside the stack of 4": lambda: sandwich(4, short_term=(-1,)),
    "num_heads=5 does not divide width=12": lambda: config(num_heads=5, head_width=None),
    r"layers=\(\) is empty": lambda: config(layers=()),
    "layer kind 'shrt' is unknown": lambda: config(layers=("shrt",)),
    "layers mix 'melodi' with 'xl'": lambda: config(layers=("short", "xl")),
    "dialect='english' is unknown": lambda: config(dialect="english"),
    "no field 'activaton': did you mean 'activation'": lambda: config(
        dialect="default,activaton=gelu"
    ),
    "activation='tanh'": lambda: config(dialect="default,activation=tanh"),
    "no field 'windw': did you mean 'window'": lambda: ModelConfig.from_dict({"windw": 3}),
    "recurrent_states=0": lambda: config(layers=("recurrent",), recurrent_states=0),
    "memory_slots=0": lambda: config(layers=("memorizing",), memory_slots=0),
    "top_k=16 must be from 1 to memory_slots=15": lambda: config(layers=("memorizing",), top_k=16),
    "dropout=1.5": lambda: config(dropout=1.5),
    "dropout='0.1' must be a finite number": lambda: config(dropout="0.1"),
    "branching='false' must be true or false": lambda: config(branching="false"),
    "top_k=2.5 must be a whole number": lambda: config(layers=("memorizing",), top_k=2.5),
    "head_width='8' must be a whole number": lambda: config(head_width="8"),
    "layers=None must be a tuple": lambda: config(layers=None),
    "dialect=None must be a str": lambda: config(dialect=None),
    r"layer kind \['xl'\] is unknown": lambda: config(layers=(["xl"],)),
    "ModelConfig lacks the field 'vocab_size'": lambda: ModelConfig.from_dict({"width": 3}),
    "window=0": lambda: config(window=0),
    f"token id {VOCAB} is outside the vocabulary": lambda: call(torch.full((2, 5), VOCAB)),
    "token id -1 is outside the vocabulary": lambda: call(torch.full((2, 5), -1)),
    r"tokens of shape \(2, 0\) are empty": lambda: call(TOKENS[:, :0]),
    r"tokens of shape \(5,\)": lambda: call(TOKENS[0]),
    "type torch.float32 must be integers": lambda: call(TOKENS.float()),
    "the state has 3 rows and the tokens have 2": lambda: call(state=make(CONFIG).empty_state(3)),
    "the state is torch.float32 and the model is torch.float64": lambda: call(
        state=LanguageModel(CONFIG).empty_state(2)
    ),
    "state on meta, model on cpu": lambda: call(
        state=LanguageModel(CONFIG).to("meta").empty_state(2)
    ),
    "tokens on meta, model on cpu": lambda: call(TOKENS.to("meta")),
    "belongs to another architecture": lambda: call(
        state=make(config(long_term_windows=4)).empty_state(2)
    ),
    "made with other weights": lambda: call(state=OTHER(TOKENS, OTHER.empty_state(2))[1]),
    "the model that made this state is gone": lambda: call(
        state=make(CONFIG)(TOKENS, make(CONFIG).empty_state(2))[1]
    ),
    r"lengths=\[1, 6\] must be one whole number": lambda: call(lengths=torch.tensor([1, 6])),
    r"lengths=\[1.0, 2.0\] must be one whole number": lambda: call(lengths=[1.0, 2.0]),
    "lengths='ab' must be whole numbers": lambda: call(lengths="ab"),
    "tokens are a list": lambda: call(TOKENS.tolist(), lengths=[1, 2]),
    "targets are a list": lambda: make(CONFIG).loss(
        TOKENS, TOKENS.tolist(), make(CONFIG).empty_state(2)
    ),
    "batch_size=2.5": lambda: make(CONFIG).empty_state(2.5),
    "batch_size=None": lambda: make(CONFIG).empty_state(None),
    "no states to join": lambda: MemoryState.cat([]),
    "targets of type torch.float32": lambda: make(CONFIG).loss(
        TOKENS, TOKENS.float(), make(CONFIG).empty_state(2)
    ),
    "on meta must be as the tokens": lambda: make(CONFIG).loss(
        TOKENS, TOKENS.to("meta"), make(CONFIG).empty_state(2)
    ),
    r"rows=\[0.5\] must be indices": lambda: make(CONFIG).empty_state(2).select([0.5]),
    "rows of shape .* must be a mask": lambda: make(CONFIG).empty_state(2).forget([True]),
    r"rows=\[2\] must be indices from 0 to 1": lambda: make(CONFIG).empty_state(2).select([2]),
    "batch_size=0": lambda: make(CONFIG).empty_state(0),
    "targets of shape": lambda: make(CONFIG).loss(
        TOKENS, TOKENS[:, 1:], make(CONFIG).empty_state(2)
    ),
    f"target id {VOCAB} .* -1 is ignored": lambda: make(CONFIG).loss(
        TOKENS, TOKENS + VOCAB - TOKENS, make(CONFIG).empty_state(2)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_refused(message: str) -> None:
    """One line with the offending value, as a ValueError."""
    with pytest.raises(ValueError, match=message) as caught:
        REFUSED[message]()
    assert "\n" not in str(caught.value)


def test_refusal_changes_nothing() -> None:
    """A refused call leaves the state as it was."""
    model = make(CONFIG)
    _, state = model(random_tokens(2, WINDOW), model.empty_state(2))
    before = [tensor.clone() for tensor in tensors_of(state)]
    with pytest.raises(ValueError, match="outside the vocabulary"):
        model(torch.full((2, 3), VOCAB), state)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_of(state), strict=True))


@cases(ZOO)
@pytest.mark.parametrize("length", [2 * WINDOW, 2 * WINDOW + 4])
def test_a_saved_state_goes_on(config: ModelConfig, length: int, tmp_path: Path) -> None:
    """Saved and loaded, in the middle of a window too, a memory is the same bit for bit, and what
    is read after it is the same."""
    model = make(config)
    _, state = model(random_tokens(2, length), model.empty_state(2))
    state.save(tmp_path / "memory.safetensors")
    loaded = MemoryState.load(tmp_path / "memory.safetensors")
    assert loaded.num_floats() == state.num_floats()
    for ours, theirs in zip(tensors_of(loaded), tensors_of(state), strict=True):
        assert torch.equal(ours, theirs)
    more = random_tokens(2, WINDOW, seed=1)
    expected, _ = model(more, state)
    logits, after = model(more, loaded)
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert after.made_by(model)


def tensors_of(state: MemoryState) -> list[torch.Tensor]:
    memories = [*state.layers, *(state.open_window or ())]
    return [state.windows_B, state.open_B, *(tensor for memory in memories for tensor in memory)]


def test_a_loaded_state_is_checked_on_first_use(tmp_path: Path) -> None:
    """Another architecture and other weights are refused; a copy of the model is not."""
    path = tmp_path / "memory.safetensors"
    model = make(CONFIG)
    model(TOKENS, model.empty_state(2))[1].save(path)
    make(CONFIG)(TOKENS, MemoryState.load(path))
    with pytest.raises(ValueError, match="another architecture"):
        make(config(branching=False))(TOKENS, MemoryState.load(path))
    with pytest.raises(ValueError, match="other weights"):
        make(CONFIG, seed=1)(TOKENS, MemoryState.load(path))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """Not ours, cut short, of another version, or lacking a tensor: one line each."""
    path = tmp_path / "memory.safetensors"
    with pytest.raises(FileNotFoundError, match="does not exist"):
        MemoryState.load(path)
    MODEL.empty_state(1).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        MemoryState.load(path)
    write_tensors(path, {"x": torch.zeros(1)})
    with pytest.raises(ValueError, match="not a memory file"):
        MemoryState.load(path)
    path.write_bytes(whole)
    header, tensors = read_tensors(path)
    write_tensors(path, tensors, {**header, "version": "9"})
    with pytest.raises(ValueError, match="has version 9"):
        MemoryState.load(path)
    path.write_bytes(whole)
    with safe_open(path, "pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    save_file(tensors, path, header)
    MemoryState.load(path)
    lacking = {name: tensor for name, tensor in tensors.items() if name != "layers.0.z_BSD"}
    for changed, about in (
        (lacking, header),
        (tensors | {"open": torch.ones(1, dtype=torch.long)}, header),
        (tensors | {"layers.0.z_BSD": torch.zeros(1, 2, 12).double()}, header),
        (tensors, {**header, "config": "{"}),
        (tensors, {**header, "config_digest": "0" * 16}),
    ):
        save_file(changed, path, about)
        with pytest.raises(ValueError, match="is damaged: its checksum differs"):
            MemoryState.load(path)
    with pytest.raises(ValueError, match="is a folder: give a file"):
        MemoryState.load(tmp_path)


def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    """One bit flipped anywhere in a memory file, and it is refused in one line, or reads as it was:
    there is padding that means nothing."""
    path = tmp_path / "memory.safetensors"
    model = make(CONFIG)
    _, state = model(random_tokens(1, WINDOW + 2), model.empty_state(1))
    state.save(path)
    whole = path.read_bytes()
    body = int.from_bytes(whole[:8], "little") + 8
    for place in {*range(0, body, 7), *range(body, len(whole), 101)}:
        flipped = bytearray(whole)
        flipped[place] ^= 4
        path.write_bytes(flipped)
        try:
            loaded = MemoryState.load(path)
        except ValueError:
            continue
        for tensor, other in zip(tensors_of(state), tensors_of(loaded), strict=True):
            assert torch.equal(tensor, other)


def test_a_damaged_state_is_refused() -> None:
    """Shapes that no reading can leave are refused before anything is computed."""
    model = make(CONFIG)
    _, state = model(TOKENS, model.empty_state(2))
    foreign = replace(state, owner=model.fingerprint(), layers=(state.layers[1],) * 3)
    with pytest.raises(ValueError, match="damaged: layer 0 has shapes"):
        model(TOKENS, foreign)


def test_a_copy_of_a_state_copies_no_weights() -> None:
    """A state is a plain value: copied or pickled it is small, and it keeps no model alive."""
    model = make(CONFIG)
    state = model(TOKENS, model.empty_state(2))[1].detach()
    assert copy.deepcopy(state).made_by(model)
    again = pickle.loads(pickle.dumps(state))
    assert again.owner == model.fingerprint()
    expected, _ = model(TOKENS, state)
    logits, _ = model(TOKENS, again)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    gone = weakref.ref(model)
    del model, logits, expected
    gc.collect()
    assert gone() is None


def test_only_states_of_one_model_are_joined() -> None:
    """Rows that were read with other weights would be read wrongly."""
    model, other = make(CONFIG), make(CONFIG, seed=1)
    ours, theirs = (m(random_tokens(1, WINDOW), m.empty_state(1))[1] for m in (model, other))
    assert MemoryState.cat([ours, ours]).batch_size == 2
    with pytest.raises(ValueError, match="states of different models"):
        MemoryState.cat([ours, theirs])


def test_saving_replaces_the_whole_file_or_nothing(tmp_path: Path) -> None:
    """A save that fails leaves the earlier file as it was, and nothing beside it."""
    resource = pytest.importorskip("resource", reason="no limit of file sizes on this system")
    path = tmp_path / "memory.safetensors"
    MODEL.empty_state(1).save(path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Files may grow to half of what is needed, as on a disk that is nearly full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="cannot be written"):
            MODEL.empty_state(2).save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_small_integers_and_any_padding_are_fine() -> None:
    """Token ids of every integer type are read alike, and padding may hold anything."""
    model = make(CONFIG)
    expected, _ = model(TOKENS, model.empty_state(2))
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        logits, _ = model(TOKENS.to(dtype), model.empty_state(2))
        torch.testing.assert_close(logits, expected, **TOLERANCE)
    model.loss(TOKENS.int(), TOKENS.int(), model.empty_state(2))
    padded = torch.cat([TOKENS, torch.full((2, 2), -100)], dim=1)
    logits, _ = model(padded, model.empty_state(2), lengths=[5, 5])
    torch.testing.assert_close(logits[:, :5], expected, **TOLERANCE)


@cases(ZOO)
def test_select_reorders_rows(config: ModelConfig) -> None:
    """Rows can be taken in any order and several times, as beam search does."""
    model = make(config)
    _, state = model(random_tokens(3, WINDOW + 2), model.empty_state(3), torch.tensor([8, 5, 2]))
    more = random_tokens(3, 4, seed=1)
    logits, _ = model(more, state)
    rows = torch.tensor([2, 0, 0])
    again, _ = model(more[rows], state.select(rows))
    torch.testing.assert_close(again, logits[rows], **TOLERANCE)
    bytes_ = state.select(rows.to(torch.uint8))  # to torch a mask
    assert bytes_.open_B.tolist() == state.open_B[rows].tolist()
    assert torch.equal(tensors_of(bytes_)[-1], tensors_of(state.select(rows))[-1])
    masked = state.select(torch.tensor([False, True, False]))
    assert masked.open_B.tolist() == state.open_B[1:2].tolist()


def test_states_of_one_model_are_joined_without_a_look_at_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose they are is known: nothing is computed from all weights."""
    model = make(CONFIG)
    states = [model(random_tokens(1, WINDOW), model.empty_state(1))[1] for _ in range(3)]
    monkeypatch.setattr(LanguageModel, "fingerprint", lambda self: pytest.fail("was asked"))
    assert MemoryState.cat(states).batch_size == 3


def test_a_file_that_few_may_read_stays_one(tmp_path: Path) -> None:
    """Memory is content: whoever has locked it away finds it so after it was saved again."""
    path = tmp_path / "memory.safetensors"
    model = make(CONFIG)
    state = model.empty_state(1)
    state.save(path)
    path.chmod(0o600)
    state.save(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_open_window_is_carried_only_while_there_is_one() -> None:
    """Whole windows leave no open window behind, nor does forgetting the rows that had one."""
    model = make(CONFIG)
    _, state = model(random_tokens(2, WINDOW), model.empty_state(2))
    assert state.open_window is None
    _, state = model(TOKENS, state)
    assert state.open_window is not None
    assert state.forget([True, False]).open_window is not None
    assert state.forget([True, True]).open_window is None
