"""What launch export makes of a run works where none of this repository is, and answers as the run's own evaluation."""

import ast
import functools
import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from common.checkpoints import checkpoint
from common.checkpoints.pretrained import read_weights
from common.errors import TrainingFailed
from common.models import resnet18
from datasets import cifar10, imagenet, synthetic
from datasets.photos import decode, tree
from datasets.photos.labelled import Photos
from datasets.sampler import InOrder
from launch import export
from launch.export import command, network
from tests.tools.flagship import photographs, trained  # noqa: F401 (fixtures)
from tests.tools.jobs import NETWORK, ROOT, assert_same_bits, environment, in_rehearsal, run, run_job
from tests.tools.modelpackage import CONFIG, check, complaints

CPU = torch.device("cpu")
OLD = ROOT / "tests" / "formats" / "0.1.0" / "run"
SAMPLES = 256
PROGRAMS = ("onnx", "torch", "modelarts")  # of the formats; safetensors has weights alone
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # ModelArts' services read nothing else


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """A run on images like CIFAR-10's, that has learned something."""
    folder = tmp_path_factory.mktemp("cifar")
    options = ["--batch_size", 32, "--width", 8, "--epochs", 6, "--lr", 0.05]
    run_job("train", folder, "--custom_data", "true", "--max_samples", SAMPLES, *options)
    return folder / "out"


def exported(run, form, folder, *options):
    assert export.main([str(run), "--format", form, "--output", str(folder), *options]) == 0
    return folder


@pytest.fixture(scope="module")
def folders(cifar, trained, tmp_path_factory):
    """{(run, format): folder}, each made when somebody asks for it."""
    made, runs = tmp_path_factory.mktemp("exported"), {"cifar": cifar, "photos": trained[0] / "out"}

    class Folders(dict):
        def __missing__(self, key):
            self[key] = exported(runs[key[0]], key[1], made / "-".join(key))
            return self[key]

    return Folders()


def preprocess_of(folder):
    """The function of the file that lies in this folder."""
    spec = importlib.util.spec_from_file_location("exported_preprocess", folder / "preprocess.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.preprocess


def answers(folder, pictures):
    """The numbers of the exported network for uint8 (N, 3, size, size)."""
    if (folder / "network.onnx").exists():
        import onnxruntime

        return onnxruntime.InferenceSession(folder / "network.onnx").run(None, {"images": pictures})[0]
    if (folder / "network.pt2").exists():
        program = torch.export.load(folder / "network.pt2").module()
    else:
        program = torch.jit.load(folder / "model" / "network.pth")
    return program(torch.from_numpy(pictures)).detach().numpy()


def row_of(run, epoch):
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[epoch - 1])


def hundred_photographs():
    """(file, its bytes): of many sizes, as JPEG, PNG and TIFF, grey, with 16 bits in either order, and of floats."""
    draw = np.random.default_rng(7)
    for number in range(100):
        high, wide = draw.integers(24, 140, 2)
        rows, columns = np.mgrid[0:high, 0:wide]
        pixels = np.stack([rows * 2 % 256, columns * 3 % 256, (rows + columns + 9 * number) % 256], axis=2).astype(np.uint8)
        picture = Image.fromarray(pixels)
        if number % 10 == 1:
            picture = picture.convert("L")
        elif number % 10 == 2:
            picture = Image.fromarray((rows * 400 % 65536).astype(np.uint16))
        elif number % 10 in (4, 5):
            picture = Image.fromarray((rows * 400 % 65536).astype(">u2") if number % 10 == 4 else (rows * 3.0).astype("f4"))
        file = io.BytesIO()
        picture.save(file, {2: "PNG", 3: "PNG", 4: "TIFF", 5: "TIFF"}.get(number % 10, "JPEG"))
        yield file.getvalue()


