"""A rank for tests with the real server: the toy model of tests/fake_engine.py under a real RankLink."""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

from tridecode.backend.supervisor.rank_link import RankLink

sys.path.insert(0, str(Path(__file__).parents[2]))  # the supervisor starts this file as a program

from tests.fake_engine import FakeEngine

STEP_S = 0.03


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine-dir")
    parser.add_argument("--control")
    parser.add_argument("--endpoint")
    for name in ("--epoch", "--rank", "--world"):
        parser.add_argument(name, type=int)
    arguments = parser.parse_args()
    stopped = threading.Event()
    link = RankLink(arguments.control, arguments.epoch, arguments.rank, stopped.set)
    engine = FakeEngine(arguments.endpoint, arguments.epoch, step_s=STEP_S)
    engine.start()
    link.ready()
    while not stopped.wait(0.05):
        link.status.running, link.status.steps = engine.running, engine.steps
    engine.stop()
    link.close()


if __name__ == "__main__":
    main()
