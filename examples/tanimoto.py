"""Diversity by Tanimoto: keep the best molecules, no two with similar fingerprints.

Bits are random here, around a few scaffolds. Fingerprints of RDKit work in the same way.

python examples/tanimoto.py
"""

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from gfn_rb import DiversityWriter, RewardPrioritizedWriter, SoftmaxRewardSampler
from gfn_rb.training.metrics import mean_distance, tanimoto_distance

N_SCAFFOLDS, N_BITS, CUTOFF = 20, 256, 0.4


def molecules(n: int) -> TensorDict:
    """Return molecules of some scaffolds, which determine most of the reward; a few bits differ."""
    scaffold = torch.randint(N_SCAFFOLDS, (n,))
    bits = (torch.rand(N_SCAFFOLDS, N_BITS) < 0.2)[scaffold] ^ (torch.rand(n, N_BITS) < 0.01)
    log_reward = -scaffold + torch.rand(n)
    return TensorDict({"scaffold": scaffold, "fingerprint": bits, "log_reward": log_reward}, [n])


def main() -> None:
    """Offer the same molecules to a buffer with a distance and to one without."""
    torch.manual_seed(0)
    offered = molecules(2000)
    writers = {
        "the best": RewardPrioritizedWriter(),
        f"the best, further apart than {CUTOFF}": DiversityWriter(
            features="fingerprint", cutoff_distance=CUTOFF, distance=tanimoto_distance
        ),
    }
    for name, writer in writers.items():
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(10),
            writer=writer,
            sampler=SoftmaxRewardSampler(),
            batch_size=4,
        )
        rb.extend(offered)
        kept = rb[:]
        apart = mean_distance(kept["fingerprint"], tanimoto_distance)
        print(f"{name}: {len(kept['scaffold'].unique())} scaffolds, mean distance {apart:.2f}")


if __name__ == "__main__":
    main()
