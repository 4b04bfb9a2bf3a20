"""What managers and workers say to each other."""

from __future__ import annotations

import traceback
from enum import IntEnum
from typing import Any, Final

from gfn_rb.errors import RemoteError

PROTOCOL: Final = 1  # raised by whatever makes two sides misunderstand each other

DATA_TAG: Final = 0  # items, scores and fed items
METADATA_TAG: Final = 1  # questions and answers that must not be confused with these
PEER_TAG: Final = 2  # between managers


class Kind(IntEnum):
    """What a frame is: who sends it, and what it carries."""

    HELLO = 1  # worker: its terms
    WELCOME = 2  # manager: answers HELLO
    ITEMS = 3  # worker: rows, and whether to store them
    SCORES = 4  # manager: answers ITEMS; per-row scores as rows
    FETCH = 5  # worker: asks for items
    FEED = 6  # manager: items; after SCORES that announce them, and in answer to FETCH
    GOODBYE = 7  # worker: will send no more
    BYE = 8  # manager: answers GOODBYE
    ERROR = 9  # manager: refuses a frame
    METADATA = 10  # anyone: question; manager: answer
    CHECKPOINT = 11  # anyone: request; manager: answer
    SUMMARY = 12  # manager to manager: what it knows of rewards


_FRAMES = 4
_CHARACTERS = 2000


def describe_error(error: BaseException) -> dict[str, str]:
    """Return an error as plain values: its type, message, and the last steps on the way to it.

    Args:
        error: as caught.
    """
    steps = traceback.format_tb(error.__traceback__)[-_FRAMES:]
    return {
        "type": type(error).__name__,
        "message": str(error)[:_CHARACTERS],
        "traceback": "".join(steps)[-_CHARACTERS:],
    }


def remote_error(rank: int, values: Any) -> RemoteError:
    """Return the error that :func:`describe_error` made of another rank's.

    Args:
        rank: of the other.
        values: what it sent.
    """
    said = values if isinstance(values, dict) else {}
    message = f"{said.get('type', 'an error')}: {said.get('message', 'not described')}"
    return RemoteError(rank, message, str(said.get("traceback", "")))


def one_line(text: str) -> str:
    """Return a text in one line, of some hundred characters at most.

    Args:
        text: any.
    """
    return " ".join(text.split())[:500]
