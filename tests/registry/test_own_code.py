"""A `file:` model brings its module along: hashed, and loaded from the package alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from raypipe.errors import DataError
from raypipe.models import own_code
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import packing
from raypipe.registry.package import Package, Reference
from tests import forked
from tests.conftest import Draw

NETS = """
from __future__ import annotations
import math
import numpy
from torch import nn
import shapes_of_mine
from .blocks import Block

def make(pretrained: bool, width: int = 8) -> nn.Module:
    from .late import gain
    return Block(shapes_of_mine.CHANNELS, width, gain())
"""
BLOCKS = """
from torch import nn

class Block(nn.Module):
    def __init__(self, channels, width, gain):
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, stride=4)
        self.gain = gain

    def forward(self, images_BCHW):
        return self.conv(images_BCHW).mean((2, 3)) * self.gain
"""
CFG = ModelConfig(name="file:nets_of_mine.net:make", pretrained=False, mode="finetune", side_px=32)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path: a package of three modules, one imported late, and one module."""
    folder = tmp_path / "mine"
    (folder / "nets_of_mine").mkdir(parents=True)
    (folder / "nets_of_mine" / "__init__.py").write_text("")
    (folder / "nets_of_mine" / "net.py").write_text(NETS)
    (folder / "nets_of_mine" / "blocks.py").write_text(BLOCKS)
    (folder / "nets_of_mine" / "late.py").write_text("def gain():\n    return 100.0\n")
    (folder / "nets_of_mine" / "unused.py").write_text("1 / 0")
    (folder / "shapes_of_mine.py").write_text("CHANNELS = 3\n")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    own_code._take({"nets_of_mine", "shapes_of_mine"})
    own_code.resolve.cache_clear()


def built(folder: Path) -> Package:
    torch.manual_seed(3)
    model = ImageModel(CFG, 2).eval()
    torch.nn.init.normal_(model.head.linear.weight)
    reference = Reference(np.zeros((4, 8)), np.full((4, 2), 0.5), tuple("abcd"))
    made = packing.build(folder, model, CFG, ("a", "b"), reference, {})
    return Package(made, Package(made).seal)


def test_the_package_holds_what_the_module_imports(mine: Path, tmp_path: Path) -> None:
    made = built(tmp_path / "package")
    code = {name for name in made.files if name.startswith("code/")}
    of_package = {f"code/nets_of_mine/{n}.py" for n in ("__init__", "net", "blocks", "late")}
    assert code == of_package | {"code/shapes_of_mine.py"}
    assert own_code.libraries(made.files) == ["numpy", "torch"]


def test_it_is_loaded_from_the_package_and_not_from_the_path(
    mine: Path, tmp_path: Path, textured: Draw
) -> None:
    made = built(tmp_path / "package")
    images = [textured(seed, 40) for seed in range(3)]
    expected = made.predict(images).scores_NC
    import nets_of_mine.blocks
    import nets_of_mine.late as theirs

    # Another model under the same name, both imported and on the path.
    theirs.gain = lambda: 1.0
    nets_of_mine.blocks.Block.forward = lambda self, images_BCHW: images_BCHW.mean((2, 3))
    (mine / "nets_of_mine" / "late.py").write_text("def gain():\n    return -1.0\n")
    again = Package(made.folder, made.seal)
    np.testing.assert_array_equal(again.predict(images).scores_NC, expected)
    assert sys.modules["nets_of_mine.late"] is theirs and theirs.gain() == 1.0
    assert not [f for f in sys.meta_path if isinstance(f, own_code._Finder)]


def test_it_loads_where_the_module_is_not(mine: Path, tmp_path: Path, textured: Draw) -> None:
    made = built(tmp_path / "package")
    (tmp_path / "image").write_bytes(textured(1, 40))
    code = (
        "import sys; from pathlib import Path; from raypipe.registry.package import Package\n"
        "made = Package(Path(sys.argv[1]), sys.argv[2])\n"
        "print(made.predict([Path(sys.argv[3]).read_bytes()]).scores_NC[0, 0])"
    )
    done = forked.run(code, made.folder, made.seal, tmp_path / "image")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(made.predict([textured(1, 40)]).scores_NC[0, 0])


