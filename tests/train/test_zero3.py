"""DeepSpeed ZeRO-3 on two CPU workers: sharded in training, an ordinary model when saved."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from raypipe.train import trainer, worker_group

from ..pixels import decoded
from .conftest import Jobs


@pytest.mark.slow
@pytest.mark.share
@pytest.mark.usefixtures("ray_session")
def test_two_workers_hold_half_each_and_save_what_a_plain_model_loads(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs(
        **{"train.strategy": "zero3", "train.workers": 2, "train.epochs": 5, "train.clip_norm": 1.0}
    )
    notes = tmp_path

    def rank_that_tells(config: dict[str, object]) -> dict[str, object]:
        """In the worker: the real, unpatched rank; then it records its share and predictions."""
        from raypipe.train import parallel, worker_group

        engines, build = [], parallel.build
        parallel.build = lambda *args: engines.append(build(*args)) or engines[-1]  # type: ignore[func-returns-value]
        outcome = worker_group.run_worker(config)
        engine = engines[0]
        engine.eval()
        images = (torch.arange(4 * 32 * 32 * 3).view(4, 32, 32, 3) % 256).to(torch.uint8)
        with torch.no_grad():
            logits = engine.forward(images).tolist()
        told = {"engine": type(engine).__name__, "held": engine.parameters_held(), "logits": logits}
        (notes / f"rank-{engine.rank}.json").write_text(json.dumps(told))
        return outcome

    monkeypatch.setattr(worker_group, "run_worker", rank_that_tells)
    result = trainer.run(job)
    ranks = [json.loads((notes / f"rank-{rank}.json").read_text()) for rank in range(2)]
    model = trainer.assemble(job, result)
    parameters = sum(p.numel() for p in model.parameters())
    assert [r["engine"] for r in ranks] == ["Zero", "Zero"]
    assert all(parameters / 2 <= r["held"] < 0.52 * parameters for r in ranks)

    assert len(result.history) == 5
    assert result.history[-1]["train_loss"] < 0.7 * result.history[0]["train_loss"]
    pixels_NHWC, labels_N, _ = decoded(job)
    with torch.no_grad():
        logits_NC = model(torch.from_numpy(pixels_NHWC))
        loss = cross_entropy(logits_NC, torch.from_numpy(labels_N))
        images = (torch.arange(4 * 32 * 32 * 3).view(4, 32, 32, 3) % 256).to(torch.uint8)
        mine = model(images).numpy()
    assert float(loss) == pytest.approx(result.metrics["val_loss"], rel=1e-4)
    assert np.allclose(ranks[0]["logits"], ranks[1]["logits"], atol=1e-5)
    if result.best_epoch == 4:
        assert np.allclose(ranks[0]["logits"], mine, atol=1e-4)
