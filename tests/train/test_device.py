import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hetdeploy.train.device import BlockingStaging, HostStaging, choose_device, staging_for
from hetdeploy.train.errors import DeviceError

CPU = torch.device("cpu")


def stagings():
    # MPS's strategy is plain tensor code apart from the device: it runs here on CPU tensors.
    return [HostStaging(), BlockingStaging(CPU, lambda: None)]


@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=6),
    absent=st.sets(st.integers(0, 5)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_what_goes_down_flat_is_what_comes_up_again(shapes, absent, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    given_to = [None if i in absent else tensor for i, tensor in enumerate(tensors)]
    sizes = [tensor.numel() for tensor in tensors]
    expected = torch.cat(
        [
            (torch.zeros(size) if tensor is None else tensor.float().reshape(-1))
            for tensor, size in zip(given_to, sizes, strict=True)
        ]
    )
    for staging in stagings():
        flat = staging.buffer(sum(sizes)).fill_(7.0)
        staging.download(given_to, sizes, flat)()
        assert torch.equal(flat, expected)
        back = [torch.full_like(tensor, 9.0) for tensor in tensors]
        staging.upload(flat, back)
        for i, (tensor, original) in enumerate(zip(back, tensors, strict=True)):
            assert torch.equal(tensor, torch.zeros_like(original) if i in absent else original)


def test_gradients_that_are_not_contiguous_keep_their_order():
    gradient = torch.arange(12.0).view(3, 4).t()
    for staging in stagings():
        flat = staging.buffer(12)
        staging.download([gradient], [12], flat)()
        assert torch.equal(flat.view(4, 3), gradient)


class _Copies(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = str(function)
        if "copy" in name or "pin" in name:
            self.seen.append((name, kwargs.get("non_blocking", False) or True in args[2:]))
        return function(*args, **kwargs)


def test_mps_copies_block_and_pin_nothing():
    staging = BlockingStaging(CPU, lambda: None)
    with _Copies() as copies:
        flat = staging.buffer(4)
        staging.download([torch.ones(3), None], [3, 1], flat)()
        staging.upload(flat, [torch.ones(3), torch.ones(1)])
    assert copies.seen, "no copy was seen at all"
    assert not [name for name, non_blocking in copies.seen if non_blocking or "pin" in name]


def test_the_copies_that_the_test_above_looks_for_would_be_seen():
    with _Copies() as copies:
        torch.ones(3).copy_(torch.ones(3), non_blocking=True)
    assert copies.seen[-1][1]


def test_a_device_is_what_was_asked_for(monkeypatch):
    monkeypatch.setenv("HETDEPLOY_ACCELERATOR", "cpu")
    assert choose_device() == CPU
    assert isinstance(staging_for(choose_device()), HostStaging)
    monkeypatch.delenv("HETDEPLOY_ACCELERATOR")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device() == CPU
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device() == torch.device("mps")


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="sees no GPU"):
        choose_device("cuda")
    with pytest.raises(DeviceError, match="no MPS device"):
        choose_device("mps")
    with pytest.raises(DeviceError, match="use one of auto, cuda"):
        choose_device("gpu")


def test_a_local_rank_without_a_gpu_of_its_own_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(DeviceError, match="local rank 1 has no GPU, there are 1"):
        choose_device("cuda")
    assert choose_device("cuda", local_rank=0) == torch.device("cuda", 0)
    with pytest.raises(DeviceError, match="built for CUDA"):
        choose_device("rocm")
