"""State as tensors in CPU memory and plain Python values: all that a checkpoint holds."""

from __future__ import annotations

import logging
import random
import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hetdeploy.train import layout
from hetdeploy.train.errors import MisuseError

log = logging.getLogger(__name__)


def portable(value: Any, where: str) -> Any:
    """``value`` (at ``where``, for the error) with its tensors on the CPU. Raises MisuseError for what
    ``weights_only`` would not open.
    """
    if isinstance(value, Tensor):
        return _portable_tensor(value, where)
    if isinstance(value, OrderedDict):
        ordered = OrderedDict((key, portable(each, f"{where}.{key}")) for key, each in value.items())
        if hasattr(value, "_metadata"):  # the versions of a module's submodules, which loading looks at
            ordered._metadata = value._metadata  # type: ignore[attr-defined]
        return ordered
    if isinstance(value, dict):
        return {_plain(key, where): portable(each, f"{where}.{key}") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        items = [portable(each, f"{where}[{i}]") for i, each in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return _plain(value, where)


def random_state() -> dict[str, Any]:
    """All generators that a script uses without making one: those of torch, Python, NumPy and this rank's device."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate(), **_device_random_state()}
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random.get_state(legacy=False)
        key = torch.from_numpy(numpy["state"]["key"].astype("int64"))
        state["numpy"] = {**numpy, "state": {**numpy["state"], "key": key}}
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """What ``random_state`` returned. A generator of a device that this rank does not have is left out, with a
    warning.
    """
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state and "numpy" in sys.modules:
        numpy = state["numpy"]
        key = numpy["state"]["key"].numpy().astype("uint32")
        sys.modules["numpy"].random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    for kind, module in (("cuda", torch.cuda), ("mps", torch.mps)):
        if kind in state and present[kind]:
            module.set_rng_state(state[kind])
        elif kind in state:
            log.warning("the checkpoint is of a rank with %s: this one's random numbers differ from its", kind)


def difference(part: Any, saved: dict[str, Any]) -> str:
    """Where a saved state does not fit a module or an optimizer, in words; empty if it fits, and for other parts."""
    if isinstance(part, nn.Module):
        theirs, mine = _module_lines(saved), _module_lines(part.state_dict())
    elif isinstance(part, torch.optim.Optimizer):
        theirs, mine = _optimizer_lines(saved), _optimizer_lines(part.state_dict())
    else:
        return ""
    return "" if theirs == mine else f"{layout.first_difference(theirs, mine)} (checkpoint against this run)"


def _portable_tensor(tensor: Tensor, where: str) -> Tensor:
    if type(tensor) not in (Tensor, nn.Parameter):
        raise _unsuitable(tensor, where)
    on_cpu = tensor.detach().cpu()
    if on_cpu.layout is torch.strided and on_cpu.untyped_storage().nbytes() > on_cpu.nbytes:
        on_cpu = on_cpu.clone()  # torch.save would write the whole storage that this is a view of
    return on_cpu


def _plain(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str, torch.dtype):
        return value
    for base in (int, float, str):  # np.float64 is a float, an IntEnum an int
        if isinstance(value, base):
            return base(value)
    raise _unsuitable(value, where)


def _unsuitable(value: Any, where: str) -> MisuseError:
    return MisuseError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold",
        "let state_dict() return tensors, numbers, strings, dicts, lists and tuples",
    )


def _module_lines(state: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}" if isinstance(value, Tensor) else name
        for name, value in state.items()
    ]


def _optimizer_lines(state: Mapping[str, Any]) -> list[str]:
    """Kinds of optimizers differ in the settings of their groups."""
    return [
        f"group {i}: {len(group['params'])} parameters, {', '.join(sorted(set(group) - {'params', 'initial_lr'}))}"
        for i, group in enumerate(state["param_groups"])
    ]


def _device_random_state() -> dict[str, Any]:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {"cuda": torch.cuda.get_rng_state()}  # of this rank's device only: asking others takes memory on them
    if torch.backends.mps.is_available():
        return {"mps": torch.mps.get_rng_state()}
    return {}
