"""Every setting of hetdeploy, in one table, and where its value comes from.

A value is looked for in this order: the command's flag, the environment, ``.env.local``, ``.env``, the table's default.
An empty value counts as not set. ``.env.example`` and ``hetdeploy env`` are made from the table. The environment is
read and never changed.
"""

from __future__ import annotations

import fnmatch
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from hetdeploy import envfile
from hetdeploy.errors import UsageError

Origin = Literal["flag", "environment", ".env.local", ".env", "default"]
_File = Literal[".env.local", ".env"]
_Files = Mapping[_File, Mapping[str, envfile.Entry]]

CPU_INDEX = "https://download.pytorch.org/whl/cpu"

_EXAMPLE_WIDTH = 100
_FILES: tuple[_File, ...] = (".env.local", ".env")

# Left over from another job's launcher, these decide over ranks behind everybody's back: torchrun takes PET_* as its
# own options, and the name of a NIC is only right on the machine it comes from.
_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "NODE_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_*",
    "TORCHELASTIC_*",
    "PET_*",
    "GLOO_*",
    "NCCL_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "HETDEPLOY_BRIDGE",
    "HETDEPLOY_CREW_ROLE",
    "HETDEPLOY_CREW_STORE",
    "HETDEPLOY_DIALECT",
    "HETDEPLOY_JOB",
    "HETDEPLOY_METRICS_DIR",
)


@dataclass(frozen=True)
class Row:
    """One setting. ``allowed`` says in words what ``accepts`` checks."""

    key: str
    default: str
    meaning: str
    allowed: str
    accepts: Callable[[str], bool]

    @property
    def flag(self) -> str:
        return "--" + self.key.removeprefix(envfile.PREFIX).lower().replace("_", "-")


def _one_of(*words: str) -> Callable[[str], bool]:
    return words.__contains__


def _whole(lowest: int, highest: int) -> Callable[[str], bool]:
    return lambda value: value.isascii() and value.isdecimal() and lowest <= int(value[:20]) <= highest


def _like(pattern: str) -> Callable[[str], bool]:
    return lambda value: re.fullmatch(pattern, value) is not None


def _nodes(value: str) -> bool:
    if not re.fullmatch(r"[0-9]{1,4}(:[0-9]{1,4})?", value):
        return False
    least, _, most = value.partition(":")
    return 1 <= int(least) <= int(most or least)


def _folder(value: str) -> bool:
    try:
        Path(value).expanduser()
    except RuntimeError:
        return False  # ~name of nobody
    return value.isprintable()


