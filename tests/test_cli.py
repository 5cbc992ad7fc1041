"""The command line: quick to start, one line for every mistake, and the same flags for ever."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from melodi import load
from melodi.cli import COMMANDS, main
from melodi.config import PRESETS
from melodi.data.detokenizer import CONTEXT, Detokenizer
from melodi.data.tokenizer import ByteTokenizer, Tokenizer, train_tokenizer
from melodi.files import read_header, read_json
from melodi.run import Run
from melodi.stream import StreamReader

TINY = shlex.split(
    "--threads 1 --device cpu --model.width 16 --model.num-heads 2 --model.ffn-width 16 "
    "--model.window 16 --model.short-term-tokens 4 --model.long-term-tokens 2 "
    "--model.long-term-windows 8 --model.layers short long --rows 2 --segment-windows 2 "
    "--validation-tokens 200 --steps 2"
)
"""What makes a training a matter of a second."""
TEXTS = ["It was the best of times,", "it was the worst of times.", "Call me Ishmael. Some"]


@pytest.fixture(autouse=True)
def _same_threads() -> object:
    """--threads is for the process, and this process has other tests."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of bytes and a tiny run on it, both made by the commands."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "books").mkdir()
    for i in range(6):
        (folder / "books" / f"{i}.txt").write_text(f"{i}: {TEXTS[i % 3]} " * 20)
    main(shlex.split(f"prepare {folder}/books --out {folder}/store --tokenizer bytes"))
    new = f"train --preset laptop-melodi --data {folder}/store --out {folder}/run"
    main([*new.split(), *TINY])
    return folder


def refused(capsys: pytest.CaptureFixture[str], command: str) -> str:
    """The one line that a command ends with."""
    with pytest.raises(SystemExit) as end:
        main(shlex.split(command))
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert err.startswith("melodi: error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in out + err
    return err


def printed(capsys: pytest.CaptureFixture[str], command: str) -> str:
    capsys.readouterr()
    main(shlex.split(command))
    return capsys.readouterr().out


def test_help_needs_no_torch() -> None:
    """Help, version and the public package answer without importing torch."""
    code = """
import sys, melodi, melodi.config
from melodi.cli import COMMANDS, main
assert set(melodi.__all__) <= set(dir(melodi))
main(["--help"])
main(["--version"])
for name in COMMANDS:
    try:
        main([name, "--help"])
    except SystemExit as end:
        assert not end.code
heavy = {"torch", "numpy", "tokenizers", "rich"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_tasks_bring_their_own_documents(capsys: pytest.CaptureFixture[str]) -> None:
    """What belongs to a store is refused beside --tasks, and what belongs to tasks without it."""
    assert "name them with --tasks" in refused(capsys, "eval run --include tasks")
    assert "--split is of a store" in refused(capsys, "eval run --tasks x --split train")
    for flag in ("--data store", "--max-tokens 5", "--drops"):
        assert "leave one of them out" in refused(capsys, f"eval run --tasks tale {flag}")


def test_every_command_explains_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Help fits in 80 columns, gives an example, and says no default twice."""
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, printed(capsys, "--help").splitlines())) <= 80
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        help_text = capsys.readouterr().out
        assert f"Example: melodi {name} " in help_text
        assert "default: None" not in help_text
        assert "default: )" not in help_text
        options = [line for line in help_text.splitlines() if "Example" not in line]
        assert max(map(len, options)) <= 81  # a sentence of description may be one longer


def test_train_help_lists_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    """`train --help` names --preset, --threads and --device, with the preset's own defaults."""
    for preset, window in (("laptop-melodi", "64"), ("paper-melodi-s128-l64", "512")):
        with pytest.raises(SystemExit):
            main(["train", "--preset", preset, "--help"])
        help_text = capsys.readouterr().out
        for flag in ("--preset", "--data", "--out", "--resume", "--threads", "--device"):
            assert re.search(rf"^\W*{flag}[ ,]", help_text, re.M)
        assert f"window [W]. (default: {window})" in help_text


