"""Any of macOS's programs, by the name under which it is called: prints what was recorded for the arguments it is
given, or refuses them."""

import argparse
import json
import os
import select
import signal
import sys
from pathlib import Path

FOLDER = Path(os.environ["FAKE_MAC"])


def main() -> int:
    name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
    if name == "caffeinate":
        return caffeinate(arguments)
    answer = json.loads((FOLDER / "answers.json").read_text())[name].get(" ".join(arguments))
    report(what="asked" if answer is not None else "refused", tool=name, arguments=arguments)
    if answer is None:
        print(f"{name}: no answer to {arguments} was recorded", file=sys.stderr)
        return 64
    sys.stdout.write(answer)
    return 0


def caffeinate(arguments: list[str]) -> int:
    """Ends with the process behind -w, or when it is told to; without -w not before that."""
    parser = argparse.ArgumentParser(prog="caffeinate")
    for flag in "disum":
        parser.add_argument(f"-{flag}", action="store_true")
    parser.add_argument("-w", type=int, required=True)
    awaited = parser.parse_args(arguments).w
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    report(what="awake", arguments=arguments)
    select.select([os.pidfd_open(awaited), told], [], [])
    report(what="asleep")
    return 0


def report(**event: object) -> None:
    with (FOLDER / "events.jsonl").open("a") as events:
        events.write(json.dumps(event) + "\n")


sys.exit(main())
