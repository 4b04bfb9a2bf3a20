"""Annealing: draw from a buffer ever more greedily; save it half-way and resume.

python examples/annealing.py
"""

import tempfile
from pathlib import Path

import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from gfn_rb import load_checkpoint, reward_prioritized_buffer, save_checkpoint
from gfn_rb.checkpoint import schedule_state


def make() -> tuple[TensorDictReplayBuffer, LinearScheduler]:
    """Return a buffer, and a scheduler that lowers the temperature of its draws from 4 to 0.5."""
    rb = reward_prioritized_buffer(1000, temperature=4.0, replacement=True, batch_size=256)
    return rb, LinearScheduler(rb, "temperature", final_value=0.5, num_steps=8)


def draw(rb: TensorDictReplayBuffer, anneal: LinearScheduler, steps: int) -> None:
    """Print the mean log-reward of a batch at each temperature."""
    for _ in range(steps):
        mean = float(rb.sample()["log_reward"].mean())
        print(f"temperature {rb.sampler.temperature:.2f}: mean log-reward {mean:.1f}")
        anneal.step()


def main() -> None:
    """Anneal, and go on in another buffer from a checkpoint."""
    torch.manual_seed(0)
    rb, anneal = make()
    rb.extend(TensorDict({"state": torch.arange(1000), "log_reward": torch.randn(1000)}, [1000]))
    draw(rb, anneal, 4)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "half-way.ckpt"
        save_checkpoint(file, rb, anneal=schedule_state(anneal))
        rb, anneal = make()
        anneal.load_state_dict(load_checkpoint(file, rb)["anneal"])
    print("resumed")
    draw(rb, anneal, 5)


if __name__ == "__main__":
    main()