def own_answers(run, pictures):
    """Of the network whose weights are exported, to bytes as the evaluation normalises them."""
    import torchvision

    weights = command.find(str(run)).weights
    if "fc.weight" in weights:
        model, mean, std = torchvision.models.get_model(NETWORK[1], num_classes=3), imagenet.MEAN, imagenet.STD
    else:
        model, mean, std = resnet18(width=8), cifar10.MEAN, cifar10.STD
    model.load_state_dict(weights)
    mean, std = (torch.tensor(value).view(1, 3, 1, 1) for value in (mean, std))
    with torch.no_grad():
        return model.eval()((torch.from_numpy(pictures) / 255 - mean) / std).numpy()


# For ONNX a network of torchvision takes half a minute; test_of_timm.py has a smaller one.
@pytest.mark.parametrize("form", in_rehearsal(PROGRAMS, lambda form: form == "onnx"))
def test_photographs_get_the_runs_own_answers(folders, trained, form):
    folder = folders["photos", form]
    take = preprocess_of(folder / "model" if form == "modelarts" else folder)
    contents = list(hundred_photographs())
    pictures = np.stack([take(content) for content in contents])
    own = np.stack([decode.eval_picture(content, False, 32, decode.short_side(32)).numpy() for content in contents])
    assert pictures.dtype == np.uint8 and np.array_equal(pictures, own)
    found, expected = answers(folder, pictures), own_answers(trained[0] / "out", pictures)
    assert found.shape == (100, 3) and np.abs(found - expected).max() < 1e-3 and expected.std() > 0.1


@pytest.mark.parametrize("form", PROGRAMS)
def test_images_like_cifars_get_the_runs_own_answers(folders, cifar, form):
    folder = folders["cifar", form]
    take = preprocess_of(folder / "model" if form == "modelarts" else folder)
    images, _ = synthetic.cifar_like(100, "test")
    pictures = np.stack([take(Image.fromarray(image.transpose(1, 2, 0))) for image in images])
    assert np.array_equal(pictures, images)  # which its evaluation does not resize
    found, expected = answers(folder, pictures), own_answers(cifar, pictures)
    assert found.shape == (100, 10) and np.abs(found - expected).max() < 1e-3 and expected.std() > 0.1


@pytest.mark.parametrize("form", PROGRAMS)
def test_the_accuracy_on_images_like_cifars_is_that_of_the_run(folders, cifar, form):
    images, labels = synthetic.cifar_like(SAMPLES, "test")
    best = json.loads(sorted((cifar / "checkpoints").glob("*.json"))[-1].read_text())["best"]
    found = (answers(folders["cifar", form], images).argmax(axis=1) == labels).mean()
    assert found == pytest.approx(best["accuracy"], abs=1e-6) and 0.2 < found < 1.0


@pytest.mark.parametrize("mode, resize", [("bilinear", "short"), ("bicubic", "short"), ("bilinear", "whole")])
def test_the_photographs_of_a_validation_set_are_those_of_its_loader(folders, photographs, trained, mode, resize):
    """The bytes that the evaluation normalises, from the file to the batch."""
    found = command.find(str(trained[0] / "out"))
    found.arguments.update(interpolation=mode, resize=resize)
    how = command.preprocessing(found, SimpleNamespace(image_size=None, format="onnx"))
    take = functools.partial(preprocess_of(folders["photos", "torch"]), options=how)
    files = tree.load(str(photographs / "val"))
    data = Photos(files, 32, False, 0, mode=mode, short=decode.WHOLE if resize == "whole" else None)
    loader = imagenet.loader(data, InOrder(len(data), 12), CPU)
    ((images, labels),) = list(loader)
    mean, std = (torch.tensor(value).view(1, 3, 1, 1) for value in (imagenet.MEAN, imagenet.STD))
    pixels = (images * std + mean).mul(255).round().to(torch.uint8).numpy()
    assert np.array_equal(pixels, np.stack([take(files.path(number)) for number in range(len(files))]))
    assert json.loads((folders["photos", "torch"] / "classes.json").read_text()) == files.classes and len(labels) == 12


