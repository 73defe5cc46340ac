"""The connection between the supervisors: zmq over TCP, encrypted with CurveZMQ.

Node 0's key pair follows from the job's secret. Its public key is never sent, and a client cannot complete
the handshake without it, so both ends prove that they have the secret. Source: rfc.zeromq.org/26.
"""

from __future__ import annotations

import hashlib

import zmq
from zmq.utils import z85

from tridecode.backend.nodes.addresses import bracketed

_HEARTBEAT_MS = 1000  # TCP alone would detect a cut link only after many minutes
_SILENCE_MS = 3000
_RECONNECT_MS = 200
_QUEUE = 1000  # queued messages per peer


def _key_pair(secret: str) -> tuple[bytes, bytes]:
    """Public and secret key of node 0, Z85."""
    secret_key = z85.encode(hashlib.sha256(b"tridecode nodes 1\0" + secret.encode()).digest())
    return zmq.curve_public(secret_key), secret_key


def _socket(context: zmq.Context, kind: int, address: str) -> zmq.Socket:
    socket = context.socket(kind)
    socket.set_hwm(_QUEUE)
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.IPV6, int(":" in address))  # a name means its IPv4 address
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, 4 << 20)
    return socket


def listen(context: zmq.Context, address: str, port: int, secret: str) -> zmq.Socket:
    """Node 0's ROUTER. Raises zmq.ZMQError if the address is not ours or the port is taken."""
    socket = _socket(context, zmq.ROUTER, address)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = _key_pair(secret)
    try:
        socket.bind(f"tcp://{bracketed(address)}:{port}")
    except zmq.ZMQError:
        socket.close(0)
        raise
    return socket


def connect(context: zmq.Context, address: str, port: int, secret: str) -> zmq.Socket:
    """Another node's DEALER; it reconnects by itself after each break."""
    socket = _socket(context, zmq.DEALER, address)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5 * _RECONNECT_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued while node 0 is absent
    socket.curve_serverkey, _ = _key_pair(secret)
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(f"tcp://{bracketed(address)}:{port}")
    return socket
