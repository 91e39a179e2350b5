"""The README.md of an exported folder: a program that prints the class of a picture."""

PAGE = """# {title}

Run it in this folder. Besides the packages that it imports, it needs Pillow.

```python
import json
{imports}
from preprocess import preprocess

{network}
classes = json.load(open("classes.json"))
pixels = preprocess("photo.jpg")[None]
{answer}
print(classes[shares.argmax()], f"{{shares.max():.1%}}")
```
"""
# {form: (imports, the network, its answer)}; timm: safetensors of a network that timm has
PROGRAMS = {
    "torch": (
        "import torch",
        'network = torch.export.load("network.pt2").module()',
        "shares = network(torch.from_numpy(pixels))[0].softmax(dim=0)",
    ),
    "onnx": (
        "import numpy\nimport onnxruntime",
        'network = onnxruntime.InferenceSession("network.onnx")',
        'numbers = numpy.exp(network.run(None, {"images": pixels})[0][0])\nshares = numbers / numbers.sum()',
    ),
    "timm": (
        "import timm\nimport torch",
        'network = timm.create_model("local-dir:.", pretrained=True).train(False)\n'
        'how = json.load(open("preprocessing.json"))\n'
        'mean, std = (torch.tensor(how[name]).view(1, 3, 1, 1) for name in ("mean", "std"))',
        "shares = network((torch.from_numpy(pixels) / 255 - mean) / std)[0].softmax(dim=0)",
    ),
}


def page(title: str, form: str) -> str:
    """Return the README.md of an exported folder; `form` is a key of PROGRAMS."""
    imports, network, answer = PROGRAMS[form]
    return PAGE.format(title=title, imports=imports, network=network, answer=answer)
