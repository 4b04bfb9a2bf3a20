"""Compact rows against plain ones: bytes, and the time to write and to draw.

    python -m benchmarks.compact [--quick] [--parts ...] [--json PATH]

    --quick        a smoke run in seconds; its figures mean nothing
    --parts ...    some of: memory extend sample both
    --json PATH    also write the figures to a file

Rows are trajectories of a uniform policy, padded to the longest the environment has, with a
log-reward each. Both buffers are full, keep the newest and draw uniformly, 128 rows at a time, on
one thread; see :mod:`benchmarks.timing` for how a ratio is measured. In the part "memory" the
columns of times hold bytes per row. The exit status is 0 whatever the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from benchmarks.timing import Contender, Effort, Result, compare, row, run_parts
from benchmarks.workloads import BATCH
from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.buffers.compact import StateForm
from gfn_rb.envs import BitSequence, ConditionalHyperGrid, GFNEnv, HyperGrid, TFBind8

ENVS: dict[str, Callable[[], GFNEnv]] = {
    "TFBind8": TFBind8,
    "HyperGrid 16-d": lambda: HyperGrid(16, 8),
    "BitSequence 120, words of 4 bits": lambda: BitSequence(word_bits=4),
    "ConditionalHyperGrid 8-d": lambda: ConditionalHyperGrid(8, 8),
    # Its 256 words and what stands for none need more than a byte.
    "BitSequence 120, words of 8 bits": BitSequence,
}
BOUNDED = list(ENVS)[:4]
POOL = 2048


@dataclass(frozen=True)
class Scale:
    """How large and how long the comparisons are.

    Args:
        capacity: rows of the full buffers.
        effort: of each comparison.
    """

    capacity: int
    effort: Effort


FULL = Scale(20_000, Effort(seconds=6, most=2000, warmup=20))
QUICK = Scale(2_000, Effort(seconds=0.2, warmup=2))


def memory(scale: Scale) -> list[Result]:
    """Compare the bytes of a row."""
    results = []
    for name, env in _envs():
        plain = _bytes(env)
        for form, bound in (("narrow", 1 / 7.5), ("rebuild", 1 / 40)):
            held = _bytes(env, form)
            results.append(_exact(f"bytes, {form}, {name}", held, plain, _bound(name, bound)))
    grid = HyperGrid(16, 5)
    rb = reward_prioritized_buffer(100_000, max_length=60, compact="rebuild", env=grid)
    held, limit = _stored(rb, _rows(grid, 60)) - 4 * 100_000, 12e6
    results.append(_exact("100k trajectories of 60 steps x 16, against 12 MB", held, limit, 1.0))
    return results


def extend(scale: Scale) -> list[Result]:
    """Compare writing 128 rows."""
    return _compared(scale, "extend", None, lambda rb, pool: Contender(rb.extend, pool))


def sample(scale: Scale) -> list[Result]:
    """Compare drawing 128 rows."""
    return _compared(scale, "sample", 1.5, lambda rb, _: Contender(lambda _: rb.sample(BATCH)))


def both(scale: Scale) -> list[Result]:
    """Compare writing 128 rows and then drawing as many, as a step of training does."""
    name = "extend and sample"
    return _compared(scale, name, None, lambda rb, pool: Contender(_stepping(rb), pool))


def _compared(
    scale: Scale,
    what: str,
    rebuild: float | None,
    contender: Callable[[TensorDictReplayBuffer, Callable[[], Any]], Contender],
) -> list[Result]:
    """Compare buffers of compact rows with ones of plain rows, in all environments.

    Args:
        scale: of the comparison.
        what: is compared.
        rebuild: the bound of rows without states; that of narrow ones is 1.05.
        contender: is made of a buffer, and of what returns rows to write to it.
    """
    results = []
    for name, env in _envs():
        for form, bound in (("narrow", 1.05), ("rebuild", rebuild)):
            ours, peer, pool = _pair(scale, env, form)
            mine, its = (contender(rb, partial(_some, pool)) for rb in (ours, peer))
            bound = _bound(name, bound)
            label = f"{what}, {form}, {name}"
            results.append(compare(label, scale.capacity, mine, its, scale.effort, bound))
    return results


PARTS = {"memory": memory, "extend": extend, "sample": sample, "both": both}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparisons and print the table.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    run_parts("Compact rows against plain ones.", PARTS, FULL, QUICK, arguments)


# Rows and buffers.


def _envs() -> list[tuple[str, GFNEnv]]:
    return [(name, make()) for name, make in ENVS.items()]


def _bound(name: str, bound: float | None) -> float | None:
    return bound if name in BOUNDED else None


def _rows(env: GFNEnv, n_steps: int, n: int = BATCH) -> TensorDict:
    """Return n trajectories of a uniform policy, of at most so many steps."""
    state, actions = env.source(n), []
    for step in range(n_steps):
        mask = env.forward_mask(state)
        over = ~mask.any(1)
        mask[over, -1] = True
        if step == n_steps - 1:
            mask[:, :-1] = False
        action = torch.multinomial(mask.float(), 1)[:, 0].where(~over, env.dummy_action)
        state = env.forward_step(state, action)
        actions.append(action)
    action = torch.stack(actions, 1)
    length = (action >= 0).sum(1)
    rows = {"state": env.states_of(action, length), "action": action, "length": length}
    condition = env.sample_condition(n)
    if condition is not None:
        rows["condition"] = condition
    return TensorDict({**rows, "log_reward": torch.randn(n)}, [n])


def _buffer(env: GFNEnv, capacity: int, form: StateForm | None = None) -> TensorDictReplayBuffer:
    rb = fifo_buffer(capacity, max_length=env.max_length, compact=form, env=env)
    rb.extend(_rows(env, env.max_length, min(capacity, POOL)))
    return rb


def _pair(
    scale: Scale, env: GFNEnv, form: StateForm
) -> tuple[TensorDictReplayBuffer, TensorDictReplayBuffer, TensorDict]:
    """Return a full compact buffer, a full plain one, and rows to write."""
    ours, peer = _buffer(env, scale.capacity, form), _buffer(env, scale.capacity)
    pool = _rows(env, env.max_length, POOL)
    for rb in (ours, peer):
        while len(rb) < scale.capacity:
            rb.extend(pool)
    return ours, peer, pool


def _stepping(rb: TensorDictReplayBuffer) -> Callable[[TensorDict], None]:
    def step(rows: TensorDict) -> None:
        rb.extend(rows)
        rb.sample(BATCH)

    return step


def _some(pool: TensorDict) -> TensorDict:
    return pool[torch.randint(POOL, (BATCH,))]


def _stored(rb: TensorDictReplayBuffer, rows: TensorDict) -> int:
    """Return the bytes of a storage once some rows are in it: it is allocated whole."""
    rb.extend(rows)
    return (
        sum(leaf.nbytes for leaf in rb.storage[:].values(True, True))
        * rb.storage.max_size
        // len(rb)
    )


def _bytes(env: GFNEnv, form: StateForm | None = None) -> float:
    # Writers that keep the newest store each row's slot with it, 8 bytes that are not the row's.
    rb = reward_prioritized_buffer(BATCH, max_length=env.max_length, compact=form, env=env)
    return _stored(rb, _rows(env, env.max_length)) / BATCH


def _exact(name: str, ours: float, peer: float, bound: float | None) -> Result:
    result = Result(name, 1, ours, peer, ours / peer, ours / peer, ours / peer, 1, bound)
    print(row(result), flush=True)
    return result


if __name__ == "__main__":
    main()
