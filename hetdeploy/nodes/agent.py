"""The process that is torchrun on one node.

Started before it is needed, so that importing torch overlaps the handshake; waits on its standard input for one JSON
line (see ``launch.AgentSpec``), then runs torchrun in this very process and leaves a result file:

    {"failures": [{"rank", "local_rank", "code"}], "error": null | "one line"}

It ends when its standard input closes, so no rank outlives the process that started it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

LINE_PREFIX = "rank${rank}| "
"""How torchrun marks each line that it passes on; ``launch.split_line`` reads it."""


def main() -> int:
    import torch.distributed.run as torchrun

    line = sys.stdin.readline()
    if not line:
        return 0
    spec = json.loads(line)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    os.environ.update(spec["env"])
    os.chdir(spec["folder"])
    result = _run(torchrun, spec["arguments"])
    Path(spec["result"]).write_text(json.dumps(result), encoding="utf-8")
    return 1 if result["error"] or result["failures"] else 0


def _run(torchrun: Any, arguments: list[str]) -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
    from torch.distributed.launcher.api import elastic_launch

    DynamicRendezvousHandler._create_tcp_store_server = _store_on_one_address  # type: ignore[assignment,method-assign]
    config, entrypoint, command = torchrun.config_from_args(torchrun.parse_args(arguments))
    config.log_line_prefix_template = LINE_PREFIX
    try:
        elastic_launch(config, entrypoint)(*command)
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "local_rank": failure.local_rank, "code": failure.exitcode}
            for rank, failure in error.failures.items()
        ]
        return {"failures": failures, "error": None}
    except SignalException as stopped:
        return {"failures": [], "error": f"the ranks were stopped ({stopped.sigval.name})"}
    except RendezvousError as error:
        return {"failures": [], "error": f"the rendezvous failed: {error}"}
    return {"failures": [], "error": None}


def _store_on_one_address(_handler: Any, address: str, _port: int) -> Any:
    """The workers' store, listening on the node's own address alone.

    torchelastic's own version listens on every address of the machine, and a store takes orders from anybody.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.create_server((address, 0), backlog=128)
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, multi_tenant=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
