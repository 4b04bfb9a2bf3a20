"""Which of the workers that share a transport sends on which tag, so that each is answered."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from weakref import ReferenceType, WeakKeyDictionary, ref

from gfn_rb.errors import ArgumentError
from gfn_rb.remote.protocol.messages import DATA_TAGS
from gfn_rb.transports.base import Transport


@dataclass
class DataTag:
    """A tag that one worker at a time sends on, until it says goodbye or is forgotten.

    Attributes:
        number: the tag.
        n_sent: how many batches were numbered on it, by whoever held it: what comes late for one
            worker is not about a batch of the next.
        holder: the worker.
    """

    number: int
    n_sent: int = 0
    holder: ReferenceType[object] | None = None

    @property
    def is_free(self) -> bool:
        """Whether no worker holds it."""
        return self.holder is None or self.holder() is None


_TAGS: WeakKeyDictionary[Transport, list[DataTag]] = WeakKeyDictionary()


def data_tag(transport: Transport, holder: object) -> DataTag:
    """Return the tag that a worker holds, or takes now.

    Raises:
        ArgumentError: as many other workers as there are tags were not closed.
    """
    tags = _TAGS.setdefault(transport, [])
    if not tags:
        tags += map(DataTag, DATA_TAGS)
    for tag in tags:
        if tag.holder is not None and tag.holder() is holder:
            return tag
    if len(_held(tags)) == len(tags):
        raise ArgumentError(
            f"transport must have fewer than {len(tags)} workers that are not closed, got "
            f"{transport!r} that has them"
        )
    free = next(tag for tag in tags if tag.is_free)
    free.holder = ref(holder)
    return free


def release_tag(transport: Transport, holder: object) -> None:
    """Let another worker take the tag that one holds."""
    data_tag(transport, holder).holder = None


def is_shared(transport: Transport, holder: object) -> bool:
    """Return whether another worker than this one sends on the transport."""
    data_tag(transport, holder)
    return len(_held(_TAGS[transport], most=1)) > 1


def _held(tags: list[DataTag], most: int = len(DATA_TAGS) - 1) -> list[DataTag]:
    """Return the tags that are held: where they seem to be more than some, by whom one can reach.

    Workers that nobody holds any more are found only when Python looks for circles.
    """
    held = [tag for tag in tags if not tag.is_free]
    if len(held) > most:
        gc.collect()
    return [tag for tag in held if not tag.is_free]
