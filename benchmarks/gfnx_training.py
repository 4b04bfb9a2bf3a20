"""Versions and iterations per CPU second of gfnx, for ``benchmarks.training``, in its own Python.

The iteration is that of gfnx's ``baselines/tb_hypergrid.py``, without metrics.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["JAX_PLATFORMS"] = "cpu"

import sys
import time
from importlib.metadata import version
from statistics import median
from typing import Any

import equinox as eqx
import gfnx
import jax
import jax.numpy as jnp
import optax

BATCH, WIDTH, EXIT_BIAS = 16, 256, 50.0


class Table(gfnx.TFBind8RewardModule):
    """Rewards of all sequences from a file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def init(self, rng_key: Any, dummy_state: Any) -> dict[str, Any]:
        """Return the rewards."""
        return {"rewards": jnp.load(self.path)}


def make_env(height: int, table: str) -> Any:
    """Return the grid of a height, or TFBind8 if that is 0."""
    if height:
        return gfnx.environment.HypergridEnvironment(
            gfnx.HardHypergridRewardModule(), dim=4, side=height
        )
    return gfnx.environment.TFBind8Environment(Table(table))


def main() -> None:
    """Print the versions, and iterations per CPU second."""
    print(", ".join(f"{name} {version(name)}" for name in ("gfnx", "jax", "equinox")))
    height, seconds = int(sys.argv[1]), float(sys.argv[3])
    env = make_env(height, sys.argv[2])
    env_params = env.init(jax.random.PRNGKey(0))
    n, n_back = env.action_space.n, env.backward_action_space.n
    obs, _ = env.reset(1, env_params)
    is_grid = height > 0
    n_tokens = env.ntoken if not is_grid else 0

    def encode(x: Any) -> Any:
        return x if is_grid else jax.nn.one_hot(x, n_tokens).reshape(-1)

    size = encode(obs[0]).shape[0]
    model = eqx.nn.MLP(size, n + n_back, WIDTH, 2, key=jax.random.PRNGKey(1))
    params, static = eqx.partition(model, eqx.is_array)
    everything = {"model": params, "log_z": jnp.array(0.0)}
    labels = {"model": jax.tree.map(lambda _: "net", params), "log_z": "log_z"}
    rules = {"net": optax.adam(1e-3), "log_z": optax.adam(0.1)}
    optimizer = optax.multi_transform(rules, labels)
    state = optimizer.init(everything)
    bias = EXIT_BIAS * jax.nn.one_hot(n - 1, n) if is_grid else jnp.zeros(n)

    def logits(network: Any, x: Any) -> tuple[Any, Any]:
        out = jax.vmap(network)(jax.vmap(encode)(x))
        return out[:, :n] - bias, out[:, n:]

    def policy(key: Any, x: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
        forward, backward = logits(eqx.combine(weights, static), x)
        return forward, {"forward_logits": forward, "backward_logits": backward}

    def loss_of(everything: Any, rows: Any) -> Any:
        network = eqx.combine(everything["model"], static)
        forward, backward = jax.vmap(lambda x: logits(network, x))(rows.obs)
        over_time = {"in_axes": (1, None), "out_axes": 1}
        illegal = jax.vmap(env.get_invalid_mask, **over_time)(rows.state, env_params)
        log_pf = jax.nn.log_softmax(gfnx.utils.mask_logits(forward, illegal), axis=-1)
        log_pf = jnp.take_along_axis(log_pf, rows.action[..., None], axis=-1).squeeze(-1)
        log_pf = jnp.where(rows.pad, 0.0, log_pf).sum(axis=1)
        before = jax.tree.map(lambda x: x[:, :-1], rows.state)
        after = jax.tree.map(lambda x: x[:, 1:], rows.state)
        back = jax.vmap(env.get_backward_action, in_axes=(1, 1, 1, None), out_axes=1)(
            before, rows.action[:, :-1], after, env_params
        )
        illegal = jax.vmap(env.get_invalid_backward_mask, **over_time)(after, env_params)
        log_pb = jax.nn.log_softmax(gfnx.utils.mask_logits(backward[:, 1:], illegal), axis=-1)
        log_pb = jnp.take_along_axis(log_pb, back[..., None], axis=-1).squeeze(-1)
        target = log_pb + rows.log_gfn_reward[:, :-1]
        target = jnp.where(rows.pad[:, :-1], 0.0, target).sum(axis=1)
        return jnp.square(everything["log_z"] + log_pf - target).mean()

    @jax.jit
    def iterate(key: Any, everything: Any, state: Any) -> tuple[Any, Any]:
        rows, _ = gfnx.utils.forward_rollout(
            rng_key=key, num_envs=BATCH, policy_fn=policy, policy_params=everything["model"],
            env=env, env_params=env_params,
        )  # fmt: skip
        gradient = jax.grad(loss_of)(everything, rows)
        updates, state = optimizer.update(gradient, state, everything)
        return optax.apply_updates(everything, updates), state

    key, times = jax.random.PRNGKey(2), []
    for _ in range(3):  # compiles, and again for what the first one returns
        everything, state = jax.block_until_ready(iterate(key, everything, state))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        key, now = jax.random.split(key)
        start = time.process_time()
        everything, state = jax.block_until_ready(iterate(now, everything, state))
        times.append(time.process_time() - start)
    print(1 / median(times))


if __name__ == "__main__":
    main()
