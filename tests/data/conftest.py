"""What several tests of the data share."""

from pathlib import Path

import pytest
from texts import stories, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Thirty good documents, a duplicate, an empty, a binary and an invalid one."""
    texts: dict[str, str | bytes] = dict(stories(30))
    texts |= {"dup.txt": texts["003.txt"], "empty.txt": "", "zero.txt": b"\0", "bad.txt": b"a\xff"}
    return write_folder(tmp_path / "in", texts)
