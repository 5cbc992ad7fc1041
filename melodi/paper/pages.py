"""A report as blocks, and the blocks as Markdown or as one HTML page that needs no other file."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    """Columns from the left that are words and not figures."""


@dataclass(frozen=True)
class Picture:
    path: Path
    """Beside the page."""
    caption: str


Block = Heading | Paragraph | Table | Picture

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff;
  max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { text-align: left; border-bottom: 2px solid #555; vertical-align: bottom; }
td.figure, th.figure { text-align: right; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; }
figcaption, p.small { color: #555; font-size: 0.9rem; }
td.yes { color: #0072b2; font-weight: bold; } td.no { color: #b34700; font-weight: bold; }
"""
MARKS = {"✓": "yes", "✗": "no"}


def to_markdown(title: str, blocks: Sequence[Block]) -> str:
    return "\n\n".join([f"# {title}", *[markdown(block) for block in blocks]]) + "\n"


def markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"## {block.text}"
    if isinstance(block, Paragraph):
        return block.text
    if isinstance(block, Picture):
        return f"![{block.caption}]({block.path.name})"
    sides = [":--" if i < block.words else "--:" for i in range(len(block.columns))]
    lines = [block.columns, sides, *block.rows]
    return "\n".join(f"| {' | '.join(escaped(cell) for cell in line)} |" for line in lines)


def escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def to_html(title: str, blocks: Sequence[Block]) -> str:
    body = "\n".join(html_of(block) for block in blocks)
    name = html.escape(title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{name}</h1>\n"
        f"{body}\n</body>\n</html>\n"
    )


def html_of(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h2>{html.escape(block.text)}</h2>"
    if isinstance(block, Paragraph):
        return f"<p>{html.escape(block.text)}</p>"
    if isinstance(block, Picture):
        data = base64.b64encode(block.path.read_bytes()).decode()
        caption = html.escape(block.caption)
        image = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
        return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"
    head = "".join(cell("th", i, text, block.words) for i, text in enumerate(block.columns))
    lines = [
        "".join(cell("td", i, text, block.words) for i, text in enumerate(row))
        for row in block.rows
    ]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'


def cell(tag: str, column: int, text: str, words: int) -> str:
    names = [MARKS[text]] if text in MARKS else ["figure"] if column >= words else []
    attribute = f' class="{names[0]}"' if names else ""
    return f"<{tag}{attribute}>{html.escape(text)}</{tag}>"