TABLE: tuple[Row, ...] = (
    Row(
        "HETDEPLOY_NIC",
        "",
        "The network interface to use on this machine. Empty: the one that routes to the other machine, wired before "
        "Wi-Fi. It is a name of this machine only, so it belongs into .env.local.",
        "the name of one network interface",
        lambda value: value.isprintable(),
    ),
    Row(
        "HETDEPLOY_PORT",
        "29400",
        "The TCP port on which the head waits for joiners.",
        "a port from 1 to 65535",
        _whole(1, 65535),
    ),
    Row(
        "HETDEPLOY_STORE_PORT",
        "29500",
        "The TCP port of torch's store. Seen from outside the head in direct mode only.",
        "a port from 1 to 65535",
        _whole(1, 65535),
    ),
    Row(
        "HETDEPLOY_LINK",
        "tunnel",
        "How ranks reach each other: tunnel puts all traffic through one encrypted connection, direct uses plain TCP "
        "and is for networks whose every machine is trusted.",
        "tunnel or direct",
        _one_of("tunnel", "direct"),
    ),
    Row(
        "HETDEPLOY_ACCELERATOR",
        "auto",
        "What this machine's ranks compute on. auto takes the best there is.",
        "auto, cuda, rocm, mps or cpu",
        _one_of("auto", "cuda", "rocm", "mps", "cpu"),
    ),
    Row(
        "HETDEPLOY_NODES",
        "2",
        "How many machines train together, the head among them; 1:4 means any number from 1 to 4. In a crew the most "
        "at a time, and the head waits for none.",
        "a number such as 2, or a range such as 1:4",
        _nodes,
    ),
    Row(
        "HETDEPLOY_CREW",
        "no",
        "Whether joiners may come, leave and come back while the job runs. The script must then train with "
        "hetdeploy.train.Assist; any other would train on every machine by itself.",
        "yes or no",
        _one_of("yes", "no"),
    ),
    Row(
        "HETDEPLOY_NPROC_PER_NODE",
        "1",
        "How many ranks this machine runs.",
        "a number from 1 to 64",
        _whole(1, 64),
    ),
    Row(
        "HETDEPLOY_BACKEND",
        "gloo",
        "The communication backend of the ranks. nccl needs HETDEPLOY_LINK=direct and NVIDIA cards on all machines.",
        "gloo or nccl",
        _one_of("gloo", "nccl"),
    ),
    Row(
        "HETDEPLOY_TORCH_VERSION",
        "2.13.0",
        "The release of torch in the head's image. Joiners must have the same.",
        "a release such as 2.13.0 or 2.13.0+cu128",
        _like(r"[0-9]+\.[0-9]+\.[0-9]+(\+[a-z0-9.]+)?"),
    ),
    Row(
        "HETDEPLOY_TORCH_INDEX",
        "auto",
        f"An extra package index for torch when the image is built. auto: {CPU_INDEX} for cpu, none for the others.",
        "auto, none or an http(s) address",
        lambda value: value in ("auto", "none") or re.fullmatch(r"https?://\S+", value) is not None,
    ),
    Row(
        "HETDEPLOY_RUNS_DIR",
        ".hetdeploy/runs",
        "Where journals, logs and checkpoints of runs go, seen from the job's folder.",
        "a folder",
        _folder,
    ),
    Row(
        "HETDEPLOY_DATA_DIR",
        "",
        "A folder of this machine that its ranks may read, as /data in the head's container. Empty: none.",
        "a folder",
        _folder,
    ),
    Row(
        "HETDEPLOY_CODE_TTL",
        "86400",
        "How many seconds a join code stays good. 0: until it is replaced.",
        "a number of seconds from 0 to 31536000",
        _whole(0, 31_536_000),
    ),
    Row(
        "HETDEPLOY_JOIN_TIMEOUT",
        "3600",
        "How many seconds the machines wait for each other before they give up.",
        "a number of seconds from 1 to 604800",
        _whole(1, 604_800),
    ),
    Row(
        "HETDEPLOY_EXIT_TIMEOUT",
        "60",
        "How many seconds the other ranks may go on once the first one has ended well.",
        "a number of seconds from 1 to 604800",
        _whole(1, 604_800),
    ),
    Row(
        "HETDEPLOY_SHM_SIZE",
        "2g",
        "Shared memory of the head's rank container, for data loaders with workers.",
        "a size such as 512m or 2g",
        _like(r"[1-9][0-9]{0,11}[bkmg]?"),
    ),
    Row(
        "HETDEPLOY_TENSORBOARD_PORT",
        "6006",
        "The TCP port of `hetdeploy up --tensorboard`, on 127.0.0.1 of the head alone.",
        "a port from 1 to 65535",
        _whole(1, 65535),
    ),
    Row(
        "HETDEPLOY_OMP_NUM_THREADS",
        "",
        "Threads that each rank of this machine computes with on the CPU. Empty: left to torch.",
        "a number from 1 to 1024",
        _whole(1, 1024),
    ),
)
KEYS = tuple(row.key for row in TABLE)


@dataclass(frozen=True)
class Value:
    """A setting's value. ``where`` points at its origin: ``--port``, ``the environment``, ``.env:3``, ``default``."""

    value: str
    origin: Origin
    where: str


