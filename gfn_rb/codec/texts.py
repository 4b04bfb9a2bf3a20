"""JSON that arrived, or shall be sent, within bounds."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

MAX_DEPTH = 512  # well within what Python can recurse; values of checkpoints reach 400

_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().decode
_NO_BRACKETS = re.compile(rb'(?:[^][{}"]+|"(?:[^"\\]|\\.)*")+')


def to_text(value: Any) -> bytes:
    """Return a value as JSON. NaN and infinities pass.

    Raises:
        ValueError: it is something else, or nested too deep.
    """
    try:
        text = _encode(value).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    _check_depth(text)
    return text


def from_text(text: bytes | memoryview) -> Any:
    """Return the value that a JSON text means.

    Raises:
        ValueError: it means nothing, or is nested too deep.
    """
    text = bytes(text)
    _check_depth(text)
    try:
        return _decode(str(text, "utf8"))
    except RecursionError as error:  # called from deep down
        raise ValueError(str(error)) from None


def one_line(error: Exception) -> str:
    """Return an error's type and message in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _check_depth(text: bytes) -> None:
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return
    # Only brackets outside of strings count. Of [ ] { }, those that open have the bit of 2.
    brackets = np.frombuffer(_NO_BRACKETS.sub(b"", text), np.uint8)
    depth = int(np.cumsum((brackets & 2).astype(np.int64) - 1).max(initial=0))
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested {depth} deep; expected at most {MAX_DEPTH}")
