"""One gradient for several ranks: the mean of what each of them computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from gfn_rb.codec import decode_frame, encode_frame
from gfn_rb.errors import TransportError, TransportTimeoutError, WireError, WorkerError
from gfn_rb.remote.protocol.membership import LOST, Membership
from gfn_rb.shapes import Float
from gfn_rb.training.session.joining import RefusedError
from gfn_rb.transports import SendHandle, Transport
from gfn_rb.transports.deadline import Deadline, ShutdownBudget

GRADIENT_TAG = 20
# Kinds of messages: gradients or their mean; no more, as all steps are taken, as the sender stops,
# or as a rank is lost.
_GRADIENT, _FINISHED, _STOPPED, _FAILED = 1, 2, 3, 4


class GradientAverage:
    r"""Replaces the gradients of each rank by their mean over ranks, :math:`\frac1n\sum_r g_r`.

    The first rank adds up what the others send it, in double precision and in the order of ranks,
    and sends the mean back: all ranks take the same step, bit for bit. In the first round the
    parameters are averaged likewise, so that all start from the same ones.

    Where a rank is lost, or stays silent too long, all others fail: going on without it, they would
    save steps that it never takes, and the run could not be resumed. Where a rank is told to stop,
    all stop. A rank that has taken all of its steps is left out.

    Args:
        transport: between the ranks.
        ranks: those that train; the first of them adds up.
        timeout: how long the first rank waits for another, in seconds.
        shutdown: tells whether this rank is to stop. Then it leaves rather than wait for others.
        stop: called where another rank has stopped.
        advice: end of the message that a rank is lost.

    Attributes:
        peers: the ranks that this one exchanges gradients with: on the first rank all others, on
            each of these the first.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        timeout: float = 60.0,
        shutdown: ShutdownBudget | None = None,
        stop: Callable[[], None] = lambda: None,
        advice: str = "",
    ) -> None:
        self._transport, self._shutdown = transport, shutdown
        self._stop, self._advice = stop, advice
        root, *others = sorted(ranks)
        self._is_root = transport.rank == root
        self.peers = Membership(others if self._is_root else [root])
        # The first rank may have waited for each other one before it answers.
        self._timeout = timeout if self._is_root else timeout * len(ranks)
        self._rounds = 0

    def __call__(self, loss: nn.Module) -> None:
        """Average the gradients.

        Args:
            loss: has the parameters, with their gradients. Those without count as 0.

        Raises:
            WorkerError: a rank is lost.
            RefusedError: the first rank raises that.
        """
        if not self.peers.present:
            return
        parameters = [p for p in loss.parameters() if p.requires_grad]
        own = _flat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        if self._rounds == 0:  # ranks that resume may have been saved at different steps
            own = torch.cat([own, _flat(parameters)])
        self._rounds += 1
        mean = self._lead(own) if self._is_root else self._follow(own)
        if mean is not None:
            _write(mean, parameters)

    def close(self, finished: bool = True) -> None:
        """Tell the others that there will be no more gradients from here.

        Args:
            finished: whether all steps are taken; otherwise the others stop, too.
        """
        for rank in self.peers.present:
            self._send(rank, _FINISHED if finished else _STOPPED)
            self.peers.leave(rank)

    def _lead(self, own: Float[Tensor, "p"]) -> Float[Tensor, "p"]:
        # In double precision: the mean of equal numbers is then exactly that number.
        total, given = own.double(), []
        for rank in self.peers.present:
            values = self._receive(rank)
            if values is not None:
                total += values
                given.append(rank)
        mean = (total / (1 + len(given))).to(own.dtype)
        # All sends are begun before the first is waited for: MPI moves them side by side.
        for rank, handle in [(r, self._send(r, _GRADIENT, mean)) for r in given]:
            self._wait(rank, handle)
        return mean

    def _follow(self, own: Float[Tensor, "p"]) -> Float[Tensor, "p"] | None:
        (root,) = self.peers.present
        self._wait(root, self._send(root, _GRADIENT, own))
        return self._receive(root)

    # Messages.

    def _send(
        self, rank: int, kind: int, values: Tensor | None = None, why: str = ""
    ) -> SendHandle | None:
        rows = None if values is None else TensorDict({"values": values.unsqueeze(0)}, [1])
        try:
            frame = encode_frame(kind, rows, {"why": why}, self._transport.secret)
            return self._transport.isend(frame, rank, GRADIENT_TAG)
        except TransportError:
            return None  # it is gone, as the next receive from it tells

    def _wait(self, rank: int, handle: SendHandle | None) -> None:
        """Wait until a rank has taken a message, or has sent one: it has it, or has left."""
        if handle is not None:
            with suppress(TransportError):  # likewise
                Deadline(self._timeout, self._shutdown).wait(
                    lambda seconds: _has_left(handle, seconds) or self._has_come(rank, 0.0)
                )

    def _receive(self, rank: int) -> Float[Tensor, "p"] | None:
        """Return the next values of a rank; None if there are none, and none are expected then."""
        deadline = Deadline(self._timeout, self._shutdown)
        try:
            if not deadline.wait(lambda seconds: self._has_come(rank, seconds)):
                if deadline.passed:
                    self._fail(rank, f"it sent no gradients {deadline}")
                self.close(finished=False)
                return None
            data = self._transport.recv(rank, GRADIENT_TAG).data
            frame = decode_frame(data, self._transport.secret)
        except (TransportError, WireError) as error:
            self._fail(rank, str(error))
        if frame.rows is not None:
            values: Tensor = frame.rows["values"][0]
            return values
        self.peers.leave(rank)
        if frame.kind == _FAILED:
            raise RefusedError(str(frame.meta["why"]), code=1)
        if frame.kind == _STOPPED:
            self._stop()
        return None

    def _has_come(self, rank: int, seconds: float) -> bool:
        return self._transport.probe(rank, GRADIENT_TAG, seconds) is not None

    def _fail(self, rank: int, why: str) -> NoReturn:
        """Raise that a rank is lost, and tell the others; that one, too, in case it comes back."""
        text = f"gradients cannot be averaged without rank {rank}: {why}{self._advice}"
        for peer in self.peers.present:
            self._wait(peer, self._send(peer, _FAILED, why=text))
        self.peers.leave(rank, LOST, why)
        raise WorkerError(text)


def _has_left(handle: SendHandle, seconds: float) -> bool:
    try:
        handle.wait(seconds)
    except TransportTimeoutError:
        return False
    return True


def _flat(tensors: Sequence[Tensor]) -> Float[Tensor, "p"]:
    return torch.cat([t.detach().reshape(-1) for t in tensors]).to("cpu", torch.float32)


@torch.no_grad()
def _write(mean: Float[Tensor, "p"], parameters: Sequence[Tensor]) -> None:
    """Write gradients, and the parameters where they follow."""
    sizes = [p.numel() for p in parameters]
    parts = mean.split(sizes if len(mean) == sum(sizes) else [*sizes, *sizes])
    # Cloned: clipping gradients in place must not change a message that is being sent.
    for parameter, part in zip(parameters, parts, strict=False):
        parameter.grad = part.to(parameter).view_as(parameter).clone()
    for parameter, part in zip(parameters, parts[len(sizes) :], strict=False):
        parameter.copy_(part.view_as(parameter))