def test_memory_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`melodi memory --json` lists every preset with exact figures."""
    rows = {row["preset"]: row for row in json.loads(printed(capsys, "memory --json"))}
    assert rows.keys() == PRESETS.keys()
    row = rows["paper-melodi-s128-l64"]
    assert (row["short"], row["long"], row["floats"]) == (1_703_936, 16_777_216, 18_481_152)
    assert (row["bytes_fp32"], row["bytes_bf16"]) == (4 * 18_481_152, 2 * 18_481_152)
    assert rows["laptop-melodi"]["parameters"] == 1_461_020


def test_memory_command_sizes_variations(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag changes that field only; the table fits in 80 columns and shows every digit."""
    monkeypatch.setenv("COLUMNS", "80")
    varied = "memory --preset=paper-memorizing --window 1024"
    (row,) = json.loads(printed(capsys, f"{varied} --json"))
    assert row["floats"] == 161_480_704
    table = printed(capsys, varied)
    assert "161,480,704" in table
    table += printed(capsys, "memory")
    assert "134,217,728 147,849,216" in table
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("memry", "command 'memry' is unknown: choose one of prepare, train"),
        ("memory --preset laptop-melod", "did you mean 'laptop-melodi'?"),
        ("memory --preset", "Missing value for argument '--preset'"),
        ("memory --window=3", "--window changes a preset: add --preset NAME"),
        ("memory --preset laptop-melodi --windw 3", "--window"),
        ("memory --preset laptop-melodi --top-k 3", "no 'memorizing' layer"),
        ("memory --preset laptop-melodi --window 3", "short_term_tokens=16 exceeds"),
        ("memory --preset laptop-melodi --window 3.5", "--window: '3.5' is not a whole number"),
        (f"memory --preset laptop-melodi --window {10**25}", f"--window: {10**25} is too large"),
        ("memory --preset laptop-melodi --dropout nan", "--dropout: nan is not finite"),
        ("train --data store", "--preset is missing: melodi memory lists all presets"),
        ("train --preset laptop-melodi", "--data is missing: make a store with melodi prepare"),
        ("train --preset laptop-melodi --data /none", "/none is no token store"),
        (f"prepare x --vocab-size {10**25}", f"--vocab-size: {10**25} is too large"),
        ("prepare x --vocab-size 0", "--vocab-size 0 must be at least 1"),
        ("prepare x --workers -1", "--workers -1 must be at least 1"),
        ("prepare x --validation-share nan", "--validation-share: nan is not finite"),
        ("eval", "RUN"),
        ("eval /none", "/none does not exist: give the folder of a run"),
        ("eval /none --rows -2", "--rows -2 must be at least 1"),
        ("eval /none --max-tokens 0", "--max-tokens 0 must be at least 1"),
        ("eval /none --split tset", "'tset' for argument '--split'"),
        ("eval /none --threads -2", "--threads -2 must be at least 1"),
        ("eval /none --device tpu", "--device tpu is not on this machine: choose one of cpu"),
        ("generate --run /none --top-k 0", "--top-k 0 must be at least 1"),
        ("generate --run /none --max-tokens -1", "--max-tokens -1 must be at least 0"),
        ("generate --run /none --seed -1", "--seed -1 must be at least 0"),
        ("generate --run /none --temperature nan", "--temperature: nan is not finite"),
        ("generate --run /none --temperature -1", "temperature=-1.0 must be at least 0"),
        ("generate --run /none --stop ''", "--stop is empty: give some text"),
        ("generate --threads 1000000", "--threads 1000000 must be at most 1024"),
        ("prepare hub: --out /none", "source 'hub:' names no dataset: give hub:NAME"),
        ("read - -", "- is given twice: standard input can be read once"),
        ("read x --bf16", "--bf16 says how memory is saved: give --save FILE too"),
        ("read x --save /dev/null", "--save /dev/null is a device or a pipe: give a file"),
        ("inspect /", "/ is a folder: give a file"),
        ("report /none", "/none does not exist: give the folder of a run"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], command: str, message: str) -> None:
    """One line on standard error that names the flag and the value, and exit code 2."""
    assert message in refused(capsys, command)


