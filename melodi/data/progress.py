"""What is seen of work that takes long."""

import sys
from typing import Any


def progress_bar(doing: str, num_bytes: int | None) -> Any:
    """Appears on a terminal when the work takes more than a second or two."""
    from tqdm import tqdm

    return tqdm(
        desc=doing,
        total=num_bytes,
        unit="B",
        unit_scale=True,
        delay=1.5,
        file=sys.stderr,
        disable=None,
    )
