"""The devices that these tests run on: an emulated one, and CUDA where there is one."""

import pytest

DEVICES = ["emulated", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "emulated":
        import emulated_device

        return emulated_device.DEVICE
    import torch

    return torch.device("cuda", 0)