def test_a_file_where_a_folder_should_be(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """What is in the way is named, and stays."""
    (taken := folder / "taken").write_text("mine")
    train = f"train --preset laptop-melodi --data {folder}/store"
    for command in (f"prepare {folder}", train, "recall facts"):
        assert f"{taken}" in (line := refused(capsys, f"{command} --out {taken}"))
        assert "a file is where a folder should be: choose another place" in line
    assert taken.read_text() == "mine"


def test_what_may_not_be_read_is_not_called_damaged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """A memory file of somebody else is whole, and a folder that is there is not missing."""
    (closed := folder / "closed").touch()

    def refuse(path: Path, *_: object, **__: object) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.safe_open", refuse)
        patch.setattr(Path, "read_bytes", refuse)
        line = refused(capsys, f"inspect {closed}")
    assert f"{closed}: no permission: change that, or choose another place" in line

    def call_missing(*_: object, **__: object) -> None:  # as the library does
        raise FileNotFoundError("No such file or directory")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.safe_open", call_missing)
        with pytest.raises(PermissionError):
            read_header(closed)
        with pytest.raises(FileNotFoundError, match="does not exist"):
            read_header(folder / "none")
    monkeypatch.setattr(os, "access", lambda *_: False)
    line = refused(capsys, f"read x --save {folder}/memory")
    assert f"{folder}: no permission" in line


def test_closed_streams() -> None:
    """As cron and daemons have them: what is printed goes nowhere, and nothing fails."""
    command = f"{shlex.quote(sys.executable)} -m melodi"
    for line, code in (("memory >&-", 0), ("memory >&- 2>&-", 0), ("none 2>&-", 2)):
        assert subprocess.run(f"{command} {line}", shell=True).returncode == code, line
    done = subprocess.run(f"{command} read - <&-", shell=True, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith("- is standard input, which is closed: give a file\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_devices_that_are_absent(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """A device that this machine lacks is refused before anything is made."""
    train = f"train --preset laptop-melodi --data {folder}/store --out {folder}/other"
    for command in (f"eval {folder}/run", f"generate --run {folder}/run", train):
        assert "--device cuda:1 is not on this machine" in refused(
            capsys, f"{command} --device cuda:1"
        )
    assert "--threads 0 must be" in refused(capsys, f"{train} --threads 0")
    assert not (folder / "other").exists()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "melodi: interrupted\n"),
        (KeyboardInterrupt("stopped", signal.SIGTERM), 143, "melodi: stopped\n"),
        (OverflowError("int too big\nto convert"), 2, "melodi: error: int too big to convert\n"),
        (MemoryError(), 2, "melodi: error: out of memory: choose a smaller model"),
        (torch.OutOfMemoryError("CUDA"), 2, "melodi: error: out of memory: choose a smaller"),
        (RuntimeError("[enforce fail] can't allocate memory"), 2, "melodi: error: out of memory"),
        (OSError("disk full"), 2, "melodi: error: disk full\n"),
        (OSError(28, "No space left on device"), 2, "melodi: error: No space left on device\n"),
        (OSError(5, "I/O error", "a"), 2, "melodi: error: a: I/O error\n"),
        (PermissionError(13, "Denied", "a"), 2, "melodi: error: a: no permission: change that"),
    ],
)
def test_known_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    """Whatever stops a command, also while its modules are imported, is one line."""

    def stop(_name: str) -> None:
        raise error

    monkeypatch.setattr("melodi.cli.import_module", stop)
    with pytest.raises(SystemExit) as end:
        main(["memory"])
    assert end.value.code == code
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of our own is not dressed up as the user's."""

    def stop(_name: str) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr("melodi.cli.import_module", stop)
    with pytest.raises(RuntimeError, match="shapes differ"):
        main(["memory"])


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to catch")
def test_a_terminated_training_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM ends a training after its step, with a checkpoint, a line, and 143."""
    from melodi.training.learner import Learner

    take_step = Learner.take_step

    def terminated(learner: Learner) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return take_step(learner)

    monkeypatch.setattr(Learner, "take_step", terminated)
    new = f"--preset laptop-melodi --data {folder}/store --out {folder}/stopped"
    with pytest.raises(SystemExit) as end:
        main(["train", *new.split(), *TINY])
    assert end.value.code == 143
    assert "stopped after step 1: the same command with --resume" in capsys.readouterr().err


def test_underscores_and_dashes_are_the_same(folder: Path) -> None:
    """--model.vocab_size and --model.vocab-size both hold; without them the store's size."""
    new = ["train", "--preset", "laptop-melodi", "--data", str(folder / "store")]
    for out, flag, size in (("a", "--model.vocab_size", 300), ("b", "--model.vocab-size", 301)):
        main([*new, "--out", str(folder / out), *TINY, "--steps", "1", flag, str(size)])
        assert Run(folder / out).configs()[0].vocab_size == size
    assert Run(folder / "run").configs()[0].vocab_size == 257


def test_resume_needs_neither_preset_nor_data(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run knows its configs and its store; flags that would change them are refused."""
    main(["train", "--out", str(folder / "run"), "--resume"])
    assert "all 2 steps are done already" in "".join(capsys.readouterr())
    message = refused(capsys, f"train --out {folder}/run --resume --rows 4")
    assert "rows=4 differs from the run's 2" in message


def test_eval_prints_before_it_writes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JSON has the fixed keys and is the file's; a disk that is full costs no figures."""
    record = json.loads(printed(capsys, f"eval {folder}/run --device cpu --rows 1 --json"))
    wanted = {"perplexity", "bits_per_byte", "tokens", "perplexity_without_memory"}
    assert wanted <= record.keys()
    assert read_json(folder / "run" / "eval-test.json") == record

    def full(*_: object) -> None:
        raise OSError("no space left")

    costs = record["costs"]
    assert costs["training_tokens"] > 0
    # Forward and backward pass: three times reading.
    passes = costs["training_flops"] / costs["training_tokens"] / costs["reading_flops_per_token"]
    assert passes == pytest.approx(3)
    with monkeypatch.context() as lost:  # a copy that came without its metrics has its figures
        lost.setattr("melodi.run.METRICS", "gone.jsonl")
        bare = json.loads(printed(capsys, f"eval {folder}/run --device cpu --rows 1 --json"))
    assert bare["perplexity"] == record["perplexity"]
    assert bare["costs"]["training_tokens"] is None
    monkeypatch.setattr("melodi.evaluation.record.write_record", full)
    with pytest.raises(SystemExit):
        main(["eval", str(folder / "run"), "--device", "cpu"])
    out, err = capsys.readouterr()
    assert "memory dropped at every window" in out
    assert err.endswith("melodi: error: no space left\n")


def test_generate_is_a_function_of_its_seed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompt, then what the model says; equal seeds give equal texts."""
    command = f"generate --run {folder}/run --prompt 'It was' --max-tokens 40 --threads 1"
    texts = [printed(capsys, f"{command} --device cpu --seed {seed}") for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("It was") and text.endswith("\n") for text in texts)
    assert "holds no token" in refused(capsys, f"generate --run {folder}/run --prompt ''")


def test_an_error_begins_its_own_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the middle of a text does not stand on the text's line; one that can be known
    before comes before."""

    def fails(*_: object, **__: object) -> Iterator[str]:
        yield " was"
        raise ValueError("in the middle")

    monkeypatch.setattr(StreamReader, "generate_text", fails)
    for choice, written in (("--temperature 1", "It was\n"), ("--temperature -1", "")):
        with pytest.raises(SystemExit):
            main(shlex.split(f"generate --run {folder}/run --prompt It {choice}"))
        out, err = capsys.readouterr()
        assert out == written
        assert err.startswith("melodi: error: ")


def test_a_damaged_record_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By whoever reads it."""
    shutil.copytree(folder / "run", run := folder / "with a record")
    (run / "eval-test.json").write_text("[]")
    line = refused(capsys, f"report '{run}'")
    assert "eval-test.json is damaged: it holds no JSON object" in line


def test_a_vocabulary_that_is_smaller_than_wished(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Documents have only so many pieces, and that is said."""
    capsys.readouterr()
    main(shlex.split(f"prepare {folder}/books --out {folder}/wide --vocab-size 60000"))
    assert "the training documents give a vocabulary of" in capsys.readouterr().err


def test_report_takes_any_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dollars in a run's name are no formula, and a line cut by a kill is left out."""
    pytest.importorskip("matplotlib")
    run = folder / "a$b_$c^"
    run.mkdir()
    metrics = (folder / "run" / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(metrics + '{"step": 3, "lo')
    assert printed(capsys, f"report '{run}'") == f"{run}/report.png\n"
    assert (run / "report.png").stat().st_size
    (run / "metrics.jsonl").write_text(f"nonsense\n{metrics}")
    assert "metrics.jsonl is damaged in line 1" in refused(capsys, f"report '{run}'")


def test_a_plain_locale_is_enough(folder: Path) -> None:
    """Where the terminal knows only ASCII, help and texts are printed with "?" for the rest."""
    code = (
        "import sys\nfrom melodi.cli import main\n"
        f"main(['generate', '--run', {str(folder / 'run')!r}, '--prompt', 'caf\\xe9',"
        " '--max-tokens', '9'])\n"
        "try: main(['memory', '--preset', 'laptop-melodi', '--windw', '3'])\n"
        "except SystemExit: pass\n"
        "main(['train', '--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"caf?")
    assert b"--preset STR" in done.stdout
    assert done.stderr.count(b"\n") == 1


BPE = train_tokenizer(["The café is naïve – €5, 日本語 " * 9, *TEXTS], 300)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
@given(
    text=st.text(max_size=9),
    ids=st.lists(st.integers(1, 255), max_size=5 * CONTEXT),
    euros=st.integers(0, 5 * CONTEXT),
)
def test_text_comes_whole_and_once(
    tokenizer: Tokenizer, text: str, ids: list[int], euros: int
) -> None:
    """Decoded one at a time, any ids give the text that they give together, also where they spell
    no characters; and whole characters do not wait."""
    before = tokenizer.encode(text)
    ids = [*tokenizer.encode("€ " * euros), *ids, *tokenizer.encode("日本")]
    ids = [i for i in ids if i != tokenizer.end_of_document]
    detokenizer = Detokenizer(tokenizer, before)
    pieces = [detokenizer.push(i) for i in ids]
    assert pieces[-1].endswith("本")
    assert text + "".join(pieces) + detokenizer.rest() == tokenizer.decode(before + ids)
    assert len(detokenizer.recent) <= 2 * CONTEXT


def test_load_is_public(folder: Path) -> None:
    """`melodi.load` gives the model of a run, with its tokenizer."""
    model = load(folder / "run")
    assert model.tokenizer.decode(model.tokenizer.encode("naïve")) == "naïve"