class Settings(Mapping[str, Value]):
    """Each key of the table with its value and origin; as properties, the values in the types they stand for."""

    def __init__(self, values: Mapping[str, Value], folder: Path) -> None:
        self._values = dict(values)
        self.folder = folder

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def nic(self) -> str | None:
        """The NIC that was asked for by name, unchecked: which there are is for network.choose to say."""
        return self["HETDEPLOY_NIC"].value or None

    @property
    def port(self) -> int:
        return int(self["HETDEPLOY_PORT"].value)

    @property
    def store_port(self) -> int:
        return int(self["HETDEPLOY_STORE_PORT"].value)

    @property
    def link(self) -> Literal["tunnel", "direct"]:
        return cast(Literal["tunnel", "direct"], self["HETDEPLOY_LINK"].value)

    @property
    def accelerator(self) -> Literal["auto", "cuda", "rocm", "mps", "cpu"]:
        return cast(Literal["auto", "cuda", "rocm", "mps", "cpu"], self["HETDEPLOY_ACCELERATOR"].value)

    @property
    def nodes(self) -> tuple[int, int]:
        """The least and the most nodes of the job."""
        least, _, most = self["HETDEPLOY_NODES"].value.partition(":")
        return int(least), int(most or least)

    @property
    def crew(self) -> bool:
        return self["HETDEPLOY_CREW"].value == "yes"

    @property
    def nproc_per_node(self) -> int:
        return int(self["HETDEPLOY_NPROC_PER_NODE"].value)

    @property
    def backend(self) -> Literal["gloo", "nccl"]:
        return cast(Literal["gloo", "nccl"], self["HETDEPLOY_BACKEND"].value)

    @property
    def torch_version(self) -> str:
        return self["HETDEPLOY_TORCH_VERSION"].value

    def torch_index(self, accelerator: str) -> str:
        """The extra package index for an image built for ``accelerator``; empty for none."""
        value = self["HETDEPLOY_TORCH_INDEX"].value
        if value == "auto":
            return CPU_INDEX if accelerator == "cpu" else ""
        return "" if value == "none" else value

    @property
    def runs_dir(self) -> Path:
        return self.folder / Path(self["HETDEPLOY_RUNS_DIR"].value).expanduser()

    @property
    def data_dir(self) -> Path | None:
        value = self["HETDEPLOY_DATA_DIR"].value
        return self.folder / Path(value).expanduser() if value else None

    @property
    def code_ttl(self) -> int:
        """Seconds; 0 for no end."""
        return int(self["HETDEPLOY_CODE_TTL"].value)

    @property
    def join_timeout(self) -> int:
        """Seconds."""
        return int(self["HETDEPLOY_JOIN_TIMEOUT"].value)

    @property
    def exit_timeout(self) -> int:
        """Seconds."""
        return int(self["HETDEPLOY_EXIT_TIMEOUT"].value)

    @property
    def shm_size(self) -> str:
        return self["HETDEPLOY_SHM_SIZE"].value

    @property
    def tensorboard_port(self) -> int:
        return int(self["HETDEPLOY_TENSORBOARD_PORT"].value)

    @property
    def omp_num_threads(self) -> int | None:
        value = self["HETDEPLOY_OMP_NUM_THREADS"].value
        return int(value) if value else None


def load(flags: Mapping[str, str | None], environ: Mapping[str, str], folder: Path) -> Settings:
    """The settings of the job in ``folder``. ``flags`` maps keys of the table to what was given on the command line.

    Raises UsageError for an env file that cannot be read, for a value that is not allowed (all of them in one message,
    each with its key, value and origin), for settings that exclude each other, and for GLOO_DEVICE_TRANSPORT.
    """
    if unknown := flags.keys() - set(KEYS):
        raise KeyError(f"no such settings: {unknown}")
    files = {name: envfile.read(folder / name, KEYS) for name in _FILES if (folder / name).exists()}
    _reject_transport(environ, files)
    values = {row.key: _find(row, flags, environ, files) for row in TABLE}
    wrong = [
        f"{row.key}={envfile.shown(values[row.key].value)} ({values[row.key].where}) is not {row.allowed}"
        for row in TABLE
        if values[row.key].value and not row.accepts(values[row.key].value)
    ]
    if wrong:
        raise UsageError("; ".join(wrong), "`hetdeploy env --explain` says what each setting means")
    settings = Settings(values, folder)
    _reject_contradictions(settings)
    return settings


