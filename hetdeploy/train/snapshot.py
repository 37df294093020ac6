"""The weights of one step, flat in CPU memory, on their way to helpers while the leader computes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hetdeploy.train.device import Ready, Staging
from hetdeploy.train.wire import wire_format


def followed(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """What a helper needs afresh for every share: trainable parameters and floating-point buffers."""
    return [*parameters, *(buffer for buffer in model.buffers() if buffer.is_floating_point())]


class Snapshot:
    """One flat copy of the weights and its payload. Used again once nobody is sending from it."""

    def __init__(self, staging: Staging, tensors: Sequence[Tensor], weights: str) -> None:
        self._staging = staging
        self._tensors = tensors
        self._sizes = [tensor.numel() for tensor in tensors]
        self._wire = wire_format(weights)
        self._flat = staging.buffer(sum(self._sizes))
        exact = self._wire.name == "fp32"
        self._payload = self._flat.view(torch.uint8) if exact else torch.empty(self.length, dtype=torch.uint8)
        self._encoded = exact
        self._ready: Ready | None = None
        self._lock = threading.Lock()
        self._senders = 0

    def hold(self) -> None:
        """One more sends from it."""
        with self._lock:
            self._senders += 1

    def release(self) -> None:
        """One less does."""
        with self._lock:
            self._senders -= 1

    @property
    def free(self) -> bool:
        """Nobody sends from it: it may be taken again."""
        return self._senders == 0

    @property
    def length(self) -> int:
        """Bytes of the payload."""
        return self._wire.payload_bytes(self._flat.numel())

    def take(self) -> None:
        """Start copying the weights as they are now."""
        self._encoded = self._wire.name == "fp32"
        self._ready = self._staging.download(self._tensors, self._sizes, self._flat)

    def wait(self) -> None:
        """Until the weights may change."""
        if self._ready is not None:
            self._ready()

    def payload(self) -> Tensor:
        """The bytes to send; from any thread."""
        self.wait()
        with self._lock:
            if not self._encoded:
                self._wire.encode(self._flat, self._payload)
                self._encoded = True
        return self._payload

    def receive(self) -> Tensor:
        """The buffer into which a helper receives, before ``apply``."""
        return self._payload

    def apply(self) -> None:
        """On a helper: what was received becomes the model's weights."""
        if self._wire.name != "fp32":
            self._wire.decode(self._payload, self._flat)
        self._staging.upload(self._flat, self._tensors)
