"""The ranks must agree on what they exchange before they exchange it.

Two ranks whose tensors differ in size or dtype do not get an error from gloo: the process is ended from one of its
threads (std::terminate), and the other rank reads "connection reset by peer". So each rank writes down names, shapes,
dtypes, bucket layout and options, a digest of that goes round first in a message of fixed size, and only if digests
differ do the descriptions follow, so that every rank names the first difference.

The second half is about values: CUDA, MPS and CPU round differently, so optimizers that were fed the same gradient bits
drift apart in the last bits. ``align`` compares a digest of the weights and, where it differs, takes rank 0's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from hetdeploy.train.errors import LayoutMismatch
from hetdeploy.train.world import Group

DIGEST_BYTES = 16


def describe(model: nn.Module, options: Mapping[str, object]) -> list[str]:
    """One line for each thing that ranks must have in common: options first, then parameters and buffers in order."""
    lines = [f"{name} = {value}" for name, value in sorted(options.items())]
    lines += [
        f"parameter {name} {tuple(parameter.shape)} {_dtype(parameter)}{'' if parameter.requires_grad else ' frozen'}"
        for name, parameter in model.named_parameters()
    ]
    lines += [f"buffer {name} {tuple(buffer.shape)} {_dtype(buffer)}" for name, buffer in model.named_buffers()]
    return lines


def compare(group: Group, lines: list[str]) -> None:
    """Collective. Raises the same LayoutMismatch on every rank, naming the first difference from rank 0."""
    mine = "\n".join(lines).encode()
    digest = torch.frombuffer(bytearray(_digest(mine)), dtype=torch.uint8)
    digests = torch.zeros(group.size * DIGEST_BYTES, dtype=torch.uint8)
    group.all_gather(digests, digest).wait("comparing layouts")
    if _all_equal(digests, group.size):
        return
    descriptions = [packed.decode().split("\n") for packed in group.gather_bytes(mine)]
    for rank, theirs in enumerate(descriptions):
        if theirs != descriptions[0]:
            raise LayoutMismatch(
                f"rank 0 and rank {rank} differ: {first_difference(descriptions[0], theirs)}",
                "run the same script with the same arguments on every rank",
            )


def first_difference(left: list[str], right: list[str]) -> str:
    """Where two descriptions part, in words."""
    for mine, theirs in zip(left, right, strict=False):
        if mine != theirs:
            return f"{mine!r} against {theirs!r}"
    if len(left) == len(right):
        return "nothing"
    longer, fewer = (left, right) if len(left) > len(right) else (right, left)
    return f"{longer[len(fewer)]!r} is on one of them only"


def broadcast(group: Group, tensors: Iterable[Tensor]) -> None:
    """Collective: rank 0's bits in every rank's ``tensors`` (any device, any dtype), one tensor in CPU memory at a
    time.
    """
    for tensor in tensors:
        staged = tensor.detach().cpu().contiguous()
        if staged.numel() == 0:
            continue
        group.broadcast(staged.view(-1).view(torch.uint8), 0).wait("broadcasting weights")
        if group.rank != 0:
            tensor.detach().copy_(staged)


def align(group: Group, model: nn.Module) -> bool:
    """Collective: make every rank's weights and buffers rank 0's. False when they already were, bit for bit."""
    state = [*model.parameters(), *model.buffers()]
    digests = torch.zeros(group.size * DIGEST_BYTES, dtype=torch.uint8)
    mine = torch.frombuffer(bytearray(state_digest(state)), dtype=torch.uint8)
    group.all_gather(digests, mine).wait("comparing weights")
    if _all_equal(digests, group.size):
        return False
    broadcast(group, state)
    return True


def state_digest(tensors: Iterable[Tensor]) -> bytes:
    """A digest of the bits of all ``tensors``, in order."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for tensor in tensors:
        staged = tensor.detach().cpu().contiguous().view(-1)
        if staged.numel():
            digest.update(staged.view(torch.uint8).numpy().data)
    return digest.digest()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _all_equal(digests: Tensor, size: int) -> bool:
    rows = digests.view(size, DIGEST_BYTES)
    return bool((rows == rows[0]).all())


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
