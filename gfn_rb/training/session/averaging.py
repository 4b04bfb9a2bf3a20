"""One gradient for several ranks: the mean of what each of them computed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from gfn_rb.codec import decode_frame, encode_frame
from gfn_rb.errors import TransportError, TransportTimeoutError, WireError
from gfn_rb.remote.protocol.membership import LOST, Membership
from gfn_rb.shapes import Float
from gfn_rb.transports import SendHandle, Transport
from gfn_rb.transports.deadline import Deadline, ShutdownBudget

log = logging.getLogger(__name__)

GRADIENT_TAG = 20
_GRADIENT = 1  # kind of all messages: gradients, or their mean; without rows, there are no more


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
        shutdown: tells whether this rank is to stop. Then it leaves rather than wait for others.

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
    ) -> None:
        self._transport, self._shutdown = transport, shutdown
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

    def close(self) -> None:
        """Tell the others that there will be no more gradients from here."""
        for rank in self.peers.present:
            self._send(rank)
            self.peers.leave(rank)

    def _lead(self, own: Float[Tensor, "p"]) -> Float[Tensor, "p"]:
        # In double precision: the mean of equal numbers is then exactly that number.
        total, given = own.double(), []
        for rank in self.peers.present:
            values = self._receive(rank)
            if values is None:
                self._send(rank)  # in case it comes back
            else:
                total += values
                given.append(rank)
        mean = (total / (1 + len(given))).to(own.dtype)
        # All sends are begun before the first is waited for: MPI moves them side by side.
        for rank, handle in [(r, self._send(r, mean)) for r in given]:
            self._wait(rank, handle)
        return mean

    def _follow(self, own: Float[Tensor, "p"]) -> Float[Tensor, "p"] | None:
        (root,) = self.peers.present
        self._wait(root, self._send(root, own))
        return self._receive(root)

    # Messages.

    def _send(self, rank: int, values: Tensor | None = None) -> SendHandle | None:
        rows = None if values is None else TensorDict({"values": values.unsqueeze(0)}, [1])
        try:
            frame = encode_frame(_GRADIENT, rows, None, self._transport.secret)
            return self._transport.isend(frame, rank, GRADIENT_TAG)
        except TransportError:
            return None  # it is gone, which whoever waits for it is told

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
                    self._leave_out(rank, f"it sent no gradients {deadline}")
                else:
                    self.close()
                return None
            data = self._transport.recv(rank, GRADIENT_TAG).data
            frame = decode_frame(data, self._transport.secret)
        except (TransportError, WireError) as error:
            self._leave_out(rank, str(error))
            return None
        if frame.rows is not None:
            values: Tensor = frame.rows["values"][0]
            return values
        self.peers.leave(rank)
        return None

    def _has_come(self, rank: int, seconds: float) -> bool:
        return self._transport.probe(rank, GRADIENT_TAG, seconds) is not None

    def _leave_out(self, rank: int, why: str) -> None:
        self.peers.leave(rank, LOST, why)
        n_left = 1 + len(self.peers.present)
        log.warning(
            "rank %d: rank %d is left out: %s; going on with gradients that are %s",
            *(self._transport.rank, rank, why),
            f"the mean of {n_left} ranks" if self._is_root else "those of each rank",
        )


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
    # Cloned: whoever clips gradients in place must not change a message that is on its way.
    for parameter, part in zip(parameters, parts, strict=False):
        parameter.grad = part.to(parameter).view_as(parameter).clone()
    for parameter, part in zip(parameters, parts[len(sizes) :], strict=False):
        parameter.copy_(part.view_as(parameter))
