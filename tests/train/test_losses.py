"""The losses are the textbook's, options change nothing at zero, and weighting keeps the scale."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from raypipe.errors import ConfigError
from raypipe.train.losses import class_weights, sigmoid_loss, softmax_loss, squared_loss

CLASSES = ("a", "b", "c")
LABELS_N = np.array([0, 0, 0, 0, 0, 0, 1, 1, 1, 2])
LOGITS = torch.randn(10, 3, generator=torch.Generator().manual_seed(3)) * 3
TARGETS = one_hot(torch.from_numpy(LABELS_N), 3).float()
ONES = torch.ones(3)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    "weights", [ONES, torch.tensor([0.5, 1.0, 4.0])], ids=["plain", "weighted"]
)
def test_softmax_loss_is_pytorchs_cross_entropy(smoothing: float, weights: torch.Tensor) -> None:
    theirs = cross_entropy(LOGITS, TARGETS, weights, label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(softmax_loss(LOGITS, TARGETS, weights, smoothing), theirs)


def test_sigmoid_loss_is_pytorchs_binary_cross_entropy() -> None:
    weights, soft = torch.tensor([0.5, 1.0, 4.0]), torch.rand(10, 3)
    theirs = binary_cross_entropy_with_logits(
        LOGITS, soft, pos_weight=weights, reduction="none"
    ).mean(1)
    torch.testing.assert_close(sigmoid_loss(LOGITS, soft, weights), theirs)


def test_the_focal_factor_is_one_minus_p_to_the_gamma() -> None:
    p = LOGITS.softmax(1)[torch.arange(10), torch.from_numpy(LABELS_N)]
    torch.testing.assert_close(
        softmax_loss(LOGITS, TARGETS, ONES, gamma=2.0),
        (1 - p) ** 2 * -p.log(),
        rtol=1e-4,
        atol=1e-7,
    )


@pytest.mark.parametrize("loss", [softmax_loss, sigmoid_loss])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_being_sure_costs_no_nan_right_or_wrong(loss: object, gamma: float) -> None:
    logits = torch.tensor([[200.0, -200.0, 0.0], [-200.0, 200.0, 0.0]], requires_grad=True)
    value = loss(logits, TARGETS[:2], ONES, 0.1, gamma).sum()  # type: ignore[operator]
    value.backward()
    assert value.isfinite() and logits.grad is not None and logits.grad.isfinite().all()


def test_soft_targets_pull_to_their_mean() -> None:
    """Graded labels: of 0, 1/3, 2/3 and 1 the best constant answer is one half."""
    logit = torch.zeros(1, 1, requires_grad=True)
    grades = torch.tensor([[0.0], [1 / 3], [2 / 3], [1.0]])
    sigmoid_loss(logit.expand(4, 1), grades, torch.ones(1)).mean().backward()
    assert logit.grad is not None and abs(float(logit.grad)) < 1e-7


def test_squared_loss_is_one_for_predicting_the_mean() -> None:
    labels = torch.tensor([[100.0], [200.0], [600.0]])
    guess = labels.mean().expand(3, 1)
    assert float(
        squared_loss(guess, labels, float(labels.std(unbiased=False))).mean()
    ) == pytest.approx(1)


@pytest.mark.parametrize("wanted", [None, "balanced", {"a": 1, "b": 10, "c": 3}])
def test_weights_have_mean_one_over_the_training_set(wanted: object) -> None:
    weights = class_weights(wanted, CLASSES, LABELS_N)  # type: ignore[arg-type]
    assert float(weights[torch.from_numpy(LABELS_N)].mean()) == pytest.approx(1)


def test_balanced_classes_weigh_alike_and_balanced_tags_as_much_as_their_absence() -> None:
    weights = class_weights("balanced", CLASSES, LABELS_N)
    torch.testing.assert_close(weights * torch.tensor([6.0, 3.0, 1.0]), torch.full((3,), 10 / 3))
    tagged = TARGETS.numpy()
    torch.testing.assert_close(
        class_weights("balanced", CLASSES, tagged) * tagged.sum(0),
        torch.from_numpy((1 - tagged).sum(0)),
    )


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"a": 1.0, "b": 1.0}, r"got \{'c': None\}"),
        ({"a": 1, "b": 1, "c": 1, "d": 2}, r"got \{'d': 2\}"),
        (
            {"a": 0, "b": -1, "c": float("nan"), "d": 1},
            r"got \{'a': 0, 'b': -1, 'c': nan, 'd': 1\}\).*each of a, b, c to a positive",
        ),
    ],
)
def test_a_mapping_gives_every_class_a_positive_number_and_no_other_one(
    wanted: dict[str, float], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        class_weights(wanted, CLASSES, LABELS_N)


def test_a_tag_that_every_image_has_is_learned() -> None:
    """Its balanced weight was 0, and with smoothing only its absence was learned."""
    tagged = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
    weights_C = class_weights("balanced", ("a", "b"), tagged)
    assert weights_C.tolist() == [1.0, 2.0]
    logits_BC = torch.zeros(3, 2, requires_grad=True)
    targets_BC = torch.tensor(tagged, dtype=torch.float32)
    sigmoid_loss(logits_BC, targets_BC, weights_C, smoothing=0.1).mean().backward()  # type: ignore[no-untyped-call]
    assert logits_BC.grad is not None and (logits_BC.grad[:, 0] < 0).all()
