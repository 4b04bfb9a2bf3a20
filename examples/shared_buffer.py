"""Two processes fill one buffer, which keeps exactly the best of all offered rows.

python examples/shared_buffer.py
"""

import multiprocessing
from functools import partial

from torchrl.collectors import Collector

from gfn_rb import ActionSampler, PackTrajectories, Sampler, reward_prioritized_buffer
from gfn_rb.envs import HyperGrid
from gfn_rb.policies import ForwardPolicy

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)  # or "fork" would be the default
    make_env = partial(HyperGrid, 2, 8, batch_size=(16,))
    env, pack = make_env(), PackTrajectories(make_env())
    policy = ForwardPolicy(env)
    rb = reward_prioritized_buffer(100, max_length=env.max_length, transform=pack, shared=True)
    rb.extend(Sampler(policy).sample_trajectories(env, 1).to_tensordict())  # lays out the storage
    options = {
        "frames_per_batch": 160,
        "total_frames": 1600,
        "auto_register_policy_transforms": False,
    }
    collector = Collector(
        make_env, ActionSampler(policy), num_collectors=2, sync=True, replay_buffer=rb, **options
    )
    for _ in collector:
        batch = rb.sample(32)  # ... learn from it, then send the workers what was learnt:
        collector.update_policy_weights_()
    collector.shutdown()
    print(len(rb), "kept")
