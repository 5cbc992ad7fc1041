"""A corpus prepared in shards and joined is, to the byte, the corpus prepared by one machine."""

import json
import shutil
from pathlib import Path

import pytest
from texts import contents, stories, write_folder

from melodi.cli.prepare import prepare as prepare_command
from melodi.data import appender, writer
from melodi.data.appender import Appender
from melodi.data.corpus import open_sources
from melodi.data.merge import merge
from melodi.data.prepare import prepare, prepare_shard
from melodi.data.shards import Shard
from melodi.data.store import TokenStore


@pytest.fixture
def corpus(tmp_path: Path) -> list[Path]:
    """Files with splits, records, duplicates within and across files, bad and unread documents."""
    texts: dict[str, str | bytes] = {f"train/{name}": t for name, t in stories(30).items()}
    texts |= {f"test/{name}": t for name, t in stories(3, seed=1).items()}
    twice = texts["train/003.txt"]
    texts |= {"train/010-dup.txt": twice, "train/zz.txt": twice, "train/029-bad.txt": b"a\xff"}
    texts |= {"train/zz-bad.md": b"a\xff", "train/zero.txt": b"\0", "train/empty.txt": " "}
    texts |= {"train/notes.doc": "not read", "other.txt": "outside"}
    records = [{"text": text} for text in (*stories(40, seed=2).values(), twice, "", "last")]
    lines = "\n".join(json.dumps(record) for record in records)
    return [
        write_folder(tmp_path / "in", texts),
        write_folder(tmp_path / "more", {"a.jsonl": lines, "b.txt": "and", "c.txt": twice}),
    ]


def shards_of(corpus: list[Path], count: int, out: Path) -> list[Path]:
    folders = [out / f"{number}-of-{count}" for number in range(1, count + 1)]
    for number, folder in enumerate(folders, 1):
        prepare_shard(Shard(number, count), "bytes", corpus, folder, workers=2)
    return folders


