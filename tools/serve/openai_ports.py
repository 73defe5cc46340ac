"""The ports of the OpenAI services that a repository, or an option of `tridecode serve`, wants."""

from __future__ import annotations

from pathlib import Path

from tridecode.backend.base.errors import ConfigError
from tridecode.model_repo_templates.pbtxt import parse_model_config, string_parameters
from tridecode.tools.serve import triton_access

OPTION = "--openai-port"


def openai_ports(repository: Path, given: int | None, address: str) -> dict[str, tuple[str, int]]:
    """Return where each service will listen: name of its setting -> (address, port).

    given: the option's value, which precedes that of config.pbtxt. address: of the option. Raises ConfigError
    if the option is given and there are engines of several models: each of them would open the port.
    """
    parameters = {
        path.parent.name: string_parameters(
            parse_model_config(path.read_text(encoding="utf-8", errors="replace"), str(path))
        )
        for path in repository.glob("*/config.pbtxt")
    }
    engines = sorted({one.get("engine_model", "") for one in parameters.values()} & set(parameters))
    if given is not None:
        if len(engines) > 1:
            raise ConfigError(
                f"{OPTION} is {given}, and {repository} has engines of several models "
                f"({', '.join(engines)}), and each would open it; "
                "set openai_port in the config.pbtxt of one"
            )
        return {OPTION: (address, given)}
    found = {}
    for engine in engines:
        port = parameters[engine].get("openai_port", "").strip()
        if port.isascii() and port.isdigit():  # the engine refuses other texts than a number and "auto"
            where = parameters[engine].get("openai_address", "").strip() or triton_access.LOOPBACK
            found[f"openai_port of {engine}/config.pbtxt"] = where, int(port)
    return found
