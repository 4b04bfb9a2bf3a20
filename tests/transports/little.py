"""Import this first, and a module of transports loads without the packages around it.

MPI needs NumPy alone, and processes start in a tenth of the time that torch takes to load.
"""

import importlib.util
import sys

for name in ("gfn_rb", "gfn_rb.codec", "gfn_rb.transports"):
    spec = importlib.util.find_spec(name)
    sys.modules[name] = importlib.util.module_from_spec(spec)  # found, but never executed
