"""Every environment keeps the laws of its suite."""

from factories import CountOnes, Ladder

from gfn_rb.envs import (
    BayesianDAG,
    BitSequence,
    Box,
    ConditionalHyperGrid,
    DeceptiveGrid,
    Funnel,
    Gaussians25,
    HyperGrid,
    Line,
    Manywell,
    RNABinding,
)
from gfn_rb.envs.conformance import (
    ContinuousEnvConformance,
    EnumerableEnvConformance,
    GFNEnvConformance,
)

SUITES = {
    GFNEnvConformance: {
        "ScalarStatesAndConditions": lambda _: Ladder(4),
        "RNABinding": lambda _: RNABinding(("GGGCAAUGCC", "AUGGCUUACG"), 4, threshold=0.5),
    },
    ContinuousEnvConformance: {
        "Line": lambda _: Line(),
        "Box": lambda _: Box(),
        "Gaussians25": lambda _: Gaussians25(n_steps=8),
        "Funnel": lambda _: Funnel(ndim=3, n_steps=8),
        "Manywell": lambda _: Manywell(ndim=4, n_steps=8),
    },
    EnumerableEnvConformance: {
        "HyperGrid": lambda _: HyperGrid(2, 8),
        "ConditionalHyperGrid": lambda _: ConditionalHyperGrid(2, 8),
        "DeceptiveGrid": lambda _: DeceptiveGrid(2, 9),
        "BayesianDAG": lambda _: BayesianDAG(4, n_samples=20),
        "BitSequence": lambda _: BitSequence(8, 2, n_modes=3),
        "Append": lambda _: CountOnes(2, 5, "append"),
        "PrependAppend": lambda _: CountOnes(2, 5, "prepend_append"),
        "NonAutoregressive": lambda _: CountOnes(2, 4, "non_autoregressive"),
    },
}
for suite, environments in SUITES.items():
    for name, make_env in environments.items():
        globals()[f"Test{name}"] = type(f"Test{name}", (suite,), {"make_env": make_env})
