"""Buffers across ranks: workers send items to managers, which score, keep and share them."""

from gfn_rb.codec.frames import Frame, decode_frame, encode_frame
from gfn_rb.gone import without_gone
from gfn_rb.remote.baseline import Baseline, BaselineFilter
from gfn_rb.remote.exchange import ManagerExchange
from gfn_rb.remote.manager import ReplayBufferManager
from gfn_rb.remote.messages import Reply, SenderStatistics, WorkerStatistics
from gfn_rb.remote.metrics import Metric, MetricsServer
from gfn_rb.remote.ranks import RankRoles
from gfn_rb.remote.subscription import Subscription
from gfn_rb.remote.worker import ManagerQueries, ReplayBufferWorker

__all__ = [
    "Baseline",
    "BaselineFilter",
    "Frame",
    "ManagerExchange",
    "ManagerQueries",
    "Metric",
    "MetricsServer",
    "RankRoles",
    "ReplayBufferManager",
    "ReplayBufferWorker",
    "Reply",
    "SenderStatistics",
    "Subscription",
    "WorkerStatistics",
    "decode_frame",
    "encode_frame",
]

__getattr__ = without_gone(__name__)
