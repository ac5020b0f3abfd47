"""Estimates are arithmetic: these numbers were worked out by hand."""

from __future__ import annotations

import pytest

from raypipe.config import validate
from raypipe.costs import compare, estimate
from raypipe.costs.compare import Model
from raypipe.costs.estimate import Counts, Fixed, Part, Where
from raypipe.costs.nodes import NODES, RATES
from raypipe.costs.rates import Rate, Rates
from raypipe.costs.settings import CostConfig
from raypipe.costs.spent import Price, Spent, duration
from raypipe.errors import ConfigError
from raypipe.search.schedulers.halving import rungs

RATES_HERE = Rates(
    decode=Rate(cpu_s=0.002, wall_s=0.001),
    step=Rate(cpu_s=0.02, wall_s=0.01),
    look=Rate(cpu_s=0.004, wall_s=0.002),
    embed=Rate(cpu_s=0.004, wall_s=0.002),
    device="cpu",
    slowness=1.0,
    seconds=0.0,
)
TWO_CPUS = Where(cpus=2, devices=1, gpu=False)
COUNTS = Counts(train=1000, val=200, test=100, read=1200)


@pytest.fixture(autouse=True)
def no_cost_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "EPOCH", Fixed(0.0, 0.0))


def test_a_cached_training_decodes_once() -> None:
    once, epochs = estimate.training(COUNTS, 10, RATES_HERE, TWO_CPUS, "cache", frozen=False)
    assert once.cpu_s == pytest.approx(1200 * 0.002) and once.seconds == pytest.approx(1.2)
    assert epochs.cpu_s == pytest.approx(10 * (1000 * 0.02 + 200 * 0.004))
    assert epochs.seconds == pytest.approx(10 * (1000 * 0.01 + 200 * 0.002))
    assert epochs.device_s == epochs.seconds


def test_a_streamed_training_decodes_in_each_epoch_on_the_same_cpus() -> None:
    [epochs] = estimate.training(COUNTS, 10, RATES_HERE, TWO_CPUS, "threads", frozen=False)
    cpu_s = 10 * (1000 * 0.022 + 200 * 0.006)
    assert epochs.cpu_s == pytest.approx(cpu_s)
    # Two CPUs have nothing left beside the step, so what is decoded comes on top.
    assert epochs.seconds == pytest.approx(cpu_s / 2)


def test_a_gpu_waits_for_the_slower_of_decoding_and_computing() -> None:
    one = Where(cpus=2, devices=1, gpu=True)
    slow = Rates(**{**vars(RATES_HERE), "decode": Rate(0.04, 0.03)})
    for found, seconds in ((RATES_HERE, 1000 * 0.01 + 200 * 0.002), (slow, 1200 * 0.03)):
        [epochs] = estimate.training(COUNTS, 1, found, one, "threads", frozen=False)
        assert epochs.seconds == pytest.approx(seconds)


def test_features_are_computed_once() -> None:
    features, _ = estimate.training(COUNTS, 10, RATES_HERE, TWO_CPUS, "cache", frozen=True)
    assert features.cpu_s == pytest.approx(1200 * 0.006)


def test_halving_counts_the_epochs_of_each_rung() -> None:
    # Nine trials to epoch 1, three to 3, one to 9: 9 + 3 * 2 + 1 * 6.
    assert estimate.halving_epochs(9, rungs(9, 1, 3), 3) == 21
    # At least one trial reaches the end, however few there are.
    assert estimate.halving_epochs(1, rungs(9, 1, 3), 3) == 9
    assert estimate.halving_epochs(4, rungs(1, 1, 3), 3) == 4


def test_a_slower_machine_starts_more_slowly() -> None:
    fixed = Fixed(cpu_s=4, seconds=3)
    assert fixed.part("start", slowness=1.5, times=2) == Part("start", 9, 12)


def test_money_is_of_all_nodes_for_as_long_as_the_verb_takes() -> None:
    price = Price("g5.xlarge", 1.0, nodes=4, devices=8)
    spent = Spent(1800, device_s=7200, price=price, saved=0.25, saved_device_s=3600)
    assert spent.usd == 2.0
    assert spent.facts()["took"] == (
        "30 min, $2.00 (4 x g5.xlarge at $1.000 an hour); "
        "the training 2.0000 device hours, with earlier calls"
    )
    # Half a dollar for an hour of one of eight devices.
    assert spent.facts()["saved"].startswith("25% of the epochs, about 1.0000 device hours, $0.50")
    assert spent.summary()["saved_usd"] == spent.saved_usd == pytest.approx(0.5)
    assert spent.logged() == {"cost.seconds": 1800, "cost.device_hours": 2.0, "cost.usd": 2.0}
    assert set(Spent(10, 10).logged()) == {"cost.seconds", "cost.device_hours"}
    assert Price("g5.xlarge", 1.0, nodes=4).usd_per_device_s is None
    assert Spent(10, 10).usd is None and "$" not in Spent(10, 10).facts()["took"]


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0 s"), (89, "89 s"), (91, "2 min"), (7300, "2 h 2 min")]
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_own_prices_replace_list_prices_and_add_node_types() -> None:
    cfg = validate(CostConfig, {"node": "ours", "price_per_hour": {"ours": 0.1, "g5.xlarge": 0.5}})
    assert cfg.price("ours") == 0.1 and cfg.price("g5.xlarge") == 0.5
    assert cfg.price("p3.2xlarge") == NODES["p3.2xlarge"].usd_per_hour
    assert cfg.price("nobody's") is None


