"""Programs to use before and after a job: python -m launch VERB ...

Each verb is a small program with a --help of its own.
"""

import difflib
import importlib
import sys

from common import VERSION, packages

packages.check_python()  # before the lines below, which an old Python does not understand

VERBS = {
    "blocks": "show what a feature changes, take it out again, put two together, follow a change of train.py",
    "doctor": "look for what ruins runs before a job starts, on every node",
    "bundle": "a job as one file, or as a folder, for a training console",
    "report": "a page of what a run has left",
    "track": "the curves of a run in MLflow, W&B or SwanLab",
    "export": "a trained network as a folder for elsewhere: ONNX, torch, timm, a model package of ModelArts",
    "pack": "photographs as large files, for a bucket or a slow disk",
    "kspeed": "fill the shared sample cache before a job, look at it, empty it",
    "weights": "fetch weights by name, as ResNet50_Weights.DEFAULT, for a platform without Internet",
    "image": "print the Dockerfile of an image of your own, and the commands that build and push it",
    "submit": "send a job to ModelArts, PAI-DLC, SageMaker, Kubernetes or SLURM, or run the same here",
    "local": "play a platform on this machine: nodes, injected arguments, a kill, a restart",
}


def main(argv: list[str]) -> int:
    """Run the verb that argv begins with and return its exit code; 2 if there is no such verb."""
    if argv == ["--version"]:
        print(f"anyrank {VERSION}")
        return 0
    if not argv or argv[0] not in VERBS:
        lines = [f"    {name:8} {description}" for name, description in VERBS.items()]
        if argv in ([], ["-h"], ["--help"]):
            print("\n".join([str(__doc__), "", *lines]))
            return 0
        matches = difflib.get_close_matches(argv[0], VERBS, n=1)
        hint = f"did you mean {matches[0]}?" if matches else f"give {', '.join(VERBS)}"
        print(f"error: launch has no verb {argv[0]!r}: {hint}", file=sys.stderr)
        return 2
    try:
        code = importlib.import_module(f"launch.{argv[0]}").main(argv[1:])
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of the output has ended (`... | head`)
        sys.stderr.close()
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
