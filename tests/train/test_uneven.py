"""Three ranks that cannot share a batch equally learn what one rank learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .uneven_ranks import CASES, run, trained


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uneven")
    run(3, folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_parts_of_different_sizes_make_the_gradient_of_the_whole_batch(
    case: str, three: Path
) -> None:
    alone, together = trained(case), torch.load(three / f"{case}.pt", weights_only=True)
    assert alone.keys() == together.keys()
    for name, values in alone.items():
        torch.testing.assert_close(together[name], values, rtol=1e-3, atol=2e-4, msg=name)
