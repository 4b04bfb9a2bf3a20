"""Arrays of other libraries, as JAX and pandas offer them, become rows of a buffer."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.errors import ShapeError


class Labelled:
    """An array that NumPy reads, such as a column of pandas."""

    def __init__(self, values) -> None:
        self._values = np.asarray(values)

    def __len__(self) -> int:
        return len(self._values)

    def __array__(self, dtype=None, copy=None):
        return self._values.astype(dtype or self._values.dtype)


class Exported(Labelled):
    """An array that other libraries read where it is, such as one of JAX."""

    def __array__(self, dtype=None, copy=None):
        raise NotImplementedError

    def __dlpack__(self, **options):
        return self._values.__dlpack__()

    def __dlpack_device__(self):
        return self._values.__dlpack_device__()


def entries(kind) -> dict:
    state = np.arange(6).reshape(3, 2)
    done = np.array([0, 1, 1], np.uint8)
    return {"state": kind(state), "log_reward": kind([0.5, 2.0, 1.0]), "next": {"d": kind(done)}}


@pytest.mark.parametrize("kind", [Labelled, Exported])
@pytest.mark.parametrize("preset", [fifo_buffer, reward_prioritized_buffer])
def test_arrays_are_stored_as_those_of_numpy_are(preset, kind):
    rb, plain = preset(2, unique="state"), preset(2, unique="state")
    assert rb.extend(entries(kind)).equal(plain.extend(entries(np.asarray)))
    for key in ("state", "log_reward", ("next", "d")):
        assert rb[:][key].dtype == plain[:][key].dtype
        assert rb[:][key].equal(plain[:][key])


@pytest.mark.parametrize("preset", [fifo_buffer, reward_prioritized_buffer])
def test_a_tensordict_of_arrays_names_the_conversion(preset):
    rows = TensorDict({"log_reward": Labelled(np.ones(3))}, [3])
    with pytest.raises(ShapeError, match=r"got an array of .*torch.as_tensor\(np.array\(x\)\)"):
        preset(2).extend(rows)


@pytest.mark.parametrize("preset", [fifo_buffer, reward_prioritized_buffer])
def test_words_are_named(preset):
    with pytest.raises(ShapeError, match="got words or other objects: a RaggedStorage with text"):
        preset(2).extend(TensorDict({"log_reward": ["a", "b", "c"]}, [3]))


def test_arrays_of_jax_are_stored():
    jnp = pytest.importorskip("jax.numpy")
    rb = reward_prioritized_buffer(2, unique="state")
    rb.extend({"state": jnp.arange(3), "log_reward": jnp.arange(3, dtype=jnp.bfloat16)})
    assert rb[:]["log_reward"].dtype == torch.bfloat16
    assert sorted(rb[:]["state"].tolist()) == [1, 2]