def inherited(environ: Mapping[str, str]) -> list[str]:
    """Names in ``environ`` that a launcher sets for its ranks, and that must not come from the user's shell."""
    return sorted(name for name in environ if any(fnmatch.fnmatchcase(name, like) for like in _LAUNCHER_VARIABLES))


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of ``environ`` without what ``inherited`` names."""
    left_over = set(inherited(environ))
    return {name: value for name, value in environ.items() if name not in left_over}


def shell_warnings(environ: Mapping[str, str]) -> list[str]:
    """What the user should know about the shell's variables, one line each: ignored leftovers and misspelt keys."""
    warnings = []
    if names := inherited(environ):
        warnings.append(f"the shell has {', '.join(names)}; the ranks will not see them (`unset {' '.join(names)}`)")
    for name in sorted(environ):
        advice = envfile.nearest(name, KEYS)
        if name.startswith(envfile.PREFIX) and name not in KEYS and name not in names and advice.startswith("did you"):
            warnings.append(f"the shell's {name} is not a setting of hetdeploy: {advice}")
    return warnings


def example() -> str:
    """The text of ``.env.example``: every setting with its meaning, commented out at its default."""
    blocks = [
        "# Settings of hetdeploy. Copy this file to .env (for the job, the same on every machine) or to\n"
        "# .env.local (for this machine), and take the # from the lines you change. A command's flag wins\n"
        "# over the environment, the environment over .env.local, .env.local over .env. An empty value\n"
        "# counts as not set; $ has no meaning. A word after a space and a # is a comment.\n"
    ]
    for row in TABLE:
        text = textwrap.wrap(
            f"{row.meaning} Allowed: {row.allowed}.", _EXAMPLE_WIDTH, initial_indent="# ", subsequent_indent="# "
        )
        blocks.append("\n".join([*text, f"#{row.key}={row.default}"]) + "\n")
    return "\n".join(blocks)


def _find(
    row: Row,
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    files: _Files,
) -> Value:
    if flag := flags.get(row.key):
        return Value(flag, "flag", row.flag)
    if variable := environ.get(row.key):
        return Value(variable, "environment", "the environment")
    for name, entries in files.items():
        entry = entries.get(row.key)
        if entry is not None and entry.value:
            return Value(entry.value, name, f"{name}:{entry.line}")
    return Value(row.default, "default", "default")


def _reject_transport(environ: Mapping[str, str], files: _Files) -> None:
    """Torch's wheels have one gloo transport each, tcp on Linux and uv on macOS: asking for the other only fails."""
    name = "GLOO_DEVICE_TRANSPORT"
    places = ["the environment"] if environ.get(name) else []
    places += [f"{file}:{entries[name].line}" for file, entries in files.items() if name in entries]
    if places:
        raise UsageError(
            f"{name} is set ({', '.join(places)}), but torch has a single gloo transport on each system, tcp on Linux "
            "and uv on macOS, and hetdeploy translates between the two",
            f"remove {name}",
        )


def _reject_contradictions(settings: Settings) -> None:
    backend, link, port = (settings[f"HETDEPLOY_{name}"] for name in ("BACKEND", "LINK", "PORT"))
    if settings.backend == "nccl" and settings.link == "tunnel":
        raise UsageError(
            f"HETDEPLOY_BACKEND=nccl ({backend.where}) cannot go through HETDEPLOY_LINK=tunnel ({link.where})",
            "use --link direct, or --backend gloo",
        )
    crew, ranks = (settings[f"HETDEPLOY_{name}"] for name in ("CREW", "NPROC_PER_NODE"))
    if settings.crew and settings.nproc_per_node > 1:
        raise UsageError(
            f"HETDEPLOY_CREW=yes ({crew.where}) has one rank on each machine, and HETDEPLOY_NPROC_PER_NODE is "
            f"{ranks.value} ({ranks.where})",
            "use --nproc-per-node 1",
        )
    if settings.crew and settings.backend == "nccl":
        raise UsageError(
            f"HETDEPLOY_BACKEND=nccl ({backend.where}) is of no use with HETDEPLOY_CREW=yes ({crew.where}): each rank "
            "is a world of its own, and leader and helpers exchange in pairs over gloo",
            "leave out one of the two",
        )
    if settings.link == "direct" and settings.port == settings.store_port:
        raise UsageError(
            f"HETDEPLOY_PORT ({port.where}) and HETDEPLOY_STORE_PORT are both {settings.port}", "choose another for one"
        )
