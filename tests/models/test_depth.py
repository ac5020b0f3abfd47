"""Every parameter has one depth, in forward order; rates fall towards the image; what is frozen
does not move.
"""

from __future__ import annotations

import pytest
import torch

from raypipe.errors import ConfigError
from raypipe.models import depth
from raypipe.models.heads import Head
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.train.parallel import ParallelConfig
from raypipe.train.parallel.engine import set_rates

SMALL = ModelConfig(name="small_cnn", pretrained=False, mode="finetune")
LITE0 = ModelConfig(side_px=32, pretrained=False, mode="finetune")


@pytest.mark.parametrize("cfg", [SMALL, LITE0], ids=["flat", "blocks"])
def test_every_parameter_has_a_depth_and_the_head_is_deepest(cfg: ModelConfig) -> None:
    model = ImageModel(cfg, classes=2)
    found = depth.depths(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert sorted(set(found.values())) == list(range(max(found.values()) + 1))
    along = [found[name] for name, _ in model.named_parameters()]
    assert along == sorted(along), "parameters are defined in the order of the forward pass"
    deepest = {name for name, d in found.items() if d == max(along)}
    assert deepest == {"head.linear.weight", "head.linear.bias"}


def test_the_embedded_backbone_is_a_stem_and_sixteen_blocks() -> None:
    found = depth.depths(ImageModel(LITE0, classes=2))
    assert max(found.values()) == 17
    assert found["backbone.net._conv_stem.weight"] == found["backbone.net._bn0.bias"] == 0
    assert found["backbone.net._blocks.7._depthwise_conv.weight"] == 8
    assert (
        found["backbone.net._conv_head.weight"]
        == found["backbone.net._blocks.15._bn2.weight"]
        == 16
    )


def test_a_head_alone_has_one_depth() -> None:
    assert set(depth.depths(Head(4, 2, 0.0)).values()) == {0}


def test_rates_fall_towards_the_image_and_open_from_the_head_down() -> None:
    assert depth.scales(4, epoch=0) == [1, 1, 1, 1]
    assert depth.scales(4, epoch=9, decay=0.5) == [0.125, 0.25, 0.5, 1]
    opened = [
        sum(s > 0 for s in depth.scales(9, epoch, 0.8, unfreeze_epochs=4)) for epoch in range(6)
    ]
    assert opened == [1, 3, 5, 7, 9, 9]
    assert all(s == sorted(s) for s in (depth.scales(9, epoch, 0.8, 4) for epoch in range(6)))
    assert depth.scales(1, epoch=0, decay=0.5, unfreeze_epochs=3) == [1]


def test_groups_decay_matrices_only_and_leave_nothing_out() -> None:
    model = ImageModel(SMALL, classes=2)
    groups = depth.parameter_groups(model, 0.1)
    assert all((p.ndim > 1) == (g["weight_decay"] == 0.1) for g in groups for p in g["params"])
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in model.parameters()}


def test_a_frozen_depth_does_not_move_and_an_open_one_moves_by_its_rate() -> None:
    """AdamW's first step is its learning rate, whatever the gradient's size."""
    torch.manual_seed(0)
    model = ImageModel(SMALL, classes=2)
    torch.nn.init.normal_(model.head.linear.weight)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(depth.parameter_groups(model, 0.1))
    found = depth.depths(model)
    by_depth = depth.scales(max(found.values()) + 1, epoch=1, decay=0.5, unfreeze_epochs=2)
    set_rates(
        optimizer.param_groups,
        1e-2,
        epoch=1,
        cfg=ParallelConfig(layer_decay=0.5, unfreeze_epochs=2),
    )
    model(torch.randint(0, 256, (8, 32, 32, 3), dtype=torch.uint8))[:, 0].square().sum().backward()
    optimizer.step()
    frozen = [name for name, d in found.items() if by_depth[d] == 0]
    assert 0 < len(frozen) < len(found)
    for name, p in model.named_parameters():
        moved = (p.detach() - before[name]).abs().max()
        if name in frozen:
            assert torch.equal(p, before[name])
        else:
            assert float(moved) == pytest.approx(1e-2 * by_depth[found[name]], rel=0.5)


FROZEN = ModelConfig(side_px=32, mode="finetune", frozen_blocks=3)


def test_frozen_blocks_do_not_change_in_training_and_the_rest_does() -> None:
    torch.manual_seed(0)
    model = ImageModel(FROZEN, classes=2).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):  # a head of zeros passes no gradient down
        (
            model(torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8)) - 1
        ).square().sum().backward()
        optimizer.step()
    moved = {
        name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])
    }
    below = ("_conv_stem", "_bn0", "_blocks.0.", "_blocks.1.", "_blocks.2.")
    frozen = {name for name in before if name.removeprefix("backbone.net.").startswith(below)}
    assert frozen and not moved & frozen
    assert {
        "backbone.net._blocks.3._bn0.running_mean",
        "backbone.net._conv_head.weight",
        "head.linear.weight",
    } <= moved


def test_frozen_blocks_need_no_gradient_and_stay_in_eval_mode_through_train_and_copy() -> None:
    model = ImageModel(FROZEN, classes=2).eval().train()
    by_depth = depth.depths(model)
    assert all(p.requires_grad == (by_depth[name] > 3) for name, p in model.named_parameters())
    training = {name for name, m in model.named_modules() if m.training}
    assert not any(
        name.startswith(("backbone.net._bn0", "backbone.net._blocks.2")) for name in training
    )
    assert "backbone.net._blocks.3._bn2" in training
    assert model.state_dict().keys() == ImageModel(LITE0, classes=2).state_dict().keys()
    assert not model.for_inference().training


def test_more_frozen_blocks_than_there_are_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"frozen_blocks is more than the backbone has.*17.*16 blocks"
    ):
        ImageModel(FROZEN.model_copy(update={"frozen_blocks": 17}), classes=2)


class Tokens(torch.nn.Module):
    """As a transformer of timm: the root owns a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.token = torch.nn.Parameter(torch.zeros(4))
        block = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))  # noqa: E731
        self.blocks = torch.nn.ModuleList([block() for _ in range(3)])


def test_a_root_with_a_frozen_token_leaves_its_blocks_in_training() -> None:
    """All of the backbone stayed in eval mode: dropout and batch norms of the blocks that learn."""
    model = torch.nn.ModuleDict({"backbone": Tokens(), "head": torch.nn.Linear(4, 2)})
    frozen = depth.freeze(model, 1)
    model.train()
    for module in frozen:
        module.eval()
    blocks = model["backbone"].blocks
    assert not model["backbone"].token.requires_grad
    assert [block[1].training for block in blocks] == [False, True, True]
