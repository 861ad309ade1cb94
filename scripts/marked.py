"""Parts of a Markdown file that a script writes: what stands between two comments."""

from pathlib import Path


def renewed(text: str, begin: str, end: str, part: str) -> str:
    """`text` with what stands between the two comments renewed; ValueError unless it has both, once each, in order."""
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last) or begin in after or end in after:
        raise ValueError(f"expected one {begin} followed by one {end}")
    return f"{before}{begin}\n{part}\n{end}{after}"


def write(page: Path, begin: str, end: str, part: str, *, check: bool) -> bool:
    """Renew that part of a file, or with `check` only look; whether it was what it has to be."""
    text = page.read_text(encoding="utf-8")
    new = renewed(text, begin, end, part)
    if new != text and not check:
        page.write_text(new, encoding="utf-8")
    return new == text
