"""A rank without torch: it ties itself to the supervisor and then does what `<engine dir>/behaviour` says.

behaviour: "ready" (the default), "loading" (never ready), "exit" (code 3 while starting), "refuse" (a fatal
error), "stumble" (an error that is not fatal), "stuck" (ready, then in one step indefinitely), "deaf" (ready,
passes over Stop).
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path

from tridecode.backend.supervisor.rank_link import RankLink


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--engine-dir", "--control", "--endpoint"):
        parser.add_argument(name, required=True)
    for name in ("--epoch", "--rank", "--world"):
        parser.add_argument(name, required=True, type=int)
    arguments, _ = parser.parse_known_args()  # of several nodes: where the ranks meet
    engine_dir = Path(arguments.engine_dir)
    stopped = threading.Event()
    link = RankLink(arguments.control, arguments.epoch, arguments.rank)
    link.on_stop = stopped.set
    link.progress("loading weights")
    time.sleep(0.3)  # long enough to be seen in the states that doors get
    behaviour = (engine_dir / "behaviour").read_text() if (engine_dir / "behaviour").exists() else "ready"
    if behaviour == "exit":
        return 3
    if behaviour == "refuse":
        link.failed("config.ini has no head_num", fatal=True)
        return 1
    if behaviour == "stumble":
        link.failed("the device is busy", fatal=False)
        return 1
    if behaviour == "loading":
        time.sleep(600)
    link.status.running, link.status.waiting = 3, 2
    link.ready()
    if behaviour == "stuck":
        link.status.busy_since = time.monotonic()
    if behaviour == "deaf":
        time.sleep(600)
    stopped.wait()
    (engine_dir / f"stopped-{arguments.epoch}-{arguments.rank}").touch()
    link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
