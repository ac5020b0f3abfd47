"""The bytes of a request's body: how many it may have, and how long they may take."""

from __future__ import annotations

import asyncio

from fastapi import Request

from raypipe.serve.online.limits import Refused


def announced(request: Request, max_bytes: int) -> int:
    """Bytes to set aside for the body. Raises Refused (413) for an announced body too large."""
    text = request.headers.get("content-length", "")
    if not text.isdigit():
        # It comes in chunks: the most that will be read of it.
        return max_bytes
    size = int(text)
    if size > max_bytes:
        raise _too_large(size, max_bytes)
    return size


def _too_large(size: int, max_bytes: int) -> Refused:
    return Refused(
        413,
        "The body is too large",
        got=f"{size:,} bytes",
        rule=f"At most {max_bytes:,} bytes",
        fix="Send a smaller one; serve.max_bytes is the limit of an image",
    )


async def read(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises Refused: 413 if it is too large, 408 if it does not arrive."""
    try:
        return await asyncio.wait_for(_collect(request, max_bytes), timeout_s)
    except asyncio.TimeoutError:
        raise Refused(
            408,
            "The body did not arrive in time",
            rule=f"serve.timeout_s is {timeout_s:g}",
            headers={"Connection": "close"},
        ) from None


async def _collect(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        # A length that was announced may be wrong, and chunks announce none.
        if size > max_bytes:
            raise _too_large(size, max_bytes)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
