"""The rank that keeps the best of everyone."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer

from gfn_rb.checkpoint import load_checkpoint, load_state, save_checkpoint, save_state
from gfn_rb.errors import ArgumentError, CheckpointError, GfnRbError, PeerLostError
from gfn_rb.keys import LOG_REWARD
from gfn_rb.remote.baseline import Baseline, BaselineKeeper, MinBaseline, Summary
from gfn_rb.remote.feed import Subscriber
from gfn_rb.remote.link import Link, Parcel
from gfn_rb.remote.protocol import DATA_TAG, METADATA_TAG, PEER_TAG, PROTOCOL, Kind, described
from gfn_rb.remote.scores import Scores, checked_scores
from gfn_rb.remote.statistics import SenderStatistics
from gfn_rb.remote.store import Store
from gfn_rb.stopwatch import Stopwatch
from gfn_rb.transports.base import Transport

log = logging.getLogger(__name__)

PHASES = ("idle", "receive", "store", "score", "reply", "checkpoint")
_TICK = 0.5  # seconds between looks at what no message tells: silent workers, due checkpoints
_GRACE = 5.0  # seconds that answers have to leave at the end
