"""The devices that these tests run on: an emulated one, and CUDA where there is one."""

import pytest
import torch

from gfn_rb.codec import values

DEVICES = ["emulated", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "cuda":
        return torch.device("cuda", 0)
    from tests import emulated_device as emulated  # which registers the device with PyTorch

    # A checkpoint knows the types of tensors by name, of which CUDA has no other.
    encoder = "tensor", values.Encoder._tensor
    monkeypatch.setitem(values._ENCODERS, emulated.EmulatedTensor, encoder)
    return emulated.DEVICE


@pytest.fixture
def counted(device):
    """What counts waits for the device within a block."""
    if device.type == "cuda":
        pytest.skip("counted on the emulated device")
    from tests import emulated_device as emulated

    return emulated.counted
