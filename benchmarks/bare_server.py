"""A server as it is written in an afternoon: FastAPI, torch, one process, no limits and no log.

python -m benchmarks.bare_server PACKAGE PORT

It has the same model, the same decoder and, as ours, one thread of torch in each thread that
predicts: with torch's own default it is slower as soon as two clients ask.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool

from raypipe.registry.package import Package

torch.set_num_threads(1)
package = Package(Path(sys.argv[1]))
app = FastAPI()


def answer(image: bytes) -> dict[str, Any]:
    found = package.predict([image], threads=1)
    return {"label": found.labels[0], "scores": found.scores_NC[0].tolist()}


@app.post("/predict")
async def predict(request: Request) -> dict[str, Any]:
    return await run_in_threadpool(answer, await request.body())


@app.get("/ready")
async def ready() -> dict[str, str]:
    return {"model": package.seal}


uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
