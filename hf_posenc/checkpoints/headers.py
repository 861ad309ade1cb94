"""Read the JSON files of a checkpoint, and the headers of its weight files. No weights are read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Names of weight files and of their index that we write."""

VARIANTS = re.compile(r"model[\w.-]*\.safetensors(\.index[\w.-]*\.json)?")
"""Names of weight files and indices, also of variants such as `model.fp16.safetensors`."""

JsonObject = dict[str, Any]
"""A JSON object. Its readers check its values, because anybody may have written them."""

_LARGEST_HEADER = 100_000_000  # bytes, as in the safetensors library


def read_json(path: Path) -> Any:
    """Return the JSON value in a file.

    Raises:
        CheckpointError: if the file is no valid JSON.
        OSError: if the file cannot be read.
    """
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"hf_posenc: {path} is no valid JSON: {error}") from error


def json_object(path: Path) -> JsonObject:
    """Return the JSON object in a file.

    Raises:
        CheckpointError: if the file holds no JSON object.
        OSError: if the file cannot be read.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"hf_posenc: {path} holds no JSON object")
    return value


def read_header(path: Path) -> JsonObject:
    """Return the header of a safetensors file: its metadata, and dtype, shape and offsets of each tensor.

    Raises:
        CheckpointError: if the file has no valid header.
        OSError: if the file cannot be read.
    """
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= min(_LARGEST_HEADER, path.stat().st_size - 8):
            raise CheckpointError(f"hf_posenc: {path} is no safetensors file: its header would have {size:,} bytes")
        text = file.read(size)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"hf_posenc: the header of {path} is no valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"hf_posenc: the header of {path} is no JSON object")
    return header


def read_tensor_headers(directory: Path) -> dict[str, JsonObject]:
    """Return the header of each tensor in a checkpoint's weight files.

    Args:
        directory: folder of a checkpoint.

    Returns:
        Tensor name -> its `dtype`, as safetensors calls it, its `shape` and its `data_offsets`. Empty without weights.

    Raises:
        CheckpointError: if a header cannot be read.
    """
    headers: dict[str, JsonObject] = {}
    for path in sorted(directory.glob("*.safetensors")):
        if WEIGHTS.fullmatch(path.name):
            headers |= read_header(path)
    headers.pop("__metadata__", None)
    for name, header in headers.items():
        has_dtype = isinstance(header, dict) and isinstance(header.get("dtype"), str)
        if not has_dtype or not isinstance(header.get("shape"), list):
            raise CheckpointError(f"hf_posenc: the weights in {directory} say no dtype and shape of {name!r}")
    return headers
