"""Strategies: how one model lives on one or many devices. The loop calls `forward` and `step` and never asks which it is.

single, ddp (PyTorch DDP; gloo on CPU, nccl on GPU) and zero3 (DeepSpeed: optimizer state, gradients and parameters sharded
over the ranks). DeepSpeed is imported only when asked for.
"""

from __future__ import annotations

import contextlib
import os
import sysconfig
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raypipe.errors import ConfigError


class Engine(Protocol):
    """A model, its optimizer and the ranks they span."""

    rank: int
    world: int
    device: torch.device
    classes: int

    def train(self) -> None: ...
    def eval(self) -> None: ...
    def forward(self, inputs: Tensor) -> Tensor: ...
    def step(self, loss: Tensor) -> None: ...
    def set_lr(self, lr: float) -> None: ...
    def weights(self) -> dict[str, Tensor]: ...
    def optimizer_state(self) -> dict[str, Any]: ...
    def load(self, weights: dict[str, Tensor], optimizer_state: dict[str, Any]) -> None: ...


class Replicated:
    """single and ddp: every rank holds the whole model."""

    def __init__(
        self,
        model: nn.Module,
        classes: int,
        lr: float,
        weight_decay: float,
        clip_norm: float | None,
        bf16: bool,
        device: torch.device,
    ) -> None:
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.device, self.classes, self._clip_norm, self._bf16 = device, classes, clip_norm, bf16
        self._model = model.to(device)
        wrap = self.world > 1
        self._wrapped = (
            DistributedDataParallel(self._model, device_ids=[device] if device.type == "cuda" else None)
            if wrap
            else self._model
        )
        self._optimizer = torch.optim.AdamW(parameter_groups(self._model, weight_decay), lr=lr)

    def train(self) -> None:
        self._model.train()

    def eval(self) -> None:
        _same_buffers(self._model, self.world)
        self._model.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        with autocast(self.device, self._bf16):  # evaluation goes past DDP: eval() made the buffers equal already
            return (self._wrapped if self._model.training else self._model)(inputs).float()

    def step(self, loss: Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        self._optimizer.step()

    def set_lr(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def weights(self) -> dict[str, Tensor]:
        return {k: v.detach().cpu().contiguous() for k, v in self._model.state_dict().items()}

    def optimizer_state(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load(self, weights: dict[str, Tensor], optimizer_state: dict[str, Any]) -> None:
        self._model.load_state_dict(weights)
        self._optimizer.load_state_dict(optimizer_state)


class Zero3:
    """zero3: each rank holds 1/world of parameters, gradients and optimizer state (Rajbhandari et al. 2020).

    Every forward gathers layer by layer, so all ranks call it equally often, in evaluation too. Resuming mid-run is not
    offered yet: DeepSpeed's checkpoints are tied to the world size. The first use compiles an operator (about 30 s).
    """

    def __init__(
        self,
        model: nn.Module,
        classes: int,
        lr: float,
        weight_decay: float,
        clip_norm: float | None,
        bf16: bool,
        device: torch.device,
        batch_size: int,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError("zero3 shards a model over several workers", got="train.workers=1", fix="Set train.workers=2")
        deepspeed = _deepspeed(device)
        self.rank, self.world, self.device, self.classes = dist.get_rank(), dist.get_world_size(), device, classes
        for p in model.parameters():  # DeepSpeed sends parameters as flat bytes: channels_last ones have no such view
            p.data = p.data.contiguous()
        optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay), lr=lr)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=model.to(device),
            optimizer=optimizer,
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": max(1, batch_size // self.world),
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "torch_autocast": {"enabled": bf16, "dtype": "bfloat16"},
                "gradient_clipping": clip_norm or 0.0,
            },
        )

    def train(self) -> None:
        self._engine.train()

    def eval(self) -> None:
        _same_buffers(self._engine.module, self.world)
        self._engine.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        return self._engine(inputs).float()  # type: ignore[no-any-return]

    def step(self, loss: Tensor) -> None:
        self._engine.backward(loss)
        self._engine.step()

    def set_lr(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def weights(self) -> dict[str, Tensor]:
        deepspeed = _deepspeed(self.device)
        params = list(self._engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters([p for _, p in params], modifier_rank=None):
            gathered = {name: p.detach().cpu().float().clone() for name, p in params}
        return gathered | {name: b.detach().cpu().clone() for name, b in self._engine.module.named_buffers()}

    def parameters_held(self) -> int:
        """Elements of parameters that this rank keeps between steps: what sharding is for."""
        return sum(p.ds_tensor.numel() for p in self._engine.module.parameters())

    def optimizer_state(self) -> dict[str, Any]:
        return {}

    def load(self, weights: dict[str, Tensor], optimizer_state: dict[str, Any]) -> None:
        raise ConfigError(
            "A zero3 run cannot be resumed yet", fix="Use train.strategy=ddp, or start the run under a new run.name"
        )


def build(
    model: nn.Module,
    classes: int,
    strategy: str,
    lr: float,
    weight_decay: float,
    clip_norm: float | None,
    precision: str,
    batch_size: int,
) -> Engine:
    """The engine for this rank. `auto` is ddp with several ranks and single with one."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    bf16 = precision == "bf16" or (precision == "auto" and bf16_is_fast(device))
    if strategy == "zero3":
        return Zero3(model, classes, lr, weight_decay, clip_norm, bf16, device, batch_size)
    return Replicated(model, classes, lr, weight_decay, clip_norm, bf16, device)


def _same_buffers(model: nn.Module, world: int) -> None:
    """Batch statistics differ by rank after a step: let all ranks judge with rank 0's, which are the ones that are saved."""
    if world > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def _deepspeed(device: torch.device) -> Any:
    """DeepSpeed, set up to compile its operators with the ninja that was installed beside this Python."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    scripts = sysconfig.get_path("scripts")
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    try:
        import deepspeed  # type: ignore[import-untyped]
    except ImportError as e:
        raise ConfigError(f"zero3 needs DeepSpeed: {e}", fix="pip install 'raypipe[deepspeed]'") from None
    return deepspeed


def bf16_is_fast(device: torch.device) -> bool:
    """GPUs since Ampere, and CPUs with AVX512-BF16; on a CPU without it, autocast ran 4 times slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


def autocast(device: torch.device, bf16: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay on matrices and filters only, not on biases and norms (Goyal et al. 2017); frozen parameters left out."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed, plain = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]
