"""What the table of docs/from.md has for readers of the DALI article, typed as it stands there."""

import importlib
import json
import threading

import pytest
import torch

from common import arguments, devices
from common.errors import UserError
from common.machine import cores
from datasets import drop_in
from datasets.dali import batches
from datasets.drop_in import spellings
from datasets.facade import Dataset
from launch import export
from tests.datasets.drop_in.test_drop_in import MEAN, STD, TRAIN, VAL, folder, numbers, val_pipe  # noqa: F401 (a fixture)
from tests.pages.from_page import assert_each_is_checked, typed_here
from tests.tools.flagship import SYNTHETIC
from tests.tools.jobs import run_job

TABLE = "the table of the largest batches that fit"

# A script around the article's pieces; data_dir is the folder of ImageNet.
ARTICLE = """
import torch
from dali import HybridTrainPipe, HybridValPipe, DaliIteratorCPU, DaliIteratorGPU
from dataloader import Dataset

mean, std = (0.485 * 255, 0.456 * 255, 0.406 * 255), (0.229 * 255, 0.224 * 255, 0.225 * 255)
seen = []
for dali_cpu, iterator in ((True, DaliIteratorCPU), (False, DaliIteratorGPU)):
    train_pipe = HybridTrainPipe(batch_size=8, num_threads=2, device_id=0, data_dir=data_dir + '/train', crop=24,
                                 dali_cpu=dali_cpu, mean=mean, std=std, local_rank=0, world_size=1, shuffle=True,
                                 fp16=False, min_crop_size=0.08)
    train_pipe.build()
    train_loader = iterator(pipelines=train_pipe, size=int(train_pipe.epoch_size("Reader")) / 1, fp16=False, mean=mean,
                            std=std, pin_memory=False)
    val_pipe = HybridValPipe(batch_size=4, num_threads=2, device_id=0, data_dir=data_dir + '/val', crop=24, size=32,
                             dali_cpu=dali_cpu, mean=mean, std=std, local_rank=0, world_size=1, shuffle=False, fp16=False)
    val_pipe.build()
    val_loader = iterator(pipelines=val_pipe, size=int(val_pipe.epoch_size("Reader")) / 1, fp16=False, mean=mean, std=std,
                          pin_memory=False)
    for epoch in range(2):
        for i, (input, target) in enumerate(train_loader):
            assert input.shape[1:] == (3, 24, 24) and len(target) == len(input)
        assert i + 1 == len(train_loader)
        seen.append(sum(len(target) for input, target in val_loader))
    del train_loader, val_loader, train_pipe, val_pipe
"""
HERE = ARTICLE.replace("from dali import", "from datasets.drop_in import").replace(
    "from dataloader import", "from datasets.drop_in import"
)


def run_script(text, **given):
    exec(compile(text, "script.py", "exec"), given)
    return given


def test_a_script_runs_when_its_import_lines_change(folder):
    changed = [(old, new) for old, new in zip(ARTICLE.splitlines(), HERE.splitlines()) if old != new]
    assert len(changed) == 2 and all("import" in old for old, _ in changed)
    before = threading.active_count()
    assert run_script(HERE, data_dir=str(folder))["seen"] == [VAL] * 4
    assert threading.active_count() == before
    with pytest.raises(ModuleNotFoundError):
        run_script(ARTICLE, data_dir=str(folder))


def test_dataset_is_the_facade():
    assert drop_in.Dataset is Dataset


@pytest.mark.parametrize("device_id", [None, 0])
def test_the_pipes_run_on_a_cpu(folder, device_id):
    train = drop_in.HybridTrainPipe(8, 2, device_id, str(folder / "train"), 24, MEAN, STD)
    val = drop_in.HybridValPipe(8, 2, device_id, str(folder / "val"), 24, 32, MEAN, STD)
    for pipe in (train, val):
        pipe.build()
        images, labels = pipe.run()
        assert images.as_tensor().shape() == [8, 3, 24, 24] and "CPU" in type(labels).__name__


def test_the_iterator_of_the_gpu_pipe_gives_each_sample_once(folder):
    seen = []
    for rank in range(3):
        pipe = val_pipe(folder, local_rank=rank, world_size=3)
        seen += [number for images, _ in drop_in.DaliIteratorGPU(pipelines=pipe, size=VAL / 3) for number in numbers(images)]
    assert sorted(seen) == list(range(TRAIN, TRAIN + VAL))


def test_the_iterator_of_the_cpu_pipe_raises_and_ends(folder, tmp_path):
    before = threading.active_count()
    pipe = drop_in.HybridValPipe(1, 2, 0, str(folder / "val"), 24, 32, MEAN, STD, dali_cpu=True)
    pipe.build()  # more batches than wait for the loop, so the thread cannot have come to its end by itself
    loader = drop_in.DaliIteratorCPU(False, MEAN, STD, True, pipelines=pipe, size=VAL)
    images, _ = next(loader)
    assert not images.is_pinned() and threading.active_count() == before + 1
    loader.close()
    assert threading.active_count() == before
    (tmp_path / "val" / "class0").mkdir(parents=True)
    for name in range(8):
        (tmp_path / "val" / "class0" / f"{name}.jpg").write_bytes(b"no picture")
    with pytest.raises(RuntimeError, match="nvImageCodec"):
        list(drop_in.DaliIteratorCPU(pipelines=val_pipe(tmp_path, dali_cpu=True), size=8))


