"""Philox-4x32-10, the counter-based generator of Salmon et al. 2011, in numpy: the sampler's reference."""

from __future__ import annotations

import numpy as np

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(key: tuple[int, int], counters: np.ndarray) -> np.ndarray:
    """Ten rounds. key: two 32-bit words; counters: (n, 4) uint64 holding 32-bit words -> (n, 4) uint64,
    32-bit words.
    """
    k0, k1 = key
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1)


def uniforms(key: tuple[int, int], ids: np.ndarray, generated: int) -> np.ndarray:
    """Return (n,) float32 in (0, 1]: the uniform of each token id at draw `generated`, as defined by
    kernels.ops.sample.
    """
    ids = ids.astype(np.uint64)
    groups, inverse = np.unique(ids >> np.uint64(2), return_inverse=True)
    counters = np.zeros((len(groups), 4), np.uint64)
    counters[:, 0], counters[:, 1] = groups, generated
    words = philox(key, counters)[inverse, (ids & np.uint64(3)).astype(np.int64)]
    return ((words.astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32)
