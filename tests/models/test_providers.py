"""Backbones from elsewhere: real small models, rebuilt from their package by name and config
alone. Where a library is missing, the error says what to install.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raypipe.config import validate
from raypipe.errors import ConfigError
from raypipe.models import depth, library_backbones, providers
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import packing
from raypipe.registry.package import Package, Reference

VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
CONVNEXT = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "image_size": 32}
PIXELS = np.random.default_rng(0).integers(0, 256, (3, 40, 40, 3), dtype=np.uint8)


def importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except (ImportError, RuntimeError):
        return False
    return True


needs_hf = pytest.mark.skipif(
    not importlib.util.find_spec("transformers"), reason="transformers is not installed"
)
needs_timm = pytest.mark.skipif(not importable("timm"), reason="timm does not import")
needs_torchvision = pytest.mark.skipif(
    not importable("torchvision"), reason="torchvision does not import"
)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def cfg(name: str, **settings: Any) -> ModelConfig:
    return validate(
        ModelConfig,
        {"name": name, "mode": "finetune", "pretrained": False, "side_px": 40} | settings,
    )


def packed(model: ImageModel, made_by: ModelConfig, folder: Path) -> Package:
    reference = Reference(np.zeros((1, 2)), np.zeros((1, 2)), ("a",))
    built = packing.build(folder, model, made_by, ("a", "b"), reference, {})
    # Code of a file: model runs only if somebody vouches for it, as the registry does.
    return Package(built, seal=Package(built).seal)


CASES = [
    pytest.param("hf:vit", VIT, marks=needs_hf, id="hf-vit"),
    pytest.param("hf:convnextv2", CONVNEXT, marks=needs_hf, id="hf-convnext"),
    pytest.param("timm:resnet10t", {}, marks=needs_timm, id="timm"),
    pytest.param("torchvision:shufflenet_v2_x0_5", {}, marks=needs_torchvision, id="torchvision"),
    pytest.param("file:tiny:net", {"width": 6}, id="file"),
    pytest.param("file:tiny:twice", {}, id="file-one-weight-twice"),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_package_is_the_model_by_name_and_config_alone(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    made_by = cfg(name, options=options)
    model = ImageModel(made_by, classes=2).eval()
    torch.nn.init.normal_(model.head.linear.weight)
    again = packed(model, made_by, tmp_path / "package").model
    for ours, theirs in zip(model.predict(PIXELS), again.predict(PIXELS), strict=True):
        np.testing.assert_allclose(theirs, ours, atol=1e-6)
    assert not any(
        path.suffix in (".pt", ".pkl", ".bin") for path in (tmp_path / "package").iterdir()
    )


@pytest.mark.parametrize(("name", "options"), CASES)
def test_it_trains_and_its_depths_go_from_the_image_to_the_head(
    name: str, options: dict[str, Any]
) -> None:
    model = ImageModel(cfg(name, options=options), classes=2)
    torch.nn.init.normal_(model.head.linear.weight)
    model(torch.from_numpy(PIXELS)).square().sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "mask_token" not in n)
    along = list(depth.depths(model).values())
    assert along == sorted(along) and along[-1] >= (1 if name.startswith("file") else 4)


@needs_hf
def test_a_folder_gives_weights_and_normalisation_and_is_not_needed_again(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    folder = tmp_path / "downloaded"
    theirs = ViTForImageClassification(ViTConfig(**VIT)).eval()
    theirs.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]})
    )
    made_by = cfg(f"hf:{folder}", pretrained=True, mode="frozen", side_px=None)
    assert made_by.pixels == 32
    model = ImageModel(made_by, classes=2).eval()
    torch.nn.init.normal_(model.head.linear.weight)
    features_ND, scores_NC = model.predict(PIXELS[:, :32, :32])
    images = torch.from_numpy(PIXELS[:, :32, :32]).permute(0, 3, 1, 2) / 255
    images = (images - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor(
        [0.5, 0.6, 0.7]
    ).view(3, 1, 1)
    with torch.no_grad():
        expected = theirs.vit(images).last_hidden_state[:, 0]
    np.testing.assert_allclose(features_ND, expected.numpy(), atol=1e-5)

    kept = packed(model, made_by, tmp_path / "package")
    options = kept.info["model"]["options"]
    assert str(folder) not in json.dumps(options) and "transformers_version" not in options
    folder.rename(tmp_path / "gone")
    providers.resolve.cache_clear()
    np.testing.assert_allclose(
        Package(kept.folder).model.predict(PIXELS[:, :32, :32])[1], scores_NC, atol=1e-6
    )


@needs_hf
def test_weights_that_are_stored_in_16_bits_make_a_package_that_loads(tmp_path: Path) -> None:
    """It was built in 16 bits, and images have 32: it failed on the first one."""
    from transformers import ViTConfig, ViTModel

    ViTModel(ViTConfig(**VIT)).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    made_by = cfg(f"hf:{tmp_path / 'half'}", pretrained=True, mode="frozen", side_px=None)
    model = ImageModel(made_by, classes=2).eval()
    torch.nn.init.normal_(model.head.linear.weight)
    again = packed(model, made_by, tmp_path / "package").model
    pixels = PIXELS[:, :32, :32]
    np.testing.assert_allclose(again.predict(pixels)[1], model.predict(pixels)[1], atol=1e-6)


@needs_hf
@pytest.mark.parametrize(
    ("says", "mean", "std"),
    [
        ({"do_normalize": False, "image_mean": [0.1, 0.2, 0.3]}, 0.0, 1.0),
        ({"image_mean": None}, (0.5,) * 3, (0.5,) * 3),
        ({"image_mean": [0.1, 0.2, 0.3]}, (0.1, 0.2, 0.3), (0.5,) * 3),
    ],
)
def test_pixels_are_normalised_as_the_folder_says(
    says: dict[str, Any], mean: Any, std: Any, tmp_path: Path
) -> None:
    from transformers import ViTConfig

    ViTConfig(**VIT).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(says))
    assert cfg(f"hf:{tmp_path}").normalisation == (mean, std)


@needs_hf
@needs_timm
def test_a_folder_of_timms_is_normalised_as_its_config_says(tmp_path: Path) -> None:
    """It has no preprocessor_config.json."""
    of_timm = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "input_size": [3, 64, 96]}
    written = {"model_type": "timm_wrapper", "architecture": "resnet10t", "num_classes": 9}
    (tmp_path / "config.json").write_text(json.dumps(written | {"pretrained_cfg": of_timm}))
    found = providers.resolve(f"hf:{tmp_path}", "{}")
    assert (found.mean, found.std, found.side_px) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 96)


@needs_torchvision
def test_pixels_are_normalised_as_torchvisions_weights_want_them() -> None:
    assert library_backbones.torchvision("resnet18", {}).mean == library_backbones.IMAGENET[0]
    found = library_backbones.torchvision("efficientnet_v2_l", {})
    assert (found.mean, found.std, found.side_px) == ((0.5,) * 3, (0.5,) * 3, 480)


@needs_torchvision
@pytest.mark.parametrize("options", [{}, {"aux_logits": False}])
@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_a_package_is_built_as_torchvision_builds_for_pretrained_weights(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights it normalises the input once more and may have other layers."""
    from torchvision import models

    quick = {"init_weights": False}  # random numbers that nobody asks for take seconds
    downloaded = models.get_model(name, aux_logits=True, **quick).state_dict()
    monkeypatch.setattr(
        models.get_model_weights(name), "get_state_dict", lambda *_, **__: downloaded
    )
    backbone = library_backbones.torchvision(name, options | quick)
    trained, rebuilt = backbone.build(True), backbone.build(False)
    assert trained.transform_input and rebuilt.transform_input
    assert trained.state_dict().keys() == rebuilt.state_dict().keys()
    if options:
        assert isinstance(trained.train()(torch.zeros(2, 3, 96, 96)), torch.Tensor)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        pytest.param("timm:resnet18.no_such", {}, "no_such.*resnet18", marks=needs_timm),
        pytest.param("timm:resnet10t", {"no_such": 1}, "TypeError.*no_such", marks=needs_timm),
        pytest.param("torchvision:fcn_resnet50", {}, "crop_size", marks=needs_torchvision),
        pytest.param(
            "torchvision:resnet18", {"weights": "IMAGENET1K_V1"}, "weights", marks=needs_torchvision
        ),
        pytest.param("hf:vit", {"hidden_size": "large"}, "hidden_size", marks=needs_hf),
    ],
)
def test_what_a_library_cannot_build_is_one_message(
    name: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)cannot build this backbone: .*{says}"):
        ImageModel(cfg(name, options=options), classes=2)


