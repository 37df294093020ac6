"""Training on machines of unequal speed. Works under ``up``/``join``, under plain torchrun, and alone.

The loop stays the script's own. Symmetric modes, every rank alike: ``AllReduce`` and ``WeightedDDP``. Crew mode, a
leader and helpers that come and go: ``Assist``. Local steps with rare exchanges: ``DiLoCo``. Each module's text has
the loop around it, its invariants and what it costs in memory.
"""

from hetdeploy.train.allreduce import AllReduce
from hetdeploy.train.assist import Assist
from hetdeploy.train.crew import Crew
from hetdeploy.train.ddp import WeightedDDP
from hetdeploy.train.device import choose_device
from hetdeploy.train.diloco import DiLoCo
from hetdeploy.train.errors import (
    DeviceError,
    LayoutMismatch,
    MisuseError,
    NonFiniteGradient,
    PeerLost,
    TrainError,
)
from hetdeploy.train.metrics import Metrics, StepRecord, read_metrics
from hetdeploy.train.world import World

__all__ = [
    "AllReduce",
    "Assist",
    "Crew",
    "DeviceError",
    "DiLoCo",
    "LayoutMismatch",
    "Metrics",
    "MisuseError",
    "NonFiniteGradient",
    "PeerLost",
    "StepRecord",
    "TrainError",
    "WeightedDDP",
    "World",
    "choose_device",
    "read_metrics",
]
