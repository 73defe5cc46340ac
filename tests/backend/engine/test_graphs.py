"""The warm-up of a GPU engine: the largest steps within its limits, and none beyond them."""

from __future__ import annotations

import numpy as np
import pytest

from tridecode.backend.engine.step.decode_graphs import padded_sizes, warm_up_plans


@pytest.mark.parametrize("max_tokens", [16, 512, 8192])
@pytest.mark.parametrize("max_rows", [1, 3, 16, 256])
@pytest.mark.parametrize("longest", [8, 124, 2048, 8192])
def test_no_step_before_serving_is_beyond_the_limits(max_tokens: int, max_rows: int, longest: int) -> None:
    """Tables of positions have `longest` rows: a kernel would read behind them."""
    plans = warm_up_plans(max_tokens, max_rows, longest)
    for plan in plans:
        assert 0 < plan.num_rows <= max_rows
        assert plan.positions.min() == 0 and plan.positions.max() < longest
        if plan.num_decodes == 0:
            lens = np.diff(plan.query_starts)
            assert plan.num_tokens <= max_tokens and lens.min() > 0
            assert np.array_equal(plan.context_lens, lens)
    assert plans[0].num_tokens == min(max_tokens, max_rows * longest)  # libraries keep what the largest needs
    assert plans[-1].num_decodes == plans[-1].num_rows == max_rows


@pytest.mark.parametrize("most", [1, 2, 7, 64, 200, 256, 300])
def test_every_number_of_rows_has_a_padded_size(most: int) -> None:
    sizes = padded_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    assert all(min(size for size in sizes if size >= rows) < 2 * rows + 8 for rows in range(1, most + 1))