@pytest.mark.parametrize("count", [1, 2, 3, 7, 60])
def test_joined_shards_are_the_store_of_one_machine(
    count: int, corpus: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, index and manifest, with every count and every name in it; also with more shards than
    there are files, and with more names than are kept."""
    monkeypatch.setattr(writer, "MOST_NAMES", 2)
    whole = prepare(corpus, tmp_path / "whole", tokenizer="bytes")
    assert whole.manifest["skipped"] == {"duplicate": 5, "empty": 2, "binary": 1}
    assert whole.manifest["repaired"] == {"invalid UTF-8": 1}
    folders = shards_of(corpus, count, tmp_path)
    merge(reversed_half(folders), tmp_path / "joined").verify()
    assert contents(tmp_path / "joined") == contents(tmp_path / "whole")


def reversed_half(folders: list[Path]) -> list[Path]:
    """The same shards in another order."""
    return folders[1::2] + folders[::2]


def test_every_file_is_in_one_shard(corpus: list[Path]) -> None:
    """Shards follow each other in reading order, and none has much more than its share."""
    sources = open_sources(corpus)
    names = [document.name for source in sources for document in source.documents()]
    for count in (1, 2, 3, 5, 50):
        shards = [Shard(number, count).of(sources) for number in range(1, count + 1)]
        found = [d.name for shard in shards for source in shard for d in source.documents()]
        assert found == names
        sizes = [sum(sum(source.file_sizes) for source in shard) for shard in shards]
        largest = max(size for source in sources for size in source.file_sizes)
        assert max(sizes) <= sum(sizes) / count + largest


class Killed(BaseException):
    """Stands for the end of the process: nothing tidies up after it."""


def test_interrupted_shards_and_merges_continue(
    corpus: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped every few documents, in a shard and in the merge, all ends with the same bytes."""
    prepare(corpus, tmp_path / "whole", tokenizer="bytes")
    monkeypatch.setattr(appender, "SAVE_SECONDS", 0.0)
    end_document, left = Appender.end_document, 0

    def stopping(self: Appender, document: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        end_document(self, document)  # type: ignore[arg-type]

    monkeypatch.setattr(Appender, "end_document", stopping)
    stops, joined = 0, False
    while not joined:
        left = 17
        try:
            for number in (1, 2):
                if not (tmp_path / str(number) / "shard.json").exists():
                    prepare_shard(Shard(number, 2), "bytes", corpus, tmp_path / str(number))
            merge([tmp_path / "1", tmp_path / "2"], tmp_path / "joined")
            joined = True
        except Killed:
            stops += 1
            for name in ("1", "2", "joined"):
                if (tmp_path / name / "draft.json").exists():
                    with (tmp_path / name / "draft.names").open("ab") as file:
                        file.write(b"torn")
    assert stops > 5
    assert contents(tmp_path / "joined") == contents(tmp_path / "whole")


def test_what_does_not_belong_together_is_refused(corpus: list[Path], tmp_path: Path) -> None:
    """A shard that is missing, twice there, of another whole, unfinished or damaged."""
    one, two = shards_of(corpus, 2, tmp_path)
    (third,) = shards_of(corpus, 1, tmp_path)
    prepare_shard(Shard(2, 2), "bytes", corpus[:1], tmp_path / "other")
    shutil.copytree(two, tmp_path / "copy")
    cases = {
        r"shard 2/2 is missing \(1 in all\): give all": [one],
        r"both shard 2/2: give each once": [one, two, tmp_path / "copy"],
        r"is 1/1 and .* is 1/2: give shards of one number": [one, third],
        r"are not of one whole: sources=": [one, tmp_path / "other"],
        r"no finished shard: run its melodi prepare --shard": [one, tmp_path / "in"],
    }
    for message, folders in cases.items():
        with pytest.raises(ValueError, match=message):
            merge(folders, tmp_path / "joined")
    with pytest.raises(ValueError, match=r"is one shard of a store: join all with .* --merge"):
        TokenStore.open(one)
    with pytest.raises(ValueError, match=r"shard .* is finished and is not overwritten"):
        prepare_shard(Shard(1, 2), "bytes", corpus, one)
    with (two / "draft.tokens").open("r+b") as file:
        file.write(b"?")
    with pytest.raises(
        ValueError, match=r"draft.tokens is damaged: copy or prepare shard .* again"
    ):
        merge([one, two], tmp_path / "joined")
    assert not (tmp_path / "joined").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--shard 1/2", "--shard needs a tokenizer that all shards share"),
        ("--shard 1/2 --vocab-size 300", "--shard needs a tokenizer that all shards share"),
        ("--shard 3/2 --tokenizer bytes", "--shard 3/2 is no part of a whole: give 1/4 to 4/4"),
        ("--shard 0/2 --tokenizer bytes", "--shard 0/2 is no part of a whole"),
        ("--shard half --tokenizer bytes", "--shard half is no part of a whole"),
        ("pg19 --shard 1/2 --tokenizer bytes", "pg19 cannot be divided into shards: download"),
        ("--merge a b --tokenizer bytes", "takes everything from the shards: leave out --tokeni"),
        ("books --merge a b", "takes everything from the shards: leave out a PATH"),
        ("--merge a --shard 1/2", "takes everything from the shards: leave out --shard"),
        ("--merge a", "a is no finished shard"),
    ],
)
def test_unclear_commands_are_refused(
    flags: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        prepare_command([*flags.split(), "--out", "out"])
    assert not (tmp_path / "out").exists()


def test_the_commands_of_the_documentation(
    corpus: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vocabulary from a part, shards that share it, and the merge, on the command line."""
    part, out = tmp_path / "part", tmp_path / "out"
    prepare_command([str(corpus[0]), "--out", str(part), "--vocab-size", "300"])
    sources = [*map(str, corpus), "--tokenizer", str(part / "tokenizer.json")]
    for n in ("1", "2"):
        prepare_command([*sources, "--shard", f"{n}/2", "--out", str(tmp_path / n)])
    assert "shard 2/2, " in capsys.readouterr().out
    prepare_command(["--merge", str(tmp_path / "1"), str(tmp_path / "2"), "--out", str(out)])
    assert "vocabulary of 300" in capsys.readouterr().out
    prepare_command([*sources, "--out", str(tmp_path / "whole")])
    assert contents(out) == contents(tmp_path / "whole")
