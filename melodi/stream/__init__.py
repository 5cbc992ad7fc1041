"""Reading a text of any length in constant memory, and going on from there."""

from melodi.stream.reader import StreamReader

__all__ = ["StreamReader"]
