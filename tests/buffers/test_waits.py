"""Draws that wait for rows, and counted draws: of TorchRL after 0.14.1."""

import threading

import pytest
from factories import TORCHRL_WAITS, rows

from gfn_rb import (
    MergedReplayBuffer,
    SoftmaxRewardSampler,
    fifo_buffer,
    load_checkpoint,
    reward_prioritized_buffer,
    save_checkpoint,
)

pytestmark = [
    pytest.mark.skipif(not TORCHRL_WAITS, reason="draws of this version of TorchRL do not wait"),
    # TorchRL, of a draw of another size than the buffer's
    pytest.mark.filterwarnings("ignore:Got conflicting batch_sizes:UserWarning"),
]
BUFFERS = {
    "fifo": lambda: fifo_buffer(10, batch_size=4),
    "unique": lambda: reward_prioritized_buffer(10, unique="x", batch_size=4),
    "softmax": lambda: fifo_buffer(10, batch_size=4, sampler=SoftmaxRewardSampler()),
    "counted": lambda: fifo_buffer(10, batch_size=4, statistics=True),
    "prefetched": lambda: fifo_buffer(10, batch_size=4, prefetch=2),
}


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("name", BUFFERS)
def test_a_draw_waits_for_rows(name, batch_size) -> None:
    rb = BUFFERS[name]()
    with pytest.raises(TimeoutError):
        rb.sample(batch_size, wait=True, timeout=0.01)
    writer = threading.Timer(0.05, rb.extend, [rows([0.0] * 5)])
    writer.start()
    drawn = rb.sample(batch_size, wait=True, timeout=30)
    assert len(drawn) == (batch_size or 4)
    writer.join()
    cancel = threading.Event()
    cancel.set()
    rb.empty()
    with pytest.raises(RuntimeError, match="cancelled"):
        rb.sample(batch_size, wait=True, cancel_event=cancel)


@pytest.mark.parametrize("name", BUFFERS)
def test_draws_are_counted(name) -> None:
    rb = BUFFERS[name]()
    rb.extend(rows([0.0] * 5))
    rb.sample()
    rb.sample(3)
    stats = rb.stats()
    assert (stats["sample_calls"], stats["samples_returned"]) == (2, 7)


def test_a_merged_draw_waits_and_counts() -> None:
    members = [fifo_buffer(10, sampler=SoftmaxRewardSampler()) for _ in range(2)]
    rb = MergedReplayBuffer(*members, p="mass", batch_size=4)
    with pytest.raises(TimeoutError):
        rb.sample(wait=True, timeout=0.01)
    members[0].extend(rows([0.0] * 5))
    assert len(rb.sample(wait=True, timeout=30)) == 4
    assert rb.stats()["samples_returned"] == 4


@pytest.mark.parametrize("way", ["checkpoint", "state_dict", "dumps"])
@pytest.mark.parametrize("name", BUFFERS)
def test_counts_of_draws_are_restored(tmp_path, name, way) -> None:
    rb, other = BUFFERS[name](), BUFFERS[name]()
    rb.extend(rows([0.0] * 5))
    rb.sample()
    if way == "checkpoint":
        save_checkpoint(tmp_path / "rb", rb)
        load_checkpoint(tmp_path / "rb", other)
    elif way == "dumps":
        rb.dumps(tmp_path / "rb")
        other.loads(tmp_path / "rb")
    else:
        other.load_state_dict(rb.state_dict())
    assert other.stats() == rb.stats()
    assert other.stats()["samples_returned"] == 4