@pytest.mark.parametrize(
    "given, named",
    [
        ({"node": "g5.huge"}, "g5.huge"),
        ({"price_per_hour": {"g5.xlarge": -1}}, "price_per_hour"),
        ({"price_per_hour": {"g5.xlarge": float("nan")}}, "price_per_hour"),
    ],
)
def test_a_price_that_is_none_is_refused(given: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        validate(CostConfig, given)


MODEL = Model(flops=24.3e9, activations=86e6, frozen=False, cached=True)


def offer(name: str, model: Model = MODEL, rates: Rates = RATES_HERE) -> compare.Offer:
    return compare.offers([name], CostConfig(), COUNTS, 10, model, rates)[0]


def test_a_model_like_resnet50_trains_at_the_published_rate() -> None:
    found = offer("p3.2xlarge")
    assert found.run_s is not None
    start = estimate.START.seconds + estimate.PUBLISH.seconds
    loop = 10 * (1000 + 200 / 3) / RATES["V100"]
    assert found.run_s == pytest.approx(start + 1200 * 0.002 / 8 + loop)
    assert found.run_usd == pytest.approx(found.run_s / 3600 * 3.06)
    assert found.limit == "GPU" and found.source == "published"


def test_depthwise_models_are_as_slow_as_their_activations() -> None:
    few_flops = Model(flops=24.3e8, activations=86e6, frozen=False, cached=True)
    assert offer("p3.2xlarge", few_flops).run_s == offer("p3.2xlarge").run_s


def test_few_cpus_beside_a_fast_gpu_are_named() -> None:
    streamed = Model(flops=24.3e9, activations=86e6, frozen=False, cached=False)
    slow = Rates(**{**vars(RATES_HERE), "decode": Rate(0.1, 0.05)})
    found = offer("g5.xlarge", streamed, slow)
    assert found.limit == "decoding: its CPUs"
    assert found.million_usd == pytest.approx(1e6 * 0.1 / 4 * 1.006 / 3600)


def test_cpu_nodes_take_what_was_measured_here() -> None:
    found = offer("m7i.xlarge")
    loop = 10 * (1000 * 0.02 + 200 * 0.004) / 4
    assert found.trial_usd == pytest.approx(loop * 0.2016 / 3600)
    assert found.source == "measured here"


def test_decoding_and_computing_share_the_cores_of_a_cpu_node() -> None:
    """The slower of the two counted, as if the other one were done elsewhere."""
    streamed = Model(flops=24.3e9, activations=86e6, frozen=False, cached=False)
    found = offer("m7i.xlarge", streamed)
    loop = 10 * (1000 * (0.02 + 0.002) + 200 * (0.004 + 0.002)) / 4
    assert found.trial_usd == pytest.approx(loop * 0.2016 / 3600)
    assert found.million_usd == pytest.approx(1e6 * (0.004 + 0.002) / 4 * 0.2016 / 3600)


def test_a_machine_with_a_gpu_tells_nothing_of_cpu_nodes() -> None:
    """The CPU seconds of a step on a GPU are those that start its kernels: a node without one
    looked cheapest."""
    on_gpu = Rates(**{**vars(RATES_HERE), "device": "NVIDIA H100"})
    found = offer("m7i.xlarge", rates=on_gpu)
    assert found.run_s is None and found.source == "measured on a GPU here"
    assert offer("p3.2xlarge", rates=on_gpu).run_s is not None


def test_the_cheapest_run_comes_first_and_unknown_nodes_are_refused() -> None:
    (ended,) = compare.offers(
        ["p3.2xlarge"], CostConfig(), COUNTS, 10, MODEL, RATES_HERE, most_s=5.0
    )
    (whole,) = compare.offers(["p3.2xlarge"], CostConfig(), COUNTS, 10, MODEL, RATES_HERE)
    assert ended.run_s is not None and whole.run_s is not None
    assert ended.run_s < whole.run_s, "train.stopping.seconds ends it"
    found = compare.offers(list(NODES), CostConfig(), COUNTS, 10, MODEL, RATES_HERE)
    prices = [one.run_usd for one in found if one.run_usd is not None]
    assert prices == sorted(prices) and len(found) == len(NODES)
    with pytest.raises(ConfigError, match="Did you mean 'g5\\.xlarge'"):
        compare.offers(["g5.xlage"], CostConfig(), COUNTS, 10, MODEL, RATES_HERE)


def test_a_gpu_without_a_published_rate_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RATES, "V100")
    found = offer("p3.2xlarge")
    assert found.run_s is None and found.run_usd is None and found.source == "no published rate"
