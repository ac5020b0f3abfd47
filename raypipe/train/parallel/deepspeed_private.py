"""DeepSpeed's private names that raypipe needs, all in one file. zero.py trains with them.

DeepSpeed's public checkpoints are pickled and tied to the world size. To save a tensor's share by
name, one must know where DeepSpeed keeps it. An upgrade may move any of these names; then
tests/train/test_zero3.py and test_parallel.py fail here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from raypipe.train.parallel.precision import FIRST_SCALE, GROWS_AFTER, LOWEST_SCALE
from raypipe.train.parallel.snapshot import Piece, cut


class Shares:
    """What this rank holds of the weights and of the optimizer's state.

    zero: DeepSpeed's optimizer of `stage` 1 to 3. Under zero3 a parameter's share is a flat shard,
    and the last rank's is padded. Under zero1 and zero2 parameters are whole on every rank.
    """

    def __init__(self, zero: Any, stage: int, rank: int, device: torch.device) -> None:
        self._zero = zero
        self._stage = stage
        self._rank = rank
        self._device = device

    def local(self, p: Tensor) -> Tensor:
        """This rank's share of a parameter, with its padding."""
        return p.ds_tensor.data if self._stage == 3 else p.data  # type: ignore[attr-defined]

    def unpadded(self, p: Tensor) -> Tensor:
        """This rank's share without padding, flat. Nobody ever wrote the padding's memory."""
        share = self.local(p).flatten()
        if self._stage < 3:
            return share
        left = p.ds_numel - self._rank * share.numel()  # type: ignore[attr-defined]
        return share[: max(0, left)]

    def piece(self, p: Tensor) -> Piece:
        """This rank's share of a parameter under zero3, with its place in the whole."""
        share = self.local(p)
        return Piece.part(share, self._rank * share.numel(), tuple(p.ds_shape))  # type: ignore[attr-defined]

    def flat(self) -> list[Tensor]:
        """This rank's float32 weights in a few flat tensors, which the optimizer updates."""
        if self._stage == 3:
            return self._zero.fp32_partitioned_groups_flat  # type: ignore[no-any-return]
        return self._zero.single_partition_of_fp32_groups  # type: ignore[no-any-return]

    def link(self) -> None:
        """Let zero1 and zero2 link all parameters to the optimizer's state.

        DeepSpeed does it after the first step of the first group, and misses the later groups.
        """
        state = self._zero.optimizer.state
        if self._stage < 3 and all(state.get(flat) for flat in self.flat()):
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def set(self, p: nn.Parameter, whole: Tensor, key: str | None = None) -> None:
        """Give the optimizer this rank's share of `whole`.

        It is the float32 weight of `p`, or with a `key` that moment of it.
        """
        if self._stage < 3:
            p.set_full_hp_param(whole.to(self._device), key)  # type: ignore[attr-defined]
            return
        # The last share is padded. DeepSpeed's own setter of whole values overruns there.
        size = self.local(p).numel()
        share = cut(whole, self._rank * size, size).to(self._device)
        self._zero.set_local_hp_param(share, p, key)

    def moment(self, p: nn.Parameter, key: str) -> Piece | None:
        """This rank's piece of one moment; None if other ranks hold all of it."""
        if self._stage == 3:
            share = self._zero.get_local_fp32_param(p, key).flatten()
            return Piece.part(share, self._rank * len(share), tuple(p.ds_shape))  # type: ignore[attr-defined]
        # zero1 and zero2: DeepSpeed's record of where this rank's fragment of `p` lies.
        mapping = p._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        share = mapping.get_optim_state_fragment(key).flatten()
        return Piece.part(share, mapping.lp_fragment_address.start, tuple(p.shape))

    def release(self) -> None:
        """Free the layers that DeepSpeed keeps gathered because it will use them again soon.

        Otherwise the next forward pass would not see weights that were replaced meanwhile. This
        calls the optimizer's method: the engine's also collects garbage, which takes 0.3 s and
        frees none of raypipe's objects.
        """
        if self._stage == 3:
            self._zero.empty_partition_cache()


def build_no_operator() -> None:
    """Keep DeepSpeed from compiling an operator that no training uses.

    On CPUs every process group of DeepSpeed has one for messages through shared memory. Inference
    with tensor parallelism alone calls it (`inference_all_reduce`). Its first use compiled it for
    half a minute on two cores, and needed g++.
    """
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


def use_dynamic_loss_scaler(zero_optimizer: Any) -> Any:
    """Let `zero_optimizer` scale fp16's loss by DeepSpeed's DynamicLossScaler; returns the scaler.

    Under autocast DeepSpeed (0.19) takes torch's GradScaler instead, and never calls its unscale.
    Then an overflow never lowers the scale, so no later step updates the weights; and clipping
    acts on the norm times the scale.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(
        init_scale=FIRST_SCALE,
        scale_window=GROWS_AFTER,
        min_scale=LOWEST_SCALE / 2,
        delayed_shift=1,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=False,
    )
    zero_optimizer.torch_autocast_gradscaler = None
    zero_optimizer.loss_scaler = scaler
    zero_optimizer.dynamic_loss_scale = True
    return scaler
