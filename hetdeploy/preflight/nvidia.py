"""Checks of an NVIDIA GPU on its way into a container: card, driver, toolkit, engine, and the CUDA inside the image.

Each looks at one step and is silent when an earlier one is missing, so that the report names the one thing to do next.
"""

from __future__ import annotations

import re
from typing import ClassVar

from hetdeploy.preflight.facts import Facts, NvidiaFacts
from hetdeploy.preflight.report import Result

DEFAULT_CUDA = (13, 0)
"""What torch 2.13's Linux wheels on PyPI are built with."""

OLDEST_CAPABILITY_OF_CUDA_13 = (7, 5)
"""CUDA 13 has dropped everything before Turing (CUDA Toolkit 13.0 release notes)."""

_OLDER_CUDA = "HETDEPLOY_TORCH_INDEX=https://download.pytorch.org/whl/cu126"
_INSTALL_TOOLKIT = (
    "install nvidia-container-toolkit"
    " (https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html)"
)
_CONFIGURE = "`sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker`"


class NvidiaDriver:
    """Does the driver see a card?"""

    name: ClassVar[str] = "nvidia-driver"

    def run(self, facts: Facts) -> Result | None:
        nvidia = facts.nvidia
        if facts.accelerator != "cuda":
            if nvidia is None or _works(nvidia) or facts.is_accelerator_asked_for:
                return None
            return Result(
                self.name, "warning", f"the NVIDIA card will not be used: {_complaint(nvidia)}", _mend(nvidia)
            )
        if nvidia is None:
            return Result(self.name, "failure", "there is no nvidia-smi", "`sudo ubuntu-drivers install`, then reboot")
        if not _works(nvidia):
            return Result(self.name, "failure", f"the NVIDIA driver does not work: {_complaint(nvidia)}", _mend(nvidia))
        cards = len(nvidia.capabilities)
        return Result(self.name, "ok", f"{cards} NVIDIA card{'s' * (cards != 1)}, CUDA {_dotted(driver_cuda(nvidia))}")


class NvidiaToolkit:
    """Is there a toolkit that brings a card into a container?"""

    name: ClassVar[str] = "nvidia-toolkit"

    def run(self, facts: Facts) -> Result | None:
        if facts.docker is None or not _has_card(facts):
            return None
        if _cdi_devices(facts) or _has_runtime(facts):
            return Result(self.name, "ok", "known to the engine")
        if facts.nvidia is not None and facts.nvidia.toolkit is None:
            text = "containers cannot see the GPU: the NVIDIA container toolkit is not installed"
            return Result(self.name, "failure", text, f"{_INSTALL_TOOLKIT}, then {_CONFIGURE}")
        if facts.docker.problem is not None:
            return None
        return Result(
            self.name,
            "failure",
            "containers cannot see the GPU: the engine does not know the NVIDIA runtime",
            _CONFIGURE,
        )


class CudaOfImage:
    """Does the driver take the CUDA that the image's torch is built with?"""

    name: ClassVar[str] = "cuda"

    def run(self, facts: Facts) -> Result | None:
        if not _has_card(facts) or facts.nvidia is None:
            return None
        has, needs = driver_cuda(facts.nvidia), image_cuda(facts.torch_version, facts.torch_index)
        if has is None or needs is None:
            return None
        # Within one major release, any driver runs any build (NVIDIA's minor version compatibility).
        if has[0] < needs[0]:
            return Result(
                self.name,
                "failure",
                f"the NVIDIA driver takes CUDA {_dotted(has)}, torch in the image is built with CUDA {_dotted(needs)}",
                f"update the driver, or set {_OLDER_CUDA}",
            )
        old = [card for card in facts.nvidia.capabilities if _numbers(card) < OLDEST_CAPABILITY_OF_CUDA_13]
        if needs[0] >= 13 and old:
            return Result(
                self.name,
                "failure",
                f"CUDA {_dotted(needs)} has no code for this card (compute capability {old[0]}, it begins with 7.5)",
                f"set {_OLDER_CUDA}",
            )
        return Result(self.name, "ok", f"driver CUDA {_dotted(has)}, image CUDA {_dotted(needs)}")


def driver_cuda(nvidia: NvidiaFacts) -> tuple[int, ...] | None:
    """The newest CUDA that the driver takes, from the head of `nvidia-smi`'s table; None when it does not say."""
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", nvidia.output)
    return _numbers(found[1]) if found else None


def image_cuda(torch_version: str, torch_index: str) -> tuple[int, ...] | None:
    """The CUDA that torch of this version from this index is built with; None when they do not tell."""
    found = re.search(r"cu(\d\d)(\d)\b", torch_version) or re.search(r"/cu(\d\d)(\d)/?$", torch_index)
    if found:
        return int(found[1]), int(found[2])
    return None if torch_index else DEFAULT_CUDA


def _has_card(facts: Facts) -> bool:
    return facts.accelerator == "cuda" and facts.nvidia is not None and _works(facts.nvidia)


def _works(nvidia: NvidiaFacts) -> bool:
    return nvidia.exit_code == 0 and driver_cuda(nvidia) is not None


def _has_runtime(facts: Facts) -> bool:
    return facts.docker is not None and "nvidia" in (facts.docker.info.get("Runtimes") or {})


def _cdi_devices(facts: Facts) -> list[str]:
    """The GPUs that an engine from 28.3 on found described for CDI."""
    devices = (facts.docker.info.get("DiscoveredDevices") if facts.docker is not None else None) or ()
    return [device["ID"] for device in devices if str(device.get("ID", "")).startswith("nvidia.com/gpu")]


def _complaint(nvidia: NvidiaFacts) -> str:
    lines = [line.strip() for line in nvidia.output.splitlines() if line.strip()]
    return lines[0] if lines else f"nvidia-smi ended with exit code {nvidia.exit_code}"


def _mend(nvidia: NvidiaFacts) -> str:
    if "version mismatch" in nvidia.output:
        return "the driver was updated while it was in use: reboot"
    return "`sudo ubuntu-drivers install`, then reboot"


def _dotted(version: tuple[int, ...] | None) -> str:
    return "unknown" if version is None else ".".join(map(str, version))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