def test_the_iterator_without_a_thread(folder):
    """tests/datasets/drop_in/test_drop_in.py compares its batches with those of the other."""
    before = threading.active_count()
    loader = drop_in.DaliIteratorCPUNoPrefetch(False, MEAN, STD, True, pipelines=val_pipe(folder, dali_cpu=True), size=VAL)
    assert len(next(loader)[1]) == 4 and threading.active_count() == before


@pytest.fixture
def dataset(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def made(use_dali, val_batch_size=4, workers=1):
        return Dataset(str(folder), 8, val_batch_size, workers, use_dali, True, False, cuda=False, size=24, val_size=32)

    return made


def in_order(loader):
    return [(loader.ids.tolist(), labels.tolist()) for _, labels in loader]


def test_the_articles_call_of_dataset(dataset, folder):
    with_dali, without = dataset(True), dataset(False)
    assert in_order(with_dali.get_train_loader()) == in_order(without.get_train_loader())
    for (ours, labels), (theirs, same) in zip(with_dali.get_val_loader(), without.get_val_loader()):
        assert torch.equal(labels, same) and (ours - theirs).abs().mean() < 0.05
    with pytest.raises(UserError, match="or give cuda=False"):
        Dataset(str(folder), 8, 4, 1, True, True, False)


@pytest.mark.parametrize("batch_size, sizes", [(8, [8, 8, 8, 6]), (64, [30])])
def test_an_epoch_has_every_photograph_whatever_the_batch(dataset, batch_size, sizes):
    for use_dali in (True, False):
        data = dataset(use_dali)
        data.set_train_batch_size(batch_size)
        loader = data.get_train_loader()
        ids = [ids for ids, _ in in_order(loader)]
        assert [len(batch) for batch in ids] == sizes and sorted(sum(ids, [])) == list(range(30)) and len(loader) == len(sizes)


def test_the_loaders_can_be_looped_over_again(dataset):
    data = dataset(True)
    for loader in (data.get_train_loader(), data.get_val_loader()):
        assert in_order(loader) == in_order(loader)


def test_reset_goes_on_to_another_order(dataset):
    orders = []
    for use_dali in (True, False):
        data = dataset(use_dali)
        first = in_order(data.get_train_loader())
        data.reset()
        orders.append((first, in_order(data.get_train_loader())))
        assert orders[-1][0] != orders[-1][1]
    assert orders[0] == orders[1]


def test_prep_for_val_gives_memory_back(dataset, monkeypatch):
    given = []
    monkeypatch.setattr(devices, "empty_cache", given.append)
    data = dataset(True)
    in_order(data.get_train_loader())
    data.prep_for_val()
    assert given == [torch.device("cpu")] and len(in_order(data.get_val_loader())) == 3


def test_a_reload_does_no_harm(folder):
    before = drop_in.HybridTrainPipe
    assert importlib.reload(drop_in).HybridTrainPipe is before
    assert run_script(HERE, data_dir=str(folder))["seen"] == [VAL] * 4
    # That nothing grows over 50 epochs: tests/datasets/drop_in/test_drop_in.py.


def test_any_validation_batch_will_do(dataset):
    for use_dali in (True, False):
        for size in (3, 4, 5, 512):
            ids = [number for part, _ in in_order(dataset(use_dali, size).get_val_loader()) for number in part]
            assert ids == list(range(VAL))


def test_the_loader_takes_every_core(dataset, monkeypatch):
    threads = []
    monkeypatch.setattr(cores, "count", lambda: 3)
    plain = batches.build
    monkeypatch.setattr(batches, "build", lambda *given: threads.append(given[4]) or plain(*given))
    in_order(dataset(True, workers=0).get_val_loader())
    assert threads == [3]
    args = type("Args", (), {"workers": None, "world": type("World", (), {"local_world_size": 2})})
    assert devices.loader_workers(args) == 1


def test_another_interpolation_is_a_subclass(folder):
    from nvidia.dali import types

    class Fast(drop_in.HybridValPipe):
        interp_type, antialias = types.INTERP_LINEAR, False

    kept = val_pipe(folder)
    fast = Fast(4, 2, 0, str(folder / "val"), 24, 32, MEAN, STD)
    fast.build()
    (usual, labels), (other, same) = (next(drop_in.DaliIteratorGPU(pipelines=pipe, size=VAL)) for pipe in (kept, fast))
    assert torch.equal(labels, same) and 0 < (usual - other).abs().mean() < 0.2


def test_the_options_of_the_command_line(tmp_path):
    """Small: what is given twice counts as it is given last."""
    words = ["--custom_data", "true", "--max_samples", 16, "--epochs", 1, "--image_size", 32]
    typed = ["FOLDER", "--batch-size", 512, "--workers", 10, "--arch", "shufflenet_v2_x0_5"]
    done = run_job("train_imagenet", tmp_path, *words, *typed, "--batch-size", 8, "--workers", 0)
    assert "global batch 8" in done.stdout and "done: best accuracy" in done.stdout


def test_its_flags_mean_the_same(tmp_path):
    """tests/datasets/drop_in/test_spellings.py compares each; here they stand together."""
    done = run_job(
        "train_imagenet", tmp_path, *SYNTHETIC, "--fp16", "--max_steps", 2, "--wd", "1e-4", "-v", 16, "--dali-cpu", "--use-dali"
    )
    about = json.loads(next((tmp_path / "out" / "checkpoints").glob("*.json")).read_text())["arguments"]
    expected = {"amp_dtype": "float16", "val_batch_size": 16, "weight_decay": 1e-4, "data_backend": "dali-cpu"}
    assert {name: about[name] for name in expected} == expected and "done: " in done.stdout


def test_prof_may_stand_alone():
    """What it shows: tests/jobs/test_train_imagenet.py."""
    assert spellings.respell(arguments.Parser(), ["--prof", "--fp16"])[0][0] == "--prof=100"


@pytest.mark.rehearsal
def test_inference_has_the_runs_own_preprocessing(tmp_path, capsys):
    """That both give the same bytes and numbers: tests/launch/export/test_export.py."""
    run_job("train_imagenet", tmp_path, *SYNTHETIC, "--epochs", 1)
    assert export.main([str(tmp_path / "out"), "--format", "onnx", "--output", str(tmp_path / "exported")]) == 0
    assert {"network.onnx", "preprocess.py"} <= {path.name for path in (tmp_path / "exported").iterdir()}


def test_the_largest_batch_is_found_by_an_option_of_every_job(tmp_path):
    """On a GPU's stand-in tests/gpu/test_rehearsal.py finds it; here one line says that it is for GPUs."""
    (words,) = typed_here("The DALI article", TABLE)
    for job in ("train", "train_restore"):
        done = run_job(job, tmp_path, "--custom_data", "true", *words, check=2)
        assert "--find_max_batch true looks at the memory of a GPU" in done.stderr, job


CHECKS = {
    TABLE: test_the_largest_batch_is_found_by_an_option_of_every_job,
    "`from dali import HybridTrainPipe, HybridValPipe, DaliIteratorCPU, DaliIteratorGPU`": test_a_script_runs_when_its_import_lines_change,
    "`from dataloader import Dataset`": test_dataset_is_the_facade,
    "`HybridTrainPipe(batch_size, num_threads, device_id, data_dir, crop, mean, std, ...)`": test_the_pipes_run_on_a_cpu,
    "`HybridValPipe(batch_size, num_threads, device_id, data_dir, crop, size, mean, std, ...)`": test_the_pipes_run_on_a_cpu,
    "`DaliIteratorGPU(pipelines=pipe, size=n)`": test_the_iterator_of_the_gpu_pipe_gives_each_sample_once,
    "`DaliIteratorCPU(fp16, mean, std, pin_memory, pipelines=pipe, size=n)`": test_the_iterator_of_the_cpu_pipe_raises_and_ends,
    "`DaliIteratorCPUNoPrefetch(fp16, mean, std, pin_memory, pipelines=pipe, size=n)`": test_the_iterator_without_a_thread,
    "`Dataset(data_dir, batch_size, val_batch_size, workers, use_dali, dali_cpu, fp16)`": test_the_articles_call_of_dataset,
    "`dataset.get_train_loader()`, `dataset.get_val_loader()`": test_the_loaders_can_be_looped_over_again,
    "`dataset.reset()`": test_reset_goes_on_to_another_order,
    "`dataset.prep_for_val()`": test_prep_for_val_gives_memory_back,
    "`del` of the loaders, `torch.cuda.empty_cache()`, `gc.collect()`, `importlib.reload(dali)`": test_a_reload_does_no_harm,
    "a validation batch that divides the set: 500, not 512": test_any_validation_batch_will_do,
    "as many loader threads as virtual cores": test_the_loader_takes_every_core,
    "the resize without triangular interpolation": test_another_interpolation_is_a_subclass,
    "`python main.py FOLDER --batch-size 512 --workers 10 --arch shufflenet_v2_x0_5`": test_the_options_of_the_command_line,
    "`--fp16`, `--use-dali`, `--use-dali --dali-cpu`, `-v 500`, `--wd 1e-4`": test_its_flags_mean_the_same,
    "`--prof`": test_prof_may_stand_alone,
    "the same preprocessing for training and inference, by TensorRT": test_inference_has_the_runs_own_preprocessing,
}


def test_each_line_of_the_table_is_checked():
    assert_each_is_checked("The DALI article", CHECKS)
