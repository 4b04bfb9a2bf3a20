"""The only place that touches private names of torch, tensordict, torchrl and torchgfn.

Other modules write ``from gfn_rb import torchrl_compat as compat``, and ``compat.length_of(rows)``.
Each function wraps one name that has no public counterpart. What a base class leaves to its
subclasses (``Writer._storage``, ``Sampler._rng``, ...) is its interface, and used where needed.
Read in torch 2.13.0, tensordict 0.14.3 and torchrl 0.14.1, unless said otherwise.
"""

from gfn_rb.torchrl_compat.buffers import *  # noqa: F403
from gfn_rb.torchrl_compat.storages import *  # noqa: F403
from gfn_rb.torchrl_compat.tensors import *  # noqa: F403
