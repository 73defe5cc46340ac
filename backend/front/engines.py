"""Opens the engines that a worker serves: those of this machine through their sockets, or Triton servers."""

from __future__ import annotations

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.front.settings import FrontSettings
from tridecode.backend.front.triton.tls import tls_options
from tridecode.backend.service.engine_service import EngineService
from tridecode.backend.service.owner import Owner
from tridecode.backend.service.preparation import Preparation
from tridecode.backend.supervisor.processes import ProcessId, alive

_MAX_PREPARING_REQUESTS, _MAX_PREPARING_BYTES = 1024, 67_108_864


class FrontOwner(Owner):
    """The server whose life the engine shares, or the front's first process."""

    process: ProcessId

    @classmethod
    def of(cls, text: str, guest: bool) -> FrontOwner:
        """text: "PID:START"."""
        pid, _, start = text.partition(":")
        if not (pid.isdigit() and start.isdigit()):
            raise ConfigError(f"the owner is {text!r}; wanted PID:START, as in 4711:123456")
        owner = cls(int(pid), guest=guest)
        object.__setattr__(owner, "process", ProcessId(int(pid), int(start)))
        return owner

    def is_gone(self) -> bool:
        return not alive(self.process)


def open_engines(settings: FrontSettings, num_tokens: int) -> dict[str, EngineService]:
    """Return the engines by their names in logs and metrics. Call it in the event loop.

    num_tokens: of the tokenizer, without those that were added to it.
    """
    return _triton_engines(settings, num_tokens) if settings.triton else _own_engines(settings)


def _own_engines(settings: FrontSettings) -> dict[str, EngineService]:
    owner = FrontOwner.of(settings.owner, settings.guest)
    return {
        str(number): EngineService.open(
            settings.engine_dir,
            "openai",
            owner,
            hold_s=0.0,
            resume_within_s=settings.resume_within_s,
            number=number,
        )
        for number in range(settings.num_engines)
    }


def _triton_engines(settings: FrontSettings, num_tokens: int) -> dict[str, EngineService]:
    from tridecode.backend.front.triton.link import TritonLink  # here: gRPC takes 0.3 s and 30 MB
    from tridecode.backend.front.triton.watch import SameModel

    tls = tls_options(settings)
    same, links = SameModel(settings.vocab_size, num_tokens), list[TritonLink]()
    for host in settings.triton:
        links.append(TritonLink(host, same, links, tls))
    preparation = Preparation(_MAX_PREPARING_REQUESTS, _MAX_PREPARING_BYTES).start()
    return {link.host: EngineService(link, preparation, settings.resume_within_s) for link in links}
