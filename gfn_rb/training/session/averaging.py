"""One gradient for several ranks: the mean of what each of them found."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor, nn

from gfn_rb.errors import TransportError, TransportTimeoutError
from gfn_rb.shapes import Float
from gfn_rb.transports import SendHandle, Transport

log = logging.getLogger(__name__)

GRADIENT_TAG = 20
_HEAD = struct.Struct("<q")
_STRETCH = 0.1  # seconds between looks at whether this rank is to stop


class _Kind(IntEnum):
    GRADIENT = 1  # to the first rank; the mean, from it
    DONE = 2  # there will be no more


class GradientAverage:
    r"""Replaces the gradients of each rank by their mean over ranks, :math:`\frac1n\sum_r g_r`.

    The first rank adds up what the others send it, in double precision and in the order of ranks,
    and sends the mean back: all ranks take the same step, bit for bit. In the first round the
    parameters are averaged likewise, so that all start from the same ones.

    A rank that has no more gradients to give, is lost, or stays silent too long is left out from
    then on, and the rest go on averaging. When the first rank is lost or done, each of the others
    goes on with its own gradients. What is lost is logged.

    Args:
        transport: between the ranks.
        ranks: those that train; the first of them adds up.
        timeout: how long the first rank waits for another, in seconds.
        stopped: whether this rank was told to stop. Then it leaves rather than wait for others.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        timeout: float = 60.0,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._transport = transport
        self._root, *self._others = sorted(ranks)
        self._timeout, self._stopped = timeout, stopped
        self._patience = timeout * len(ranks)  # the first rank may have waited for each other
        self._rounds = 0
        self._name = f"rank {transport.rank}"

    @property
    def ranks(self) -> list[int]:
        """The ranks whose gradients are averaged, as far as this one knows."""
        return [self._root, *self._others]

    def __call__(self, loss: nn.Module) -> None:
        """Average the gradients.

        Args:
            loss: has the parameters, with their gradients. Those without count as 0.
        """
        if not self._others:
            return
        parameters = [p for p in loss.parameters() if p.requires_grad]
        own = _flat([_gradient(p) for p in parameters])
        if self._rounds == 0:
            own = torch.cat([own, _flat(list(parameters))])
        self._rounds += 1
        mean = self._lead(own) if self._transport.rank == self._root else self._follow(own)
        if mean is not None:
            _write(mean, parameters)

    def close(self) -> None:
        """Tell the others that there will be no more gradients from here."""
        is_root = self._transport.rank == self._root
        for rank in self._others if is_root else [self._root] if self._others else []:
            self._send(rank, _Kind.DONE)
        self._others = []

    def _lead(self, own: Float[Tensor, "p"]) -> Float[Tensor, "p"]:
        total, present = own.double(), []
        for rank in list(self._others):
            values = self._receive(rank, self._timeout)
            if values is None:
                self._send(rank, _Kind.DONE)  # in case it comes back
            else:
                total += values
                present.append(rank)
        mean = (total / (1 + len(present))).to(own.dtype)
        for rank, handle in [(r, self._send(r, _Kind.GRADIENT, mean)) for r in present]:
            self._wait(rank, handle, self._timeout)
        return mean

    def _follow(self, own: Float[Tensor, "p"]) -> Float[Tensor, "p"] | None:
        self._wait(self._root, self._send(self._root, _Kind.GRADIENT, own), self._patience)
        mean = self._receive(self._root, self._patience)
        if mean is None:
            self._others = []
        return mean

    # Messages.

    def _send(self, rank: int, kind: _Kind, values: Tensor | None = None) -> SendHandle | None:
        content = [] if values is None else [values.numpy()]
        try:
            return self._transport.isend([_HEAD.pack(kind), *content], rank, GRADIENT_TAG)
        except TransportError:
            return None  # it is gone, which whoever waits for it is told

    def _wait(self, rank: int, handle: SendHandle | None, timeout: float) -> None:
        """Wait until a rank has taken a message, or has sent one: it has it, or has left."""
        with suppress(TransportError):  # likewise
            if handle is not None:
                self._within(timeout, lambda s: _has_left(handle, s) or self._has_come(rank, 0.0))

    def _within(self, timeout: float, happened: Callable[[float], bool]) -> bool:
        """Wait for something, in short stretches; return whether it happened.

        Args:
            timeout: how long, in seconds; less where this rank is told to stop.
            happened: waits for so many seconds, and returns whether it happened.
        """
        end = time.monotonic() + timeout
        while not happened(max(0.0, min(_STRETCH, end - time.monotonic()))):
            if self._stopped() or time.monotonic() >= end:
                return False
        return True

    def _receive(self, rank: int, timeout: float) -> Float[Tensor, "p"] | None:
        """Return the next values of a rank; None if there are none, and none are expected then."""
        try:
            if not self._within(timeout, lambda seconds: self._has_come(rank, seconds)):
                self._give_up(rank, timeout)
                return None
            data = self._transport.recv(rank, GRADIENT_TAG).data
        except TransportError as error:
            self._leave_out(rank, str(error))
            return None
        (kind,) = _HEAD.unpack_from(data.data)
        if kind == _Kind.GRADIENT:
            return torch.from_numpy(data[_HEAD.size :].view(np.float32))
        if rank in self._others:
            self._others.remove(rank)
        return None

    def _has_come(self, rank: int, seconds: float) -> bool:
        return self._transport.probe(rank, GRADIENT_TAG, seconds) is not None

    def _give_up(self, rank: int, timeout: float) -> None:
        if self._stopped():
            self.close()
        else:
            self._leave_out(rank, f"it sent no gradients within {timeout:g} s")

    def _leave_out(self, rank: int, why: str) -> None:
        if rank in self._others:
            self._others.remove(rank)
            rest = f"the mean of {1 + len(self._others)} ranks"
        else:
            rest = "those of each rank"
        log.warning(
            "%s: rank %d is left out: %s; going on with gradients that are %s",
            *(self._name, rank, why, rest),
        )


def _has_left(handle: SendHandle, seconds: float) -> bool:
    try:
        handle.wait(seconds)
    except TransportTimeoutError:
        return False
    return True


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _flat(tensors: Sequence[Tensor]) -> Float[Tensor, "p"]:
    return torch.cat([t.detach().reshape(-1) for t in tensors]).to("cpu", torch.float32)


@torch.no_grad()
def _write(mean: Float[Tensor, "p"], parameters: Sequence[Tensor]) -> None:
    """Write gradients, and the parameters where they follow."""
    sizes = [p.numel() for p in parameters]
    parts = mean.split(sizes if len(mean) == sum(sizes) else [*sizes, *sizes])
    for parameter, part in zip(parameters, parts, strict=False):
        parameter.grad = part.to(parameter).view_as(parameter).clone()
    for parameter, part in zip(parameters, parts[len(sizes) :], strict=False):
        parameter.copy_(part.view_as(parameter))
