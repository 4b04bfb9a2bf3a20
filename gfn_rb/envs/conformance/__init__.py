"""Conformance suites: a new environment is tested by a class of one method.

    class TestMyEnv(GFNEnvConformance):
        def make_env(self):
            return MyEnv()

Derive from ``EnumerableEnvConformance`` instead if the environment is an ``EnumerableEnv``, from
``ContinuousEnvConformance`` if it is a ``ContinuousEnv``. This package, unlike the rest of the
library, needs pytest.
"""

from gfn_rb.envs.conformance.every import GFNEnvConformance
from gfn_rb.envs.conformance.suites import ContinuousEnvConformance, EnumerableEnvConformance

__all__ = ["ContinuousEnvConformance", "EnumerableEnvConformance", "GFNEnvConformance"]
