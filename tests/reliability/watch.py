"""Probes a server continuously, from a separate process, for its health and for answers.

    python -m tests.reliability.watch --address 127.0.0.1:8000 --model fastertransformer

Each line of the output is a JSON array: "health", "probe" or "late", start and end in monotonic seconds,
verdict, text.
A probe is a real request for two tokens over HTTP; the probes show whether the reported health is true.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

HEALTH_S = 0.1  # interval of health requests
PROBE_S = 0.25  # interval of probes
NO_ANSWER_S = 1.0  # an orchestrator's probe that takes longer counts as "not healthy"
LIMIT_S = 8.0  # time limit of a probe
GRID_S = 0.05
#: a probe that pauses together with its engine would seem to be answered all the time
_DECLINE = {"name": "resume", "datatype": "BOOL", "shape": [1, 1], "data": [False]}
PROBE_BODIES = {
    "fastertransformer": {
        "inputs": [
            {"name": "input_ids", "datatype": "UINT32", "shape": [1, 3], "data": [5, 9, 11]},
            {"name": "input_lengths", "datatype": "UINT32", "shape": [1, 1], "data": [3]},
            {"name": "request_output_len", "datatype": "UINT32", "shape": [1, 1], "data": [2]},
            _DECLINE,
        ]
    },
    "tensorrt_llm_bls_plain": {
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["the"]},
            {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [2]},
            _DECLINE,
        ]
    },
    "preprocessing": {
        "inputs": [
            {"name": name, "datatype": "BYTES", "shape": [1, 1], "data": ["the"]}
            for name in ("QUERY", "BAD_WORDS_DICT", "STOP_WORDS_DICT")
        ]
        + [{"name": "REQUEST_OUTPUT_LEN", "datatype": "UINT32", "shape": [1, 1], "data": [2]}]
    },
    "postprocessing": {
        "inputs": [
            {"name": "TOKENS_BATCH", "datatype": "UINT32", "shape": [1, 1, 2], "data": [5, 6]},
            {"name": "RESPONSE_INPUT_LENGTHS", "datatype": "INT32", "shape": [1, 1], "data": [1]},
        ]
    },
}
HEALTH_BODY = {"inputs": [{"name": "PROBE", "datatype": "BOOL", "shape": [1], "data": [True]}]}


def ask(address: str, model: str, body: dict, limit_s: float) -> tuple[bool, str]:
    """Return whether the model answered, and its answer or the reason."""
    connection = http.client.HTTPConnection(address, timeout=limit_s)
    try:
        connection.request("POST", f"/v2/models/{model}/infer", json.dumps(body).encode())
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
        return answer.status == 200, text
    except (OSError, http.client.HTTPException) as error:
        return False, f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def healthy(text: str) -> bool:
    outputs = {output["name"]: output["data"] for output in json.loads(text).get("outputs", [])}
    return bool(outputs.get("READY", [False])[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--model", default="fastertransformer", help="asked by the probes; none: no probes")
    parser.add_argument("--parent", type=int, default=0)
    arguments = parser.parse_args()
    lock = threading.Lock()

    def tell(kind: str, start: float, good: bool, text: str) -> None:
        line = json.dumps([kind, start, time.monotonic(), good, text[:200]])
        with lock:
            print(line, flush=True)

    def one_probe() -> None:
        start = time.monotonic()
        good, text = ask(arguments.address, arguments.model, PROBE_BODIES[arguments.model], LIMIT_S)
        tell("probe", start, good, "" if good else text)

    def one_health() -> None:
        start = time.monotonic()
        good, text = ask(arguments.address, "tridecode_health", HEALTH_BODY, 2 * NO_ANSWER_S)
        tell("health", start, good and healthy(text), text)

    pool = ThreadPoolExecutor(80)
    probes = not arguments.model.startswith("none")
    count = 0
    began = time.monotonic()
    while sys.stdin.readable():
        pool.submit(one_health)
        if probes and count % round(PROBE_S / HEALTH_S) == 0:
            pool.submit(one_probe)
        count += 1
        late = time.monotonic() - (began + (count - 1) * HEALTH_S)
        if late > HEALTH_S:
            tell("late", time.monotonic() - late, True, "")
        if _stdin_closed(max(0.0, began + count * HEALTH_S - time.monotonic())):
            break
    pool.shutdown(wait=False, cancel_futures=True)
    sys.stdout.flush()
    os._exit(0)  # does not wait for hanging requests


def _stdin_closed(seconds: float) -> bool:
    return bool(select.select([sys.stdin], [], [], seconds)[0])


# ---------------------------------------------------------------- in the test


@dataclass
class Sample:
    kind: str
    start: float
    end: float
    good: bool
    text: str


class Watch:
    """Runs the process above and reads its samples."""

    def __init__(self, address: str, model: str = "fastertransformer") -> None:
        command = [sys.executable, "-m", "tests.reliability.watch", "--address", address, "--model", model]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.samples: list[Sample] = []
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self.samples.append(Sample(*json.loads(line)))
            except ValueError:
                continue  # the last line of a killed process

    def of(self, kind: str) -> list[Sample]:
        return [sample for sample in list(self.samples) if sample.kind == kind]

    def healthy_now(self) -> bool:
        seen = self.of("health")
        return bool(seen) and seen[-1].good and time.monotonic() - seen[-1].end < 2 * NO_ANSWER_S

    def answers_since(self, moment: float) -> float | None:
        """Return the time at which the first probe sent after `moment` was answered."""
        return min((s.end for s in self.of("probe") if s.good and s.start > moment), default=None)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(2)

    def disagreement(self, start: float, end: float) -> tuple[float, str]:
        """Return the longest time between two moments for which health contradicted the probes, and how."""
        able = [(s.start, s.end) for s in self.of("probe") if s.good]
        said = [(s.start, s.end, s.good and s.end - s.start < NO_ANSWER_S) for s in self.of("health")]
        worst, worst_way, run, way = 0.0, "", 0.0, ""
        moment = start
        while moment < end:
            truth = any(a <= moment <= b + PROBE_S * 3 for a, b in able)
            latest = max((s for s in said if s[1] <= moment), key=lambda s: s[1], default=None)
            verdict = latest is not None and latest[2] and moment - latest[1] < NO_ANSWER_S
            now = "" if truth == verdict else ("said true" if verdict else "said false")
            run, way = (run + GRID_S, now) if now and now == way else (GRID_S if now else 0.0, now)
            if run > worst:
                worst, worst_way = run, way
            moment += GRID_S
        return worst, worst_way

    def lateness(self, start: float, end: float) -> float:
        """Return the largest delay of the watching thread itself, a measure of the machine's load."""
        return max((s.end - s.start for s in self.of("late") if start <= s.end <= end), default=0.0)


if __name__ == "__main__":
    main()
