"""The files of a ModelArts model package besides the network: config.json,
and customize_service.py for its server.

See its pages "Specifications for Editing a Model Configuration File" and "Specifications for Writing Model
Inference Code".
"""

from typing import Any, Optional

RUNTIME = "pytorch_1.8.0-cuda_10.2-py_3.7-ubuntu_18.04-x86_64"  # the engine that those pages name

NETWORK = "network.pth"  # TorchScript, under the ending by which the platform knows a model of PyTorch


def config(accuracy: Optional[float], runtime: str) -> dict[str, Any]:
    """Return config.json: the engine, the form of a request and its answer, and the packages to install."""
    picture = {"type": "object", "properties": {"images": {"type": "file"}}}
    score = {"type": "array", "minItems": 2, "maxItems": 2, "items": [{"type": "string"}, {"type": "number"}]}
    response = {
        "type": "object",
        "properties": {"predicted_label": {"type": "string"}, "scores": {"type": "array", "items": [score]}},
    }
    packages = [
        {"package_name": "numpy"},
        {"restraint": "ATLEAST", "package_version": "9.1.0", "package_name": "Pillow"},
    ]
    metrics = {} if accuracy is None else {"metrics": {"accuracy": accuracy}}
    return {
        "model_algorithm": "image_classification",
        "model_type": "PyTorch",
        "runtime": runtime,
        **metrics,
        "apis": [
            {
                "url": "/",
                "method": "post",
                "request": {"Content-type": "multipart/form-data", "data": picture},
                "response": {"Content-type": "application/json", "data": response},
            }
        ],
        "dependencies": [{"installer": "pip", "packages": packages}],
    }


# It runs on the platform's Python, which may be 3.7.
SERVICE = '''\
"""A photograph, sent as `images`, to its class:
{"predicted_label": "dog", "scores": [["dog", 0.98], ["cat", 0.02], ...]}."""

import json
import os
import sys

import torch
from model_service.pytorch_model_service import PTServingBaseService

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from preprocess import preprocess  # beside this file

SCORES = 5  # the most likely classes


class Service(PTServingBaseService):
    def __init__(self, model_name, model_path):
        super(Service, self).__init__(model_name, model_path)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = torch.jit.load(os.path.join(HERE, "network.pth"), map_location=self.device)
        self.model.eval()
        with open(os.path.join(HERE, "classes.json"), encoding="utf-8") as file:
            self.classes = json.load(file)

    def _preprocess(self, data):
        """data: {"images": {file name: the open file}}"""
        files = [content for contents in data.values() for content in contents.values()]
        if len(files) != 1:
            raise ValueError("send one photograph, as images; these are %d" % len(files))
        return torch.from_numpy(preprocess(files[0]))[None].to(self.device)

    def _inference(self, data):
        with torch.no_grad():
            return self.model(data).softmax(dim=1)[0].cpu()

    def _postprocess(self, data):
        best = data.topk(min(SCORES, len(self.classes)))
        pairs = zip(best.indices.tolist(), best.values.tolist())
        scores = [[self.classes[number], value] for number, value in pairs]
        return {"predicted_label": scores[0][0], "scores": scores}
'''
