"""One-pass heads: `depth` small residual blocks between the target's last hidden state and its own head.

Medusa (Cai et al., arXiv 2401.10774) with two changes. The heads also read the newest token, so that they
know which of the likely tokens was sampled. The blocks share their first matrix, so that a pass consists of
three matrices and the head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from tridecode.tools.train_draft.texts import Text

_EPS = 1e-5
_ROWS = 256  # positions whose logits are computed together


class Heads(nn.Module):
    """z_j = z + outs_j(silu(hidden(rms(z)) + token(rms(e)) + bias)), j = 1 … depth.

    z: output of the target's final norm from which the newest token was sampled. e: word embedding of the
    newest token. The target's head turns z_j into the logits of the j-th token after the newest one. hidden:
    hidden size C. width: size F of the inner layer.
    """

    def __init__(self, hidden: int, width: int, depth: int):
        super().__init__()
        self.hidden = nn.Linear(hidden, width)  # has the only bias of the inner layer
        self.token = nn.Linear(hidden, width, bias=False)
        self.outs = nn.Linear(width, depth * hidden, bias=False)
        nn.init.zeros_(self.outs.weight)  # at first each head predicts what the target's head does
        self.depth = depth

    def forward(self, z: Tensor, e: Tensor) -> Tensor:
        """Return (B, depth, C). z, e: (B, C)."""
        inner = silu(self.hidden(_rms(z)) + self.token(_rms(e)))
        return z[:, None] + self.outs(inner).view(len(z), self.depth, -1)

    @torch.no_grad()
    def drafts(
        self, text: Text, states: Tensor, embedding: Tensor, head: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return the drafts after each newest token of a text's answer, the most likely ids, (n, depth).

        states: (tokens, C) of the text. embedding, head: (V, C); bias: (V,).
        """
        ids = torch.from_numpy(text.ids).long().to(head.device)
        newest = torch.arange(text.prompt, len(ids) - 1, device=head.device)
        z = states.to(head.device, head.dtype)
        found = [self(z[part - 1], embedding[ids[part]]) for part in newest.split(_ROWS)]
        return torch.cat([linear(part, head, bias).argmax(-1) for part in found])


def _rms(x: Tensor) -> Tensor:
    """Scale each row to unit root mean square."""
    x32 = x.float()
    return (x32 * (x32.square().mean(-1, keepdim=True) + _EPS).rsqrt()).to(x.dtype)
