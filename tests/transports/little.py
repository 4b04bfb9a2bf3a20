"""Import this first, and ``gfn_rb.transports`` loads without the rest of the package.

Transports need little of it, and processes start in a third of the time.
"""

import importlib.util
import sys

spec = importlib.util.find_spec("gfn_rb")
gfn_rb = importlib.util.module_from_spec(spec)
sys.modules["gfn_rb"] = gfn_rb