@needs_hf
def test_a_masked_autoencoder_hides_nothing_when_it_embeds(tmp_path: Path) -> None:
    """With its mask ratio of 0.75 features were noise: another three quarters of the image hidden
    at each call.
    """
    made_by = cfg("hf:vit_mae", options=VIT)
    model = ImageModel(made_by, classes=2).eval()
    torch.nn.init.normal_(model.head.linear.weight)
    first, again = model.predict(PIXELS), model.predict(PIXELS)
    for ours, theirs in zip(first, again, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    kept = packed(model, made_by, tmp_path / "package")
    assert kept.info["model"]["options"]["mask_ratio"] == 0.0
    np.testing.assert_allclose(kept.model.predict(PIXELS)[1], first[1], atol=1e-6)
    old = made_by.model_copy(
        update={"options": VIT | {"mask_ratio": 0.75}}
    )  # as ba74455 settled it
    again = ImageModel(old, classes=2)
    again.load_state_dict(model.state_dict())
    np.testing.assert_allclose(again.eval().predict(PIXELS)[0], first[0], atol=1e-6)


@needs_hf
def test_a_folder_that_lacks_a_matrix_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import ViTConfig, ViTModel

    ViTModel(ViTConfig(**VIT)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(name for name, t in weights.items() if t.ndim == 2 and "pooler" not in name)
    save_file(
        {n: t for n, t in weights.items() if n != lost},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ConfigError, match=r"lack a part of the model, which would stay random"):
        ImageModel(cfg(f"hf:{tmp_path}", pretrained=True), classes=2)


@needs_hf
@pytest.mark.parametrize("name", ["clip", "bert"])
def test_a_model_that_takes_more_than_images_is_refused(name: str) -> None:
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    with pytest.raises(ConfigError, match=r"does not take images alone.*pixel_values"):
        ImageModel(cfg(f"hf:{name}", options=small if name == "bert" else {}), classes=2)


@needs_hf
def test_a_hub_that_is_not_reached_says_how_else(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"This Hugging Face model cannot be found.*someone/something.*model\.name=hf:",
    ):
        ImageModel(cfg("hf:someone/something", pretrained=True), classes=2)


@pytest.mark.parametrize("name", ["hf:vit", "timm:resnet10t", "torchvision:resnet18"])
def test_a_missing_library_is_named_with_what_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"hf": "transformers"}.get(name.split(":")[0], name.split(":")[0])
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "torchvision.models", raising=False)
    providers.resolve.cache_clear()
    with pytest.raises(
        ConfigError, match=rf"needs {module}.*pip install 'raypipe\[{name.split(':')[0]}\]'"
    ):
        ImageModel(cfg(name), classes=2)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("file:tiny:says_nothing", r"says that it returns an nn\.Module.*-> nn\.Module"),
        ("file:tiny:says_tensor", r"says that it returns an nn\.Module"),
        ("file:os:system", r"says that it returns an nn\.Module"),
        ("file:subprocess:run", r"says that it returns an nn\.Module"),
        ("file:tiny:nothing", r"cannot be imported.*PYTHONPATH"),
        ("file:no_such_module:net", r"cannot be imported.*PYTHONPATH"),
        ("file:tiny", r"cannot be imported.*file:package\.module:factory"),
        ("file:__main__:net", r"lies in a notebook or a script.*\.py file of its own"),
        ("file:tiny:divided", r"features that are not finite.*another model\.name"),
        ("file:tiny:angry", r"fails on an image: 'no such block'"),
        ("file:tiny:unpooled", r"one row of features for each image.*\(1, 4, 38, 38\)"),
    ],
)
def test_what_is_no_backbone_is_refused_before_it_is_called(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ImageModel(cfg(name), classes=2)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("file:tiny:net", {"widht": 6}, "unexpected keyword argument 'widht'"),
        ("file:tiny:Twice", {}, "unexpected keyword argument 'pretrained'"),
        ("file:tiny:says_no_more", {}, "unexpected keyword argument 'pretrained'"),
    ],
)
def test_options_that_a_factory_does_not_take_are_named(
    name: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=rf"does not take these arguments.*{says}"):
        ImageModel(cfg(name, options=options), classes=2)


def test_names_that_cannot_have_weights_are_refused_without_an_import() -> None:
    with pytest.raises(
        ConfigError, match=r"hf:vit has no pretrained weights.*Set model\.pretrained=false"
    ):
        cfg("hf:vit", pretrained=True)
