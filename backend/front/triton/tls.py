"""TLS of the connections to Triton servers: checked before anything starts."""

from __future__ import annotations

import ssl
from typing import Any

from tridecode.backend.base.errors import ConfigError
from tridecode.backend.front.settings import FrontSettings


def check_tls(hosts: tuple[str, ...], tls: bool, ca: str, cert: str, key: str) -> None:
    """Raise ConfigError for options that contradict each other and for files that cannot be used."""
    files = {"--triton-ca": ca, "--triton-cert": cert, "--triton-key": key}
    given = next((name for name, path in files.items() if path), "--triton-tls" if tls else "")
    if given and not hosts:
        raise ConfigError(f"{given} without --triton; wanted both")
    if given and not tls:
        raise ConfigError(f"{given} without --triton-tls; wanted both")
    if bool(cert) != bool(key):
        found = "--triton-cert without --triton-key" if cert else "--triton-key without --triton-cert"
        raise ConfigError(f"{found}; wanted both, or neither")
    if ca:
        _load(f"--triton-ca {ca}", "certificates in PEM", lambda context: context.load_verify_locations(ca))
    if cert:
        wanted = "a certificate in PEM and its key without a password"
        # without a password, OpenSSL would ask at the terminal
        _load(
            f"--triton-cert {cert} and --triton-key {key}",
            wanted,
            lambda context: context.load_cert_chain(cert, key, password=""),
        )


def _load(what: str, wanted: str, load: Any) -> None:
    try:
        load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    except ssl.SSLError as error:
        raise ConfigError(f"{what} cannot be used: {error.reason or error}; wanted {wanted}") from None
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from None


def tls_options(settings: FrontSettings) -> dict[str, Any]:
    """Return the options of tritonclient's InferenceServerClient."""
    if not settings.triton_tls:
        return {}
    return {
        "ssl": True,
        "root_certificates": settings.triton_ca or None,
        "private_key": settings.triton_key or None,
        "certificate_chain": settings.triton_cert or None,
    }
