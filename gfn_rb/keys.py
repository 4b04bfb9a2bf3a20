"""Every TensorDict key name this library reads or writes."""

from __future__ import annotations

from typing import Final

from tensordict import NestedKey

STATE: Final = "state"
ACTION: Final = "action"
LENGTH: Final = "length"
LOG_REWARD: Final = "log_reward"
LOG_PROB: Final = "log_prob"
ESTIMATOR_OUTPUT: Final = "estimator_output"
CONDITION: Final = "condition"
IS_BACKWARD: Final = "is_backward"
IS_TERMINATING: Final = "is_terminating"
POLICY_VERSION: Final = "policy_version"  # of what made a row; TorchRL's collectors' own name
N_USES: Final = "n_uses"  # how often a row was drawn before, under a limit of uses
EPISODE: Final = "episode"  # which episode a stored transition or state belongs to
EPISODE_LOG_REWARD: Final = "episode_log_reward"  # that episode's log R(x), in each of its rows

NEXT: Final = "next"
DONE: Final = "done"
TERMINATED: Final = "terminated"
REWARD: Final = "reward"
NEXT_STATE: Final = (NEXT, STATE)
PACKED_STATE: Final = "packed_state"  # states in words, which nobody must take for numbers
NEXT_PACKED_STATE: Final = (NEXT, PACKED_STATE)
NEXT_DONE: Final = (NEXT, DONE)
NEXT_TERMINATED: Final = (NEXT, TERMINATED)
NEXT_REWARD: Final = (NEXT, REWARD)
NEXT_LOG_REWARD: Final = (NEXT, LOG_REWARD)
NEXT_POLICY_VERSION: Final = (NEXT, POLICY_VERSION)

COLLECTOR: Final = "collector"  # where TorchRL's collectors keep what they know about a batch
MASK: Final = "mask"
TRAJ_IDS: Final = "traj_ids"

FORWARD_MASK: Final = "action_mask"  # TorchRL's own name for the mask of legal actions
BACKWARD_MASK: Final = "backward_mask"
LOGITS: Final = "logits"
LOG_FLOW: Final = "log_flow"
STEPPING: Final = "_step"  # TorchRL's mark of the rows that a step shall advance

INDEX: Final = "index"  # written by TensorDictReplayBuffer into what it samples
BUFFER_ID: Final = "buffer_id"
BUFFER_IDS: Final = "buffer_ids"  # what TorchRL's ensembles call it
DRAW_LOG_PROB: Final = "draw_log_prob"  # of a sampler's draw; log_prob is that of the actions
PRIORITY_WEIGHT: Final = "priority_weight"  # TorchRL's own name for importance weights


def key_path(key: NestedKey) -> str:
    """Return a name as one text: ``"next/state"`` of ``("next", "state")``."""
    return key if isinstance(key, str) else "/".join(key)


def mask_key(key: NestedKey) -> NestedKey:
    """Return the name of the mask of a padded entry: ``"tokens_mask"`` of ``"tokens"``."""
    return _named(key, MASK)


def is_mask_key(key: NestedKey) -> bool:
    """Return whether a name is one that :func:`mask_key` returns."""
    return str(key if isinstance(key, str) else key[-1]).endswith(f"_{MASK}")


def length_key(key: NestedKey) -> NestedKey:
    """Return the name of the lengths of a padded entry: ``"tokens_length"`` of ``"tokens"``."""
    return _named(key, LENGTH)


def _named(key: NestedKey, what: str) -> NestedKey:
    return f"{key}_{what}" if isinstance(key, str) else (*key[:-1], f"{key[-1]}_{what}")
