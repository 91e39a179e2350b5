"""Weights by name from hosts that are called as torchvision's and timm's, over TLS; what they evaluate to is computed by hand, too."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torchvision
from PIL import Image

from common.checkpoints import checkpoint
from common.errors import UserError
from common.storage import https
from tests.common.storage.test_https import serve  # noqa: F401 (a fixture)
from tests.common.weights.test_by_name import KIND, content, file_name  # noqa: F401 (a fixture)
from tests.tools.certificate import certified
from tests.tools.flagship import photographs  # noqa: F401 (a fixture)
from tests.tools.hostile import safe_of
from tests.tools.hosts import OUTSIDE, Hosts
from tests.tools.jobs import PATIENCE, ROOT, environment, wait_for
from tests.tools.packages import namespaces, python_package

TORCHVISION, TIMM, FILES = "download.pytorch.org", "huggingface.co", "files.hf.co"
NAMES = [TORCHVISION, TIMM, FILES]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return certified(tmp_path_factory.mktemp("certificate"), *(f"DNS:{name}" for name in [*NAMES, "localhost"]))


@pytest.fixture
def certificate(own):
    return own[0]


@pytest.fixture
def tls(own):
    return own[1]


class Node:
    """A host with no other way out than to servers of the test, which it knows by the names of the Internet's."""

    def __init__(self, folder, certificate):
        self.hosts = Hosts(1, folder, outside=True, called=["node"], ours=NAMES, forked=True)
        self.folder = self.hosts.folders[0]
        self._env = {"SSL_CERT_FILE": str(certificate), "TORCH_HOME": "torch", "HF_HOME": "hf"}

    def run(self, *words, check=0, **env):
        """What the program printed."""
        process = self.hosts.run(0, sys.executable, *words, env={**self._env, **env})
        assert process.wait(PATIENCE) == check, self.hosts.log(0)
        return self.hosts.log(0)


@pytest.fixture
def node(certificate, tmp_path):
    namespaces()
    one = Node(tmp_path, certificate)
    yield one
    one.hosts.close()


def script(node, url, job="jobs/train_imagenet.py"):
    """A program that has this address in the place of torchvision's, for the digest in a name cannot be chosen."""
    path = node.folder / "script.py"
    path.write_text(
        f"import runpy, sys, torchvision\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"torchvision.models.{KIND.__name__}.IMAGENET1K_V1.value.url = {url!r}\n"
        f"sys.argv[0] = {str(ROOT / job)!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    return path


def losses_by_hand(network, prepare, photographs):
    """The mean loss and the accuracy of the pictures in val, of which each class is one of the network's first."""
    pictures = sorted((photographs / "val").glob("*/*"))
    labels = torch.tensor([int(path.parent.name[-1]) for path in pictures])
    network.eval()
    with torch.no_grad():
        outputs = network(torch.stack([prepare(Image.open(path).convert("RGB")) for path in pictures]))
    accuracy = (outputs.argmax(1) == labels).double().mean().item()
    return {"loss": torch.nn.functional.cross_entropy(outputs, labels).item(), "accuracy": accuracy}


def assert_evaluated_as(node, expected):
    found = json.loads((node.folder / "evaluated" / "evaluation.json").read_text())
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4) and found["accuracy"] == expected["accuracy"]


