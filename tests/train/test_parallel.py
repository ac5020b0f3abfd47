"""A strategy changes memory and speed alone: curves agree, and each resumes what another saved.

Two ranks are started once; tests read what the scenarios told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypipe.config import validate
from raypipe.errors import ConfigError
from raypipe.train import parallel
from raypipe.train.parallel import ParallelConfig, deepspeed_setup
from raypipe.train.parallel.blocks import blocks
from raypipe.train.parallel.engine import micro_batches

from .parallel_ranks import Scenario, data, result, run, run_here, tiny

ALL: dict[str, Any] = {
    "accumulate": 3,
    "clip_norm": 0.5,
    "ema": 0.9,
    "activation_checkpointing": True,
}
HALF: dict[str, dict[str, Any]] = {
    precision: {"precision": precision, "clip_norm": 0.5} for precision in ("bf16", "fp16")
}
NATIVE, ZERO = ("ddp", "fsdp"), ("zero1", "zero2", "zero3")


def family(strategies: tuple[str, ...], shards: str) -> list[Scenario]:
    """Each strategy without options, and with all, stopped and resumed; `shards` from single."""
    scenarios = []
    for s in strategies:
        scenarios += [
            Scenario(s, s),
            Scenario(f"{s}-half", s, steps=10, settings=ALL),
            Scenario(f"{s}-resumed", s, steps=10, settings=ALL, resume=f"{s}-half"),
        ]
    return [
        *scenarios,
        Scenario(f"{shards}-from-single", shards, steps=10, settings=ALL, resume="single-half"),
    ]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    run_here(
        [
            Scenario("single", "single"),
            Scenario("single-clipped", "single", settings={"clip_norm": 0.5}),
            Scenario("single-norms", "single", batch_norm=True),
            Scenario("single-all", "single", settings=ALL),
            Scenario("single-half", "single", steps=10, settings=ALL),
            Scenario("single-resumed", "single", steps=10, settings=ALL, resume="single-half"),
        ],
        folder,
    )
    return folder


@pytest.fixture(scope="module")
def pair(single: Path) -> Path:
    """Results of two ranks. One process group runs all scenarios, for its start takes 15 s."""
    half = [
        Scenario(f"{s}-{precision}", s, steps=10, settings=settings)
        for s in NATIVE
        for precision, settings in HALF.items()
    ]
    sync = {"sync_bn": True, "activation_checkpointing": True}
    norms = [Scenario(f"{s}-norms", s, batch_norm=True, settings=sync) for s in NATIVE]
    zero = [
        *family(ZERO, "zero3"),
        Scenario("zero3-bf16", "zero3", steps=10, settings=HALF["bf16"]),
    ]
    with pytest.MonkeyPatch.context() as patched:
        # Where a compiled operator would be.
        patched.setenv("TORCH_EXTENSIONS_DIR", str(single / "operators"))
        run(2, family(NATIVE, "fsdp") + half + norms + zero, single)
    return single


def folder_of(strategy: str, request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue("single" if strategy == "single" else "pair")


def close(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected)
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("strategy", ("single", *NATIVE, *ZERO))
def test_same_seed_and_batch_are_one_curve_and_weights_a_plain_model_predicts_with(
    strategy: str, request: pytest.FixtureRequest
) -> None:
    """20 steps in fp32 on one device or two ranks: losses within 1e-4, an ordinary state dict."""
    folder = folder_of(strategy, request)
    expected, told = result(folder, "single")["losses"], result(folder, strategy)
    assert len(expected) == 20 and expected[-1] < 0.7 * expected[0]
    close(told["losses"], expected)
    model = tiny()
    model.load_state_dict(told["weights"])
    with torch.no_grad():
        logits = model.eval()(data(999)[0])
    assert torch.allclose(logits, told["logits"], atol=1e-5)


@pytest.mark.parametrize("strategy", ("single", *NATIVE, *ZERO))
def test_a_resumed_run_goes_on_with_every_option(
    strategy: str, request: pytest.FixtureRequest
) -> None:
    """All options, interrupted and resumed, against one device without an interruption."""
    folder = folder_of(strategy, request)
    whole, half, rest = (
        result(folder, name) for name in ("single-all", f"{strategy}-half", f"{strategy}-resumed")
    )
    close(half["losses"] + rest["losses"], whole["losses"])
    assert all(
        torch.allclose(rest["weights"][name], w, rtol=1e-3, atol=1e-5)
        for name, w in whole["weights"].items()
    )


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_a_run_is_taken_up_by_another_strategy_at_another_world_size(
    strategy: str, request: pytest.FixtureRequest
) -> None:
    folder = folder_of(strategy, request)
    whole, half = (
        result(folder, "single-all")["losses"],
        result(folder, f"{strategy}-half")["losses"],
    )
    close(result(folder, f"{strategy}-from-single")["losses"], whole[10:])
    run_here(
        [Scenario(f"single-from-{strategy}", "single", 10, f"{strategy}-half", settings=ALL)],
        folder,
    )
    close(half + result(folder, f"single-from-{strategy}")["losses"], whole)


@pytest.mark.parametrize(
    ("strategy", "least", "most"), [("ddp", 0.99, 1), ("fsdp", 0.5, 0.53), ("zero3", 0.5, 0.53)]
)
def test_who_shards_holds_half(
    strategy: str, least: float, most: float, request: pytest.FixtureRequest
) -> None:
    told = result(folder_of(strategy, request), strategy)
    assert least <= told["held"] / told["all_held"] <= most


@pytest.mark.parametrize("strategy", ("single", *NATIVE, *ZERO))
def test_every_rank_hears_of_a_weight_that_one_rank_lost(
    strategy: str, request: pytest.FixtureRequest
) -> None:
    """The NaN is in the last rank's share. All ranks must agree, or some stop and others wait."""
    assert result(folder_of(strategy, request), strategy)["not_finite"] == [None, "stem.weight"]


