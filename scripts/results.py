"""Results of the measuring scripts: numbers rounded, and JSON that is there whole or not at all."""

import json
from pathlib import Path
from typing import Any

from hf_posenc.checkpoints.files import replaced


def rounded(value: Any, digits: int = 4) -> Any:
    """Return numbers with so many digits, in any nested lists and dicts."""
    if isinstance(value, dict):
        return {key: rounded(each, digits) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each, digits) for each in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def read(path: Path, default: dict[str, Any]) -> dict[str, Any]:
    """Return the results in a file, or the default where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else default


def write(path: Path, results: dict[str, Any], indent: int | None = 1) -> None:
    """Write results to a file."""
    with replaced(path) as partial:
        partial.write_text(json.dumps(results, indent=indent) + "\n", encoding="utf-8")
