"""The settings of `tridecode serve`, and the command line of tritonserver derived from them."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.supervisor.front_process import ADDRESS_VARIABLE, PORT_VARIABLE
from tridecode.tools.serve import triton_access
from tridecode.tools.serve.checks import check_repository, check_triton_arguments
from tridecode.tools.serve.openai_ports import openai_ports
from tridecode.tools.serve.ports import check_free
from tridecode.tools.serve.triton_http import TritonHttp

ORPHANS = "3.5"  # seconds, so that every open request ends within 5 s
GIVE_UP_AFTER = "10"  # deaths of tritonserver within serving.DEATHS_WITHIN_S

# without a GPU these features only write warnings and errors into the log
_WITHOUT_GPU = ("--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0", "--enable-peer-access=false")


@dataclass(frozen=True)
class ServeOptions:
    """How `tridecode serve` runs.

    address: where HTTP and gRPC listen, and the metrics unless metrics_address is given. door_python: see
    triton_install.prepare. drain_s: time limit of open requests after SIGTERM. start_timeout_s: longest time
    without progress during a start. orphans: when to restart tritonserver because requests cannot end after
    their door died: "idle" (once no other request is open), a number of seconds (at the latest), or "leave".
    give_up_after: deaths of tritonserver within 300 s after which `serve` ends, or "never". openai_port: port
    of the OpenAI service on `address`; None: as in config.pbtxt. key: key of the control APIs.
    """

    repository: Path
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    address: str = triton_access.LOOPBACK
    door_python: str | None = None
    drain_s: float = 20.0
    triton_args: tuple[str, ...] = ()
    metrics_address: str | None = None
    start_timeout_s: float = 600.0
    orphans: str = ORPHANS
    give_up_after: str = GIVE_UP_AFTER
    openai_port: int | None = None
    key: str = field(default_factory=triton_access.control_key, repr=False)

    def server_arguments(self) -> list[str]:
        """Return tritonserver's arguments. The user's come last: Triton uses the later value of a repeated
        flag."""
        return [
            f"--model-repository={self.repository}",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            *(f"--{name}-address={self.address_of(name)}" for name in ("http", "grpc", "metrics")),
            *triton_access.restrictions(self.key, self.triton_args),
            "--disable-auto-complete-config",
            "--model-control-mode=explicit",
            "--load-model=*",
            "--model-load-thread-count=8",  # doors that start at the same time; Triton's default is 4
            "--exit-on-error=false",  # the repository index then gives the reason of a model that failed
            f"--exit-timeout-secs={max(1, round(self.drain_s))}",
            *([] if shutil.which("nvidia-smi") else _WITHOUT_GPU),
            *self.triton_args,
        ]

    def openai_environment(self) -> dict[str, str]:
        """Return the variables by which the supervisor opens the OpenAI service."""
        return {PORT_VARIABLE: str(self.openai_port), ADDRESS_VARIABLE: self.address}

    def http(self) -> TritonHttp:
        host = triton_access.LOOPBACK if self.address in ("0.0.0.0", "::", "") else self.address
        return TritonHttp(f"{host}:{self.http_port}", self.key)

    def ports(self) -> dict[str, int]:
        """Return the ports that tritonserver will open, by name."""
        ports = {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}
        for name in ("grpc", "metrics"):
            values = triton_access.values_of(self.triton_args, f"allow-{name}")
            if values and values[-1].lower() in ("false", "0"):
                del ports[name]
        return ports

    def address_of(self, name: str) -> str:
        """Return the address on which the port of that name listens."""
        return self.metrics_address or self.address if name == "metrics" else self.address

    def orphans_s(self) -> float | None:
        """Return the longest time in seconds that orphaned requests stay open; "idle": infinite, "leave":
        None.

        Raises ConfigError.
        """
        if self.orphans in ("idle", "leave"):
            return math.inf if self.orphans == "idle" else None
        try:
            seconds = float(self.orphans)
        except ValueError:
            seconds = -1.0
        if not seconds >= 0.0:
            raise ConfigError(f"--orphans is {self.orphans!r}; wanted idle, leave, or a number of seconds")
        return seconds

    def max_deaths(self) -> float:
        """Return the deaths of tritonserver after which `serve` gives up; "never": infinite. Raises
        ConfigError."""
        if self.give_up_after == "never":
            return math.inf
        text = self.give_up_after.strip()
        if not (text.isascii() and text.isdigit() and int(text) > 0):
            raise ConfigError(
                f"--give-up-after is {self.give_up_after!r}; wanted never, or a number of deaths from 1 on"
            )
        return int(text)

    def check(self) -> list[str]:
        """Return the models to serve. Raises ConfigError for everything that can be checked before the
        start."""
        self.orphans_s()
        self.max_deaths()
        for name, seconds in (("drain-s", self.drain_s), ("start-timeout-s", self.start_timeout_s)):
            if not seconds >= 0.0:
                raise ConfigError(f"--{name} is {seconds:g}; wanted 0 or more seconds")
        check_triton_arguments(self.triton_args)
        models = check_repository(self.repository)
        self._check_ports()
        return models

    def _check_ports(self) -> None:
        """Raise ConfigError for a port that is in use, or that two services would open."""
        places = {f"--{name}-port": (self.address_of(name), port) for name, port in self.ports().items()}
        places.update(openai_ports(self.repository, self.openai_port, self.address))
        for setting, (address, port) in places.items():
            same = [other for other in places if other != setting and places[other][1] == port]
            if same:
                raise ConfigError(f"{setting} and {same[0]} are both {port}; wanted distinct ports")
            check_free(setting, address, port)
