"""Run by Python before anything else, in every Python process of a fake Mac.

The process of the command finds itself on Darwin. Those that it starts are torch's and stay on Linux, since torch is a
Linux one; a rank reports what it was started with, and gives its gloo the face of a Mac's.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

IS_BELOW_COMMAND = "FAKE_MAC_IS_BELOW_COMMAND"
REPORTED = ("GLOO_SOCKET_IFNAME", "HETDEPLOY_DIALECT", "PYTORCH_ENABLE_MPS_FALLBACK")

LINUX_ONLY = {
    "socket": ("AF_NETLINK", "AF_PACKET", "SO_BINDTODEVICE", "SO_PEERCRED", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT"),
    "os": ("memfd_create", "posix_fadvise", "sched_getaffinity"),
}
"""What Python on macOS does not have: who uses it unasked fails here as there."""

EHOSTUNREACH = 65
"""macOS's number. Where others differ too, Python has an exception class that tells them apart."""


def main() -> None:
    sys.addaudithook(_report_forks)
    if IS_BELOW_COMMAND not in os.environ:
        os.environ[IS_BELOW_COMMAND] = "1"
        _become_darwin()
    elif "HETDEPLOY_JOB" in os.environ:
        if "RANK" in os.environ:
            _report(what="rank", rank=os.environ["RANK"], **_named(os.environ))
            atexit.register(_report, what="rank ended", rank=os.environ["RANK"])
        _speak_uv(os.environ)


def _become_darwin() -> None:
    # These read sys.platform, and choose what to load by it, when they are imported.
    import platform
    import shutil
    import socket
    import ssl
    import subprocess
    import sysconfig

    import psutil

    assert all((shutil, ssl, subprocess, psutil))
    sysconfig.get_config_vars()
    for module, names in LINUX_ONLY.items():
        for name in names:
            delattr(sys.modules[module], name)
    socket.TCP_KEEPALIVE = 4  # type: ignore[attr-defined, misc]  # Linux's TCP_KEEPIDLE, under macOS's name
    _number_as_darwin(socket)

    node = os.uname().nodename
    kernel = "Darwin Kernel Version 24.5.0: root:xnu-11417.121.6~2/RELEASE_ARM64_T8103"
    uname = os.uname_result(("Darwin", node, "24.5.0", kernel, "arm64"))
    os.uname = lambda: uname
    platform.mac_ver = lambda *_args, **_kwargs: ("15.5", ("", "", ""), "arm64")  # type: ignore[assignment]
    sys.platform = "darwin"


def _number_as_darwin(socket: Any) -> None:
    linux, connect = errno.EHOSTUNREACH, socket.socket.connect
    errno.EHOSTUNREACH = EHOSTUNREACH  # type: ignore[misc]
    errno.errorcode[EHOSTUNREACH] = errno.errorcode.pop(linux)

    def connect_as_darwin(self: Any, address: Any) -> None:
        try:
            connect(self, address)
        except OSError as error:
            if error.errno != linux:
                raise
            raise OSError(EHOSTUNREACH, error.strerror) from None

    socket.socket.connect = connect_as_darwin


def _speak_uv(environ: MutableMapping[str, str]) -> None:
    """A Mac's gloo speaks ``uv`` by itself. What stands for that here is no part of what the launcher has to set."""
    if "HETDEPLOY_BRIDGE" in environ:
        environ |= {"HETDEPLOY_DIALECT": "uv", "HETDEPLOY_SOCKADDR": "darwin", "HETDEPLOY_FACE": "uv"}
    elif environ.get("HETDEPLOY_FACE") == "tcp":  # the self-test dresses a Mac's rank as one of Linux: here it is one
        del environ["HETDEPLOY_FACE"]


def _report_forks(event: str, _arguments: tuple[object, ...]) -> None:
    """On a Mac a process that is forked, and goes on without exec, crashes once Metal is in use."""
    if event in ("os.fork", "os.forkpty"):
        _report(what="forked", command=sys.orig_argv)


def _named(environ: MutableMapping[str, str]) -> dict[str, str | None]:
    return {name: environ.get(name) for name in REPORTED}


def _report(**event: object) -> None:
    with Path(os.environ["FAKE_MAC"], "events.jsonl").open("a") as events:
        events.write(json.dumps(event) + "\n")


main()
