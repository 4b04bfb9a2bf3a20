"""An environment, policies and a local search made of torchgfn's parts.

python examples/torchgfn_environment.py
"""

from gfn.estimators import DiscretePolicyEstimator
from gfn.gym import HyperGrid
from gfn.preprocessors import KHotPreprocessor
from gfn.utils.modules import MLP

from gfn_rb import LocalSearchSampler
from gfn_rb.interop.torchgfn import adapt_env, adapt_estimator
from gfn_rb.losses import TrajectoryBalance
from gfn_rb.policies import LogZ

grid = HyperGrid(ndim=2, height=8, validate_modes=False)
khot = KHotPreprocessor(height=8, ndim=2)
env = adapt_env(grid, khot)
pf = DiscretePolicyEstimator(MLP(khot.output_dim, grid.n_actions), grid.n_actions, khot)
pb = DiscretePolicyEstimator(
    MLP(khot.output_dim, grid.n_actions - 1), grid.n_actions, khot, is_backward=True
)
policy, backward = adapt_estimator(pf, env), adapt_estimator(pb, env)
loss = TrajectoryBalance(policy, backward, env, LogZ())
search = LocalSearchSampler(policy, backward)
found = search.sample_trajectories(env, n=16, n_local_search_loops=2, back_ratio=0.5)
print(len(found), bool(loss(found).isfinite()), round(env.true_log_z, 4))