def test_no_operator_is_compiled(pair: Path) -> None:
    """DeepSpeed would take half a minute for one that only inference calls, and need a compiler."""
    assert not list((pair / "operators").rglob("*.so"))


@given(layers=st.integers(1, 100), elements=st.integers(1, 10**9))
def test_zero_lends_for_messages_what_a_layer_needs_and_little_of_the_model(
    layers: int, elements: int
) -> None:
    sizes = [elements] * layers
    settings, gpu = ParallelConfig(strategy="zero3"), torch.device("cuda")
    cfg = deepspeed_setup.engine_config(3, settings, 2, torch.float32, gpu, sizes)[
        "zero_optimization"
    ]
    assert elements <= cfg["reduce_bucket_size"] <= max(elements, sum(sizes) / 16, 7_000_000)
    assert (
        cfg["stage3_max_reuse_distance"]
        < cfg["stage3_max_live_parameters"]
        <= 2 * cfg["reduce_bucket_size"]
    )


@pytest.mark.parametrize("name", ["ddp-bf16", "fsdp-bf16", "ddp-fp16", "fsdp-fp16", "zero3-bf16"])
def test_half_precision_learns_over_whole_weights(
    name: str, request: pytest.FixtureRequest
) -> None:
    folder = folder_of(name.split("-")[0], request)
    told, whole = result(folder, name), result(folder, "single-clipped")["losses"]
    whole = whole[: len(told["losses"])]
    assert told["losses"] == pytest.approx(whole, rel=0.02) and told["losses"] != whole
    assert {w.dtype for w in told["weights"].values()} == {torch.float32}
    if name.endswith("-fp16"):
        assert told["facts"]["scaler"]["scale"] > 1


@pytest.mark.parametrize("strategy", NATIVE)
def test_synchronised_batch_norms_see_the_global_batch(strategy: str, pair: Path) -> None:
    one, two = result(pair, "single-norms"), result(pair, f"{strategy}-norms")
    close(two["losses"], one["losses"])
    for name in (
        "norm.running_mean",
        "blocks.1.norm.running_var",
        "blocks.1.norm.num_batches_tracked",
    ):
        assert torch.allclose(two["weights"][name], one["weights"][name], rtol=1e-4)


def test_the_mean_is_what_is_saved_and_judged(single: Path) -> None:
    told = result(single, "single-all")
    assert not torch.allclose(
        told["optimizer"]["trained/head.weight"], told["weights"]["head.weight"]
    )
    assert told["facts"]["averaged"] == 20


def test_micro_batches_are_the_batch() -> None:
    inputs, targets = data(0)
    parts = list(micro_batches(inputs, targets, 3))
    assert torch.equal(torch.cat([x for x, *_ in parts]), inputs) and torch.equal(
        torch.cat([y for _, y, *_ in parts]), targets
    )
    assert sum(share for *_, share, _ in parts) == pytest.approx(1) and [
        last for *_, last in parts
    ] == [False, False, True]
    assert len(list(micro_batches(inputs[:2], targets[:2], 3))) == 2


def test_blocks_are_what_a_model_repeats() -> None:
    model = tiny()
    assert blocks(model) == list(model.blocks)
    assert blocks(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))) == []
    stages = torch.nn.Sequential(
        *(torch.nn.ModuleDict({"layers": m.blocks}) for m in (tiny(), tiny()))
    )
    assert len(blocks(stages)) == 6


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero3"])
def test_one_worker_has_nothing_to_shard_with(strategy: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{strategy} shards a model over several workers.*Set train\.workers=2"
    ):
        parallel.build(tiny(), ParallelConfig.model_validate({"strategy": strategy}))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"strategy": "ddp", "offload": "optimizer"}, "Set strategy=fsdp or zero3 to offload"),
        ({"strategy": "zero2", "offload": "parameters"}, "zero2 shards no parameters"),
        ({"batch_size": 4, "accumulate": 5}, "smaller than an image"),
    ],
)
def test_what_cannot_be_is_refused_at_once(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        validate(ParallelConfig, settings)