def test_two_ranks_finetune_from_one_fetch_of_torchvisions_and_evaluate_as_it_does(node, serve, tls, content, photographs):
    server = serve(content, tls=tls, at=(OUTSIDE, 443), cuts=[len(content) // 3])
    url = f"https://{TORCHVISION}/models/{file_name(content)}"
    data = ["--data_url", photographs, "--weights", f"{KIND.__name__}.DEFAULT", "--batch_size", 12]
    words = [script(node, url), *data, "--freeze_epochs", 1, "--epochs", 2, "--nproc_per_node", 2, "--image_size", 64]
    log = node.run(*words, "--output_dir", "out")
    assert server.asked == [None, f"bytes={len(content) // 3}-"]
    assert "begin anew" in log and "is unverified" not in log
    assert log.count(f"{os.path.basename(url)}: --arch shufflenet_v2_x0_5 --image_size 224") == 1
    _, about, _ = checkpoint.newest(str(node.folder / "out" / "checkpoints"))
    kept = {name: about["arguments"][name] for name in ("arch", "image_size", "resize", "mean")}
    assert kept == {"arch": "shufflenet_v2_x0_5", "image_size": 64, "resize": "short", "mean": [0.485, 0.456, 0.406]}

    refused = node.run(*words, "--output_dir", "other", "--arch", "resnet18", check=2)
    assert "is of shufflenet_v2_x0_5, and --arch is resnet18: give one of them" in refused

    node.run(words[0], *data, "--evaluate", "true", "--num_classes", 1000, "--output_dir", "evaluated")
    assert len(server.asked) == 2
    network = torchvision.models.shufflenet_v2_x0_5()
    path = node.folder / "theirs.pth"
    path.write_bytes(content)
    network.load_state_dict(torch.load(path, weights_only=True))
    assert_evaluated_as(node, losses_by_hand(network, KIND.DEFAULT.transforms(), photographs))


class Hub(http.server.ThreadingHTTPServer):
    """Answers as the hub does, which has the file elsewhere."""

    def __init__(self, tls, address, elsewhere):
        self.elsewhere, self.asked = elsewhere, []
        super().__init__(address, HubHandler)
        self.socket = tls.wrap_socket(self.socket, server_side=True)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class HubHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        self.send_response(302)
        self.send_header("Location", self.server.elsewhere)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def test_weights_of_timm_come_by_the_hubs_redirect_and_evaluate_as_in_timm(node, serve, tls, photographs, monkeypatch):
    place = python_package("timm==1.0.31")
    monkeypatch.syspath_prepend(place)
    monkeypatch.syspath_prepend(python_package("safetensors==0.8.0"))
    timm = pytest.importorskip("timm")
    torch.manual_seed(5)
    network = timm.create_model("test_vit")
    with torch.no_grad():
        network.head.weight *= 20  # answers that depend on how the pictures are made
    files = serve(safe_of(network.state_dict()), tls=tls, at=(OUTSIDE, 8443))
    hub = Hub(tls, (OUTSIDE, 443), f"https://{FILES}:8443/a-signed-address")
    words = ["--data_url", photographs, "--arch", "timm/test_vit", "--weights", "pretrained", "--num_classes", 1000]
    words += ["--evaluate", "true", "--batch_size", 4, "--nproc_per_node", 2, "--output_dir", "evaluated"]
    node.run(ROOT / "jobs" / "train_imagenet.py", *words, PYTHONPATH=str(place))
    hub.shutdown()
    hub.server_close()
    assert hub.asked == ["/timm/test_vit.r160_in1k/resolve/main/model.safetensors"] and files.asked == [None]
    prepare = timm.data.create_transform(**timm.data.resolve_data_config({}, model=network))
    assert_evaluated_as(node, losses_by_hand(network, prepare, photographs))


@pytest.fixture
def through(tmp_path):
    """through(password): the address of a proxy that asks for one."""
    place, started = python_package("proxy.py==2.4.10"), []

    def start(password):
        port = tmp_path / "port"
        words = [
            sys.executable,
            "-m",
            "proxy",
            "--hostname",
            "127.0.0.1",
            "--port",
            "0",
            "--port-file",
            port,
            "--num-workers",
            "1",
        ]
        words += ["--num-acceptors", "1", "--basic-auth", f"user:{password}", "--log-level", "ERROR"]
        with open(tmp_path / "proxy.log", "w") as log:
            started.append(subprocess.Popen(words, env=environment(PYTHONPATH=str(place)), stdout=log, stderr=log))
        wait_for(lambda: port.exists() and port.read_text().strip(), started[-1], "proxy")
        return f"127.0.0.1:{port.read_text().strip()}"

    yield start
    for process in started:
        process.terminate()
        process.wait()


def test_a_proxy_is_gone_through_and_one_that_refuses_is_named(serve, tls, certificate, through, tmp_path, monkeypatch):
    server = serve(b"weights", tls=tls)
    url = f"https://localhost:{server.server_port}/model.safetensors"
    proxy = through("right")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("https_proxy", f"http://user:wrong@{proxy}")
    monkeypatch.setenv("no_proxy", "")
    path = str(tmp_path / "weights")
    with pytest.raises(
        UserError, match=rf"Tunnel connection failed: 407 .*, through the proxy {re.escape(proxy)}: give another"
    ):
        https.download(url, path)
    monkeypatch.setenv("https_proxy", f"http://user:right@{proxy}")
    https.download(url, path)
    assert Path(path).read_bytes() == b"weights" and len(server.asked) == 1
