"""Rollouts against torchgfn's ``Sampler``: ``python -m benchmarks.rollout``.

    --quick        a smoke run, whose figures mean nothing
    --parts ...    some of: forward log_prob backward
    --json PATH    also write the figures to a file

HyperGrid of 16 dimensions and height 8, and BitSequence of 120 bits in words of 8, in batches of
16, 128 and 1024, on one thread. Both sides have the same network (two hidden layers of 256, one
logit per action) with the same weights and the same encoding of states, so that their trajectories
follow the same distribution, which is checked; neither records gradients; forward rollouts include
the rewards. See :mod:`benchmarks.timing` for how a ratio is measured. The exit status is 0 whatever
the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.timing import Contender, Effort, Result, compare, run_parts
from benchmarks.torchgfn_rollouts import TorchGFNSampler
from gfn_rb import Sampler, Trajectories
from gfn_rb.envs import BitSequence, GFNEnv, HyperGrid
from gfn_rb.policies import BackwardPolicy, ForwardPolicy

HIDDEN = (256, 256)
ENVIRONMENTS: dict[str, Callable[[], GFNEnv]] = {
    "HyperGrid 16-d height 8": lambda: HyperGrid(16, 8),
    "BitSequence 120 bits": lambda: BitSequence(120, 8),
}
TWICE_AS_FAST = 0.5


@dataclass(frozen=True)
class Scale:
    """How large and how long the comparisons are.

    Args:
        batches: trajectories in a batch.
        effort: for each comparison.
    """

    batches: tuple[int, ...]
    effort: Effort


FULL = Scale((16, 128, 1024), Effort(seconds=15, least=7, most=200, warmup=3))
QUICK = Scale((16,), Effort(seconds=0.3, warmup=1))


def forward(scale: Scale) -> list[Result]:
    """Compare sampling trajectories from the source, with their rewards."""
    return _from_source(scale, "forward", save_logprobs=False, bound=TWICE_AS_FAST)


def log_prob(scale: Scale) -> list[Result]:
    """Compare the same, log-probabilities of the actions kept."""
    return _from_source(scale, "forward, log-probs kept", save_logprobs=True, bound=None)


def backward(scale: Scale) -> list[Result]:
    """Compare sampling trajectories back from terminating states."""
    results = []
    for name, make_env in ENVIRONMENTS.items():
        env = make_env()
        policy = BackwardPolicy(env, HIDDEN)
        ours, peer = Sampler(policy), TorchGFNSampler(env, policy)
        for n in scale.batches:
            source = Sampler(ForwardPolicy(env, HIDDEN))
            state = source.sample_trajectories(env, n=n).terminating_states
            reward = env.log_reward(state)
            mine = Contender(
                lambda _, ours=ours, env=env, state=state, reward=reward: ours.sample_trajectories(
                    env, states=state, log_rewards=reward
                )
            )
            its = Contender(lambda _, peer=peer, state=state: peer.backward(state))
            results.append(compare(f"{name}, backward", n, mine, its, scale.effort))
    return results


def _from_source(scale: Scale, kind: str, save_logprobs: bool, bound: float | None) -> list[Result]:
    results = []
    for name, make_env in ENVIRONMENTS.items():
        env = make_env()
        policy = ForwardPolicy(env, HIDDEN)
        ours, peer = Sampler(policy), TorchGFNSampler(env, policy)
        check_alike(env, ours, peer)
        for n in scale.batches:
            mine = Contender(
                lambda _, ours=ours, env=env, n=n: ours.sample_trajectories(
                    env, n=n, save_logprobs=save_logprobs
                )
            )
            its = Contender(lambda _, peer=peer, n=n: peer.forward(n, save_logprobs))
            results.append(compare(f"{name}, {kind}", n, mine, its, scale.effort, bound))
    return results


def check_alike(env: GFNEnv, ours: Sampler, peer: TorchGFNSampler, n: int = 2000) -> None:
    """Raise unless both sides sample the same distribution, as far as ``n`` trajectories tell.

    Compared are the mean length and the share of each action, both to within six standard errors.
    """
    mine: Trajectories = ours.sample_trajectories(env, n=n)
    its = peer.forward(n)
    lengths = mine.length.double(), its.terminating_idx.double()
    gap = abs(float(lengths[0].mean() - lengths[1].mean()))
    error = float((lengths[0].var() + lengths[1].var()).div(n).sqrt())
    if gap > 6 * error + 1e-9:
        raise RuntimeError(
            f"mean lengths differ by {gap:.3f}, with a standard error of {error:.3f}"
        )
    counts = [
        torch.bincount(action[action >= 0], minlength=env.n_actions)
        for action in (mine.action, its.actions.tensor[..., 0])
    ]
    deviation = (counts[0] - counts[1]).abs() / (counts[0] + counts[1]).clamp(min=1).sqrt()
    if float(deviation.max()) > 6:
        raise RuntimeError(f"action {int(deviation.argmax())} is not drawn alike by both sides")


def speeds(results: Sequence[Result]) -> str:
    """Return one line per comparison: trajectories per second on both sides."""
    lines = []
    for result in results:
        mine, its = (result.capacity / time * 1e6 for time in (result.ours, result.peer))
        lines.append(
            f"{result.name}, batches of {result.capacity:,}: {mine:,.0f} trajectories per second, "
            f"torchgfn {its:,.0f}; {1 / result.ratio:.1f} times as many"
        )
    return "\n".join(lines)


PARTS: dict[str, Callable[[Scale], list[Result]]] = {
    "forward": forward,
    "log_prob": log_prob,
    "backward": backward,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparisons and print the table.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    run_parts(
        "Rollouts against torchgfn's Sampler.",
        PARTS,
        FULL,
        QUICK,
        arguments,
        size="batch",
        notes=speeds,
    )


if __name__ == "__main__":
    main()