def test_preprocessing_is_told_as_data_and_the_weights_are_a_file_that_jobs_read(folders, trained):
    folder = folders["photos", "torch"]
    how = json.loads((folder / "preprocessing.json").read_text())
    assert (how["size"], how["resize"], how["interpolation"]) == (32, 37, "bilinear")
    assert (tuple(how["mean"]), tuple(how["std"])) == (imagenet.MEAN, imagenet.STD)
    weights = read_weights(str(folder / "weights.pth"))
    state, _ = checkpoint.read(command.find(str(trained[0] / "out")).path)
    assert torch.equal(weights["fc.weight"], state["ema"]["module.fc.weight"])  # those that are evaluated
    assert (folder / "weights.pth.sha256").exists()


def test_the_best_checkpoint_is_taken_where_it_is_kept(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for number in (1, 2):
        about = {"samples_seen": number, "best": {"samples_seen": 1}, "arguments": {}, "classes": ["a"]}
        history = [{"epoch": done, "samples": done, "accuracy": 1 / done} for done in range(1, number + 1)]
        checkpoint.write(str(folder), {"model": {"w": torch.tensor(number)}, "run": {"history": history}}, about)
    best = command.find(str(tmp_path))
    assert (int(best.weights["w"]), best.accuracy, best.classes) == (1, 1.0, ["a"])
    checkpoint.delete(str(folder), 1)
    newest = command.find(str(tmp_path))
    assert (int(newest.weights["w"]), newest.accuracy) == (2, 0.5)


def test_one_checkpoint_or_the_weights_of_one_epoch_are_exported_too(cifar, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(cifar, run)
    epoch = sorted(run.glob("epoch_*.pth"))[0]
    number = int(epoch.stem.split("_")[1])
    exported(epoch, "safetensors", tmp_path / "one")
    told = capsys.readouterr().out
    assert f"ResNet of {epoch}, 10 classes, accuracy {row_of(cifar, number)['accuracy']:.4f} after epoch {number}" in told
    for path in (epoch, epoch.with_suffix(".json")):
        shutil.copy(path, tmp_path)
    exported(tmp_path / epoch.name, "safetensors", tmp_path / "alone")
    assert told.partition(", 10 classes")[2] == capsys.readouterr().out.partition(", 10 classes")[2]
    a_checkpoint = sorted((run / "checkpoints").glob("*.pt"))[0]
    exported(a_checkpoint, "safetensors", tmp_path / "two")
    assert read_weights(str(tmp_path / "two" / "model.safetensors")).keys() == torch.load(epoch).keys()


def test_whole_weights_are_exported_where_all_checkpoints_are_damaged(cifar, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(cifar, run)
    for path in (run / "checkpoints").glob("*.pt"):
        path.write_bytes(path.read_bytes()[:-100])
    epoch = sorted(run.glob("epoch_*.pth"))[0]
    words = [epoch, "--format", "safetensors", "--output", tmp_path / "out"]
    assert export.main(list(map(str, words))) == 0
    said = refused(capsys, run, *words[1:])
    assert "checkpoints are damaged; give an epoch_N.pth of the run" in said.replace("all 2", "") and "--overwrite" not in said
    epoch.with_suffix(".json").unlink()  # as of runs of version 0.2.0
    assert "does not say its classes: give --classes FILE" in refused(capsys, *words)
    (tmp_path / "names").write_text("".join(f"class {number}\n" for number in range(10)))
    assert export.main(list(map(str, [*words, "--classes", tmp_path / "names"]))) == 0
    assert read_weights(str(tmp_path / "out" / "model.safetensors")).keys() == torch.load(epoch).keys()


def refused(capsys, *words):
    code = export.main(list(map(str, words)))
    said = capsys.readouterr().err
    assert code == 2 and said.startswith("error: ") and said.count("\n") == 1
    return said


def test_what_an_old_checkpoint_does_not_say_is_asked_for(tmp_path, capsys):
    words = [OLD, "--format", "safetensors", "--output", tmp_path / "out"]
    assert "does not say its classes: give --classes FILE" in refused(capsys, *words)
    (tmp_path / "names").write_text("".join(f"class {number}\n" for number in range(10)))
    exported(OLD, "safetensors", tmp_path / "out", "--classes", str(tmp_path / "names"))
    assert json.loads((tmp_path / "out" / "classes.json").read_text())[9] == "class 9"


def test_weights_alone_are_exported_when_the_rest_is_given(folders, tmp_path, capsys):
    weights = shutil.copy(folders["photos", "torch"] / "weights.pth", tmp_path / "weights.pth")
    (tmp_path / "names").write_text("a\nb\nc\n")
    words = [weights, "--format", "safetensors", "--output", tmp_path / "out"]
    assert "give --arch NAME" in refused(capsys, *words)
    words += NETWORK
    assert "give --image_size" in refused(capsys, *words)
    words += ["--image_size", 32]
    assert "give --classes" in refused(capsys, *words)
    words += ["--classes", tmp_path / "names"]
    assert "of another network" in refused(capsys, *words, "--arch", "shufflenet_v2_x1_0")
    assert "none of torchvision's" in refused(capsys, *words, "--arch", "resnet1")
    assert not (tmp_path / "out").exists()
    assert export.main(list(map(str, words))) == 0


@pytest.mark.parametrize(
    ("run", "said"),
    [("nowhere", "nowhere does not exist"), (".", "holds no checkpoint"), ("s3://bucket/run", "fetch it first")],
)
def test_what_is_no_run_is_a_line(tmp_path, monkeypatch, capsys, run, said):
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, run, "--format", "torch")


def test_a_torch_without_programs_says_so(cifar, monkeypatch, capsys):
    monkeypatch.setattr(network.devices, "TORCH", (2, 1))
    assert re.search(
        r"--format torch needs torch 2.6 or later, and this is 2\.\d+.*: take", refused(capsys, cifar, "--format", "torch")
    )


def test_weights_alone_as_safetensors(folders, cifar, trained):
    for name, whole in (("cifar", cifar), ("photos", trained[0] / "out")):
        folder = folders[name, "safetensors"]
        assert_same_bits(read_weights(str(folder / "model.safetensors")), dict(command.find(str(whole)).weights))
        assert (folder / "config.json").exists() == (name == "photos" and NETWORK[1].startswith("resnet"))
        assert not (folder / "weights.pth").exists()


def test_without_onnx_one_line_says_what_to_install(cifar, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install onnx" in refused(capsys, cifar, "--format", "onnx")


# --- The files alone -----------------------------------------------------------------------------------------------------


def test_preprocess_needs_nothing_of_this_repository_and_no_torch(folders, tmp_path):
    content = next(hundred_photographs())
    (tmp_path / "photo.jpg").write_bytes(content)
    script = (
        "import sys; sys.modules['torch'] = None\nimport numpy, preprocess\n"
        "numpy.save('pixels.npy', preprocess.preprocess('photo.jpg'))\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('common', 'datasets', 'launch')]"
    )
    for name in ("preprocess.py", "preprocessing.json"):
        shutil.copy(folders["photos", "torch"] / name, tmp_path)
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment(), check=True)
    apart = np.load(tmp_path / "pixels.npy").astype(int) - preprocess_of(tmp_path)(content)
    assert np.abs(apart).max() <= 1


@pytest.mark.parametrize("name, form, said", [("photos", "torch", "class1"), ("cifar", "onnx", r"pattern \d")])
def test_the_readme_has_a_program_that_answers(folders, photographs, tmp_path, name, form, said):
    """In the folder, with a photograph in it."""
    folder = shutil.copytree(folders[name, form], tmp_path / "elsewhere")
    (program,) = re.findall(r"^```python\n(.*?)^```", (folder / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    shutil.copy(next((photographs / "val" / "class1").iterdir()), folder / "photo.jpg")
    strict = f"import warnings\nwarnings.simplefilter('error')\n{program}"
    done = run([sys.executable, "-c", strict], cwd=folder, env=environment())
    assert re.fullmatch(rf"{said} \d+\.\d%\n", done.stdout), done.stderr
    assert len(program.splitlines()) <= 14


def test_the_page_has_a_program_that_answers(folders, photographs, monkeypatch, capsys, tmp_path):
    """docs/export.md, run in the folder, with a photograph in it."""
    page = (ROOT / "docs" / "export.md").read_text()
    (program,) = [text for text in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "preprocess" in text]
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "export").symlink_to(folders["photos", "torch"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["program.py", "photo.jpg"])
    monkeypatch.setitem(sys.modules, "preprocess", None)
    monkeypatch.delitem(sys.modules, "preprocess")
    shutil.copy(next((photographs / "val" / "class1").iterdir()), "photo.jpg")
    exec(compile(program, "program.py", "exec"), {})
    assert re.fullmatch(r"photo.jpg class1 \d+\.\d%\n", capsys.readouterr().out)


def test_what_a_platform_runs_is_in_a_python_that_it_has(folders):
    for path in (folders["photos", "modelarts"] / "model").glob("*.py"):
        ast.parse(path.read_text(), feature_version=(3, 7))


@pytest.fixture
def platform(folders, monkeypatch):
    """ModelArts' server, as far as its pages tell: the class that a service derives from, and the order of its calls."""

    class PTServingBaseService:
        def __init__(self, model_name, model_path):
            self.model_name, self.model_path = model_name, model_path

        def inference(self, data):
            return self._postprocess(self._inference(self._preprocess(data)))

    package = ModuleType("model_service")
    package.pytorch_model_service = module = ModuleType("model_service.pytorch_model_service")
    module.PTServingBaseService = PTServingBaseService
    for name, value in (("model_service", package), ("model_service.pytorch_model_service", module), ("preprocess", None)):
        monkeypatch.setitem(sys.modules, name, value)
    monkeypatch.delitem(sys.modules, "preprocess")
    monkeypatch.setattr(sys, "path", list(sys.path))

    def start(folder):
        spec = importlib.util.spec_from_file_location("customize_service", folder / "customize_service.py")
        service = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(service)
        (kind,) = [
            value for value in vars(service).values() if isinstance(value, type) and PTServingBaseService in value.__bases__
        ]
        return kind("model", str(folder / "network.pth"))

    return start


def test_the_service_of_modelarts_answers_a_photograph_with_the_runs_class(folders, platform, photographs):
    folder = folders["photos", "modelarts"] / "model"
    service, files = platform(folder), tree.load(str(photographs / "val"))
    config = json.loads((folder / "config.json").read_text())
    right = 0
    for number in range(len(files)):
        with open(files.path(number), "rb") as file:
            answer = service.inference({"images": {"photo.jpg": io.BytesIO(file.read())}})
        check(json.loads(json.dumps(answer)), config["apis"][0]["response"]["data"])
        assert answer["predicted_label"] == answer["scores"][0][0] and len(answer["scores"]) == 3
        assert sum(score for _, score in answer["scores"]) == pytest.approx(1)
        right += answer["predicted_label"] == files.classes[files.labels[number]]
    assert right / len(files) == pytest.approx(config["metrics"]["accuracy"])
    with pytest.raises(ValueError, match="send one photograph"):
        service.inference({"images": {}})


def test_config_json_has_the_published_fields(folders, cifar, tmp_path):
    for name in ("cifar", "photos"):
        folder = folders[name, "modelarts"]
        assert [path.name for path in folder.iterdir()] == ["model"]
        config = json.loads((folder / "model" / "config.json").read_text())
        assert list(complaints(config, CONFIG)) == []
        assert config["model_algorithm"].isidentifier() and len(config["model_algorithm"]) <= 36
        assert all(("package_version" in one) == ("restraint" in one) for one in config["dependencies"][0]["packages"])
        assert {path.suffix for path in (folder / "model").iterdir() if path.is_file()} == {".json", ".py", ".pth"}
    exported(cifar, "modelarts", tmp_path, "--runtime", "an_engine")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["runtime"] == "an_engine"


def test_a_wrong_config_is_complained_of():
    assert len(list(complaints({"model_type": "Torch", "metrics": {"accuracy": "1"}, "other": 1}, CONFIG))) == 4


def test_a_program_that_answers_otherwise_is_not_written():
    class Odd(torch.nn.Module):
        def forward(self, images):
            return images.float().flatten(1)[:, :3] + len(images)  # which a trace takes for a constant

    with pytest.raises(TrainingFailed, match="answers otherwise than the network, by 1"):
        network.as_torchscript(Odd(), 8)
