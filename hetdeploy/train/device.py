"""Which device trains, and how gradients and weights get from it to CPU memory and back.

gloo takes CPU tensors only, so what is exchanged is staged: the tensors of a bucket are flattened *on the device* and
cross in one copy. A device that shares its memory with the CPU still pays about 0.1 ms for each copy, whatever its
size.

=======  ==============================================================================================
device   one bucket, device to CPU
=======  ==============================================================================================
cuda     one copy into pinned memory on a side stream; the CPU learns of its end by an event
mps      one *blocking* copy: ``non_blocking=True`` to or from MPS returns before the data is there and the
         source may be freed meanwhile (pytorch issues 139550, 189690); memory is unified and cannot be pinned
cpu      no device copy: tensors are written straight into the flat buffer
=======  ==============================================================================================

Memory, as a multiple of the fp32 size G of what is staged: the CPU buffer, G; on cuda and mps also one flattened bucket
on the device for each bucket that is being copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hetdeploy.train.errors import DeviceError

ACCELERATORS = ("auto", "cuda", "rocm", "mps", "cpu")

Ready = Callable[[], None]
"""Blocks until a download has arrived in CPU memory. Callable from any thread, more than once."""


def choose_device(wanted: str | None = None, local_rank: int | None = None) -> torch.device:
    """The device this rank trains on.

    wanted: one of ``ACCELERATORS``; by default ``HETDEPLOY_ACCELERATOR``, else the best there is (cuda, mps, cpu).
    local_rank: which GPU of this machine; by default ``LOCAL_RANK`` as torchrun sets it, else 0.

    Raises DeviceError when what is wanted is not there: training on another device than the one asked for would be
    found out hours later.
    """
    wanted = wanted or os.environ.get("HETDEPLOY_ACCELERATOR") or "auto"
    if wanted not in ACCELERATORS:
        raise DeviceError(f"accelerator {wanted!r} is not known", f"use one of {', '.join(ACCELERATORS)}")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if wanted in ("cuda", "rocm"):
        return _gpu(wanted, int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank)
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise DeviceError("there is no MPS device here", "use HETDEPLOY_ACCELERATOR=auto, or run natively on the Mac")
    return torch.device(wanted)


class Staging(Protocol):
    """Copies between one device and CPU memory. ``flat`` is fp32, contiguous, on the CPU, as long as all tensors
    together.
    """

    def buffer(self, numel: int) -> Tensor:
        """A flat fp32 CPU buffer, zeroed, of the kind this device copies to best."""
        ...

    def download(self, tensors: Sequence[Tensor | None], sizes: Sequence[int], flat: Tensor) -> Ready:
        """Start copying ``tensors`` (None: zeros of that size) into ``flat``; they may change once Ready returned."""
        ...

    def upload(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy ``flat`` over ``tensors``; ordered before the device work that is queued afterwards."""
        ...

    def add(self, parts: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Add flat fp32 CPU ``parts`` to ``tensors``, one each."""
        ...

    def synchronize(self) -> None:
        """Block until the device has done all that was queued."""
        ...


def staging_for(device: torch.device) -> Staging:
    """The staging that is right for ``device``."""
    if device.type == "cuda":
        return StreamStaging(device)
    if device.type == "mps":
        return BlockingStaging(device, torch.mps.synchronize)
    return HostStaging()


class HostStaging:
    """For tensors in CPU memory: written straight into the flat buffer."""

    def buffer(self, numel: int) -> Tensor:
        return torch.zeros(numel)

    def download(self, tensors: Sequence[Tensor | None], sizes: Sequence[int], flat: Tensor) -> Ready:
        for tensor, part in zip(tensors, torch.split(flat, list(sizes)), strict=True):
            if tensor is None:
                part.zero_()
            else:
                part.view(tensor.shape).copy_(tensor.detach())
        return _nothing_to_wait_for

    def upload(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        for tensor, part in _parts(flat, tensors):
            tensor.copy_(part)

    def add(self, parts: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        for part, tensor in zip(parts, tensors, strict=True):
            tensor.detach().add_(part.view(tensor.shape))

    def synchronize(self) -> None:
        pass


class BlockingStaging:
    """For MPS: flattened on the device, one blocking copy, ordinary CPU memory."""

    def __init__(self, device: torch.device, synchronize: Callable[[], None]) -> None:
        self._device = device
        self._synchronize = synchronize

    def buffer(self, numel: int) -> Tensor:
        return torch.zeros(numel)

    def download(self, tensors: Sequence[Tensor | None], sizes: Sequence[int], flat: Tensor) -> Ready:
        flat.copy_(_flatten(_filled(tensors, sizes, self._device)))
        return _nothing_to_wait_for

    def upload(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        on_device = flat.to(self._device)
        for tensor, part in _parts(on_device, tensors):
            tensor.copy_(part)

    def add(self, parts: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        _add_on_device(parts, tensors, self._device)

    def synchronize(self) -> None:
        self._synchronize()


class StreamStaging:
    """For CUDA and ROCm: flattened on the current stream, copied to pinned memory on a side stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def buffer(self, numel: int) -> Tensor:
        return torch.zeros(numel, pin_memory=True)

    def download(self, tensors: Sequence[Tensor | None], sizes: Sequence[int], flat: Tensor) -> Ready:
        on_device = _flatten(_filled(tensors, sizes, self._device))
        # The side stream reads what the current stream (the one backward runs this node on) has just written.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            flat.copy_(on_device, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        # The allocator must not hand this memory to the current stream before the side stream has read it.
        on_device.record_stream(self._stream)
        return arrived.synchronize

    def upload(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        # On the current stream, so the optimizer that follows sees it, and the next download, which waits for this
        # stream, cannot overwrite ``flat`` before it was read.
        on_device = flat.to(self._device, non_blocking=True)
        for tensor, part in _parts(on_device, tensors):
            tensor.copy_(part)

    def add(self, parts: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        _add_on_device(parts, tensors, self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def _gpu(wanted: str, local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        raise DeviceError(
            f"{wanted} was asked for, but torch {torch.__version__} sees no GPU", "see `hetdeploy doctor`"
        )
    if (wanted == "rocm") != (torch.version.hip is not None):
        built = "ROCm" if torch.version.hip is not None else "CUDA"
        raise DeviceError(f"{wanted} was asked for, but this torch is built for {built}", "set HETDEPLOY_TORCH_INDEX")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise DeviceError(f"local rank {local_rank} has no GPU, there are {count}", "lower HETDEPLOY_NPROC_PER_NODE")
    return torch.device("cuda", local_rank)


def _filled(tensors: Sequence[Tensor | None], sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    return [
        torch.zeros(size, device=device) if tensor is None else tensor
        for tensor, size in zip(tensors, sizes, strict=True)
    ]


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])


def _parts(flat: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        yield tensor.detach(), part.view(tensor.shape)


def _add_on_device(parts: Sequence[Tensor], tensors: Sequence[Tensor], device: torch.device) -> None:
    if not parts:
        return
    for tensor, part in _parts(torch.cat(list(parts)).to(device), tensors):
        tensor.add_(part)


def _nothing_to_wait_for() -> None:
    pass