def test_code_that_nobody_vouches_for_does_not_run(mine: Path, tmp_path: Path) -> None:
    made = built(tmp_path / "package")
    with pytest.raises(DataError, match=r"no registered version confirms.*registered seal"):
        Package(made.folder).model  # noqa: B018
    path = made.folder / "code" / "shapes_of_mine.py"
    path.write_text("raise SystemExit('it ran')")
    with pytest.raises(DataError, match=r"does not match its sha256.*shapes_of_mine"):
        Package(made.folder, made.seal)


@pytest.mark.parametrize(
    "late",
    ["def gain():\n    return __import__('importlib').import_module('nets_of_mine.unused')", "x ="],
)
def test_code_that_cannot_be_packed_is_no_package(late: str, mine: Path, tmp_path: Path) -> None:
    made = built(tmp_path / "package")
    (mine / "nets_of_mine" / "late.py").write_text(late)
    with pytest.raises(DataError, match="cannot be built from the code that was packed"):
        built(tmp_path / "other")
    with pytest.raises(DataError, match="cannot be built from the code that was packed"):
        packing.require_packable(CFG, 2)
    assert not (tmp_path / "other").exists() and made.classes == ("a", "b")


def test_a_module_that_is_imported_when_it_predicts_is_refused_before_the_training(
    mine: Path, tmp_path: Path
) -> None:
    """The model was registered and became champion. Elsewhere it failed on each image, or took a
    module of this name that it found there.
    """
    late = BLOCKS.replace(
        "        return self.conv", "        from .late import gain\n        return self.conv"
    )
    (mine / "nets_of_mine" / "blocks.py").write_text(late)
    for made in (lambda: packing.require_packable(CFG, 2), lambda: built(tmp_path / "package")):
        with pytest.raises(
            DataError, match=r"nets_of_mine\S* is imported when the model predicts.*top of the file"
        ):
            made()
    # The names mean again what they meant, and libraries may come late.
    import nets_of_mine.late

    assert nets_of_mine.late.gain() == 100.0
    (mine / "nets_of_mine" / "blocks.py").write_text(
        late.replace(".late import gain", "math import pi")
    )
    own_code._take({"nets_of_mine"})
    own_code.resolve.cache_clear()
    packing.require_packable(CFG, 2)


def test_a_model_without_a_side_of_its_own_is_packed(mine: Path) -> None:
    """Its side was asked for where its modules cannot be imported: each such model was refused."""
    packing.require_packable(CFG.model_copy(update={"side_px": None}), 2)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("gain = 3.0 if pretrained else 1.0", r"features of noise are .* apart"),
        ("gain = __import__('random').random()", r"features of noise are .* apart"),
        ("width += pretrained", r"size mismatch"),
    ],
)
def test_a_model_that_its_package_would_build_in_another_way_is_refused(
    more: str, why: str, mine: Path
) -> None:
    """It was trained and registered, and then predicted something else, or could not be loaded."""
    cfg = CFG.model_copy(update={"pretrained": True})
    packing.require_packable(cfg, 2)
    own_code._take({"nets_of_mine"})
    own_code.resolve.cache_clear()
    made = NETS.replace("    return Block(", f"    gain = gain()\n    {more}\n    return Block(")
    (mine / "nets_of_mine" / "net.py").write_text(
        made.replace("import gain\n", "import gain as of_all\n")
        .replace("gain = gain()", "gain = of_all()")
        .replace("width, gain())", "width, gain)")
    )
    with pytest.raises(DataError, match=rf"another model where pretrained is false: .*{why}"):
        packing.require_packable(cfg, 2)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "code/../../outside", ""])
def test_a_manifest_reads_no_file_outside(name: str, mine: Path, tmp_path: Path) -> None:
    made = built(tmp_path / "package")
    manifest = made.folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace("code/shapes_of_mine.py", name))
    with pytest.raises(DataError, match="names files that are not in it"):
        Package(made.folder)


@pytest.mark.parametrize("format", ["onnx", "torchscript"])
def test_it_is_exported_too(
    format: str, mine: Path, tmp_path: Path, textured: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime", reason="raypipe[onnx]")
    from raypipe.registry import export

    made = built(tmp_path / "package")
    monkeypatch.undo()
    done = export.export(made, format, tmp_path / "model", export.drawn(32))
    assert done.apart < 1e-4 and done.path.exists()
