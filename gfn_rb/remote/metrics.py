"""Metrics of managers and workers: as text for Prometheus over HTTP, and as plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gfn_rb.errors import ArgumentError


@dataclass(frozen=True)
class Metric:
    """One number of a manager or worker, at the time of the call.

    Attributes:
        name: name without the prefix ``gfn_rb_``.
        value: the number.
        text: what it counts, with its unit.
        labels: what tells it from others of the same name.
        kind: ``"counter"`` for what only grows, ``"gauge"`` for what may fall.
    """

    name: str
    value: int | float
    text: str
    labels: Mapping[str, str] = field(default_factory=dict)
    kind: Literal["counter", "gauge"] = "gauge"


def as_numbers(metrics: Sequence[Metric]) -> dict[str, int | float]:
    """Return metrics as numbers by name, such as ``rows{outcome=stored,sender=1}``."""
    found: dict[str, int | float] = {}
    for each in metrics:
        labels = ",".join(f"{name}={value}" for name, value in sorted(each.labels.items()))
        found[f"{each.name}{{{labels}}}" if labels else each.name] = each.value
    return found


class MetricsServer:
    """Server of metrics as text for Prometheus, in a thread of its own.

    Each request calls ``metrics`` in that thread. The server ends with :meth:`close` or with its
    ``with`` block. It has no access control: keep it on the local address, or behind a firewall.
    It needs the extra ``metrics`` (prometheus_client).

    Args:
        metrics: callable that returns the metrics, such as ``manager.metrics`` or
            ``worker.metrics``.
        rank: rank that all metrics are labelled with.
        port: port to listen on; 0 for any free one.
        address: address to listen on. Default: this machine alone can connect.

    Attributes:
        port: port that the server listens on.

    Raises:
        ArgumentError: the port is taken or not allowed, or prometheus_client is not installed.

    Examples:
        >>> with MetricsServer(manager.metrics, manager.transport.rank, port=9100):
        ...     manager.run()
    """

    def __init__(
        self,
        metrics: Callable[[], Sequence[Metric]],
        rank: int,
        port: int = 0,
        address: str = "127.0.0.1",
    ) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            message = "MetricsServer needs prometheus_client: pip install 'gfn_rb[metrics]'"
            raise ArgumentError(message) from error
        self._metrics, self._rank = metrics, str(rank)
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]  # it collects
        try:
            server = prometheus_client.start_http_server(port, address, registry)
        except (OSError, OverflowError, ValueError) as error:
            message = f"port {port!r} of {address!r} cannot be listened on for metrics: {error}"
            raise ArgumentError(message) from error
        self._server, self._thread = server
        self.port: int = self._server.server_port

    def collect(self) -> Iterator[Any]:
        """Return the metrics as prometheus_client takes them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        # One family for each name, as the text format demands: its lines follow one another.
        for each in self._metrics():
            name = f"gfn_rb_{each.name}"
            if name not in families:
                family = CounterMetricFamily if each.kind == "counter" else GaugeMetricFamily
                families[name] = family(name, each.text, labels=["rank", *each.labels])
            families[name].add_metric([self._rank, *each.labels.values()], each.value)
        yield from families.values()

    def describe(self) -> list[Any]:
        """Return nothing: what there is to collect is known once it is collected."""
        return []

    def close(self) -> None:
        """Stop the server. A second call does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
