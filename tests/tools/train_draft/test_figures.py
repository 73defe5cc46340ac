"""Tokens per step of a drafter, for drafts on any device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tridecode.tools.train_draft.figures import tokens_per_step
from tridecode.tools.train_draft.texts import Text

TEXT = Text(np.array([1, 2, 3, 4, 5, 6], np.int32), 1)  # the answer is 2 to 6
DRAFTS = [[3, 4], [4, 9], [9, 6], [6, 9]]  # after 2, 3, 4 and 5


class OnAnotherDevice(Tensor):
    """A tensor that, like one on a GPU, does not meet a tensor on the CPU in one operation."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is Tensor.cpu:
            return args[0].as_subclass(Tensor)
        if any(type(one) is Tensor and one.ndim for one in args):
            raise RuntimeError("Expected all tensors to be on the same device")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("kind", [Tensor, OnAnotherDevice])
def test_a_step_keeps_the_drafts_before_the_first_wrong_one(kind: type[Tensor]) -> None:
    drafts = torch.tensor(DRAFTS).as_subclass(kind)
    # tokens of the steps: with one draft 3 4, 5, 6; with two drafts 3 4 5, 6
    assert tokens_per_step([(TEXT, drafts)], 2) == [pytest.approx(4 / 3), 2.0]
    wrong = torch.tensor([[9, 4], *DRAFTS[1:]]).as_subclass(kind)
    assert tokens_per_step([(TEXT, wrong)], 2) == [pytest.approx(4 / 3)] * 2, "3, 4 5, 6"
