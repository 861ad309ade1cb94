#!/usr/bin/env python3
"""Looks into the wheel and the source distribution of one folder: what has to be in them, and what must not.

python scripts/check_distribution.py dist
"""

import argparse
import email
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
MAY_BE_BESIDE = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"}
"""Files beside the package in a source distribution."""


def package_files() -> set[str]:
    """Files of the package in this checkout."""
    files = (path for path in (ROOT / "hf_posenc").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files}


def compare(kind: str, names: Iterable[str], beside: set[str]) -> list[str]:
    """What is wrong with the names of an archive's files."""
    wanted = package_files()
    names = {name for name in names if ".dist-info/" not in name}
    missing, others = wanted - names, names - wanted - beside
    return [f"{kind}: {name} is missing" for name in sorted(missing)] + [
        f"{kind}: {name} does not belong there" for name in sorted(others)
    ]


def relative_links(metadata: str) -> list[str]:
    """Links of the long description that lead nowhere on a package index."""
    text = str(email.message_from_string(metadata).get_payload())
    return re.findall(r"\]\((?!https://|#)([^)]+)\)", text)


def problems(folder: Path) -> list[str]:
    """All that is wrong with what a folder holds; ValueError unless it is one wheel and one source distribution."""
    wheels, sources = list(folder.glob("*.whl")), list(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sources) != 1:
        raise ValueError(
            f"{folder} holds {len(wheels)} wheels and {len(sources)} source distributions, not one of each"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
        found = compare("wheel", names, set())
        metadata = next(name for name in names if PurePosixPath(name).match("*.dist-info/METADATA"))
        entry_points = metadata.replace("METADATA", "entry_points.txt")
        described = wheel.read(metadata).decode()
        if entry_points not in names or "hf-posenc = hf_posenc.cli:main" not in wheel.read(entry_points).decode():
            found.append("wheel: the command hf-posenc is missing")
    with tarfile.open(sources[0]) as source:
        inside = [member.name.split("/", 1)[1] for member in source.getmembers() if member.isfile()]
        found += compare("source distribution", inside, MAY_BE_BESIDE)
    links = relative_links(described)
    return found + [f"description: {link} is a relative link" for link in links]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Look into the distributions of a folder.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    found = problems(folder)
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        for path in sorted(folder.iterdir()):
            print(f"{path.name}: {path.stat().st_size / 1000:,.0f} kB, as it should be")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
