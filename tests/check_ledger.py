"""Were all samples trained on, and each once? Reads nothing but the ledgers of a run, and imports nothing of ours.

    python tests/check_ledger.py --samples 256 --global_batch 64 OUTPUT_DIR [OUTPUT_DIR of another node ...]

Exits 0 and says so when in every epoch each step holds as many different samples as the global batch, no sample comes
twice, and the steps follow on each other without a gap; exits 1 naming what is wrong.
"""

import argparse
import json
import sys
from pathlib import Path


def steps_that_count(folders):
    """{epoch: {position: [ids of all ranks]}}; a step that a later start went back behind does not count.

    A node that comes to a run that publishes fetches the ledgers of the others, so one line may be on two nodes.
    """
    paths = [path for folder in folders for path in Path(folder).glob("ledger/rank_*.jsonl")]
    texts = dict.fromkeys(line for path in paths for line in path.open() if line.endswith("\n"))
    lines = [json.loads(text) for text in texts]  # each has its time, so one that is in two files is a copy
    starts = [(line["t"], line["start"]) for line in lines if "start" in line]
    epochs = {}
    for line in lines:
        if "step" in line and not any(begun > line["t"] and start <= line["step"] for begun, start in starts):
            epoch, position = line["step"]
            epochs.setdefault(epoch, {}).setdefault(position, []).extend(line["ids"])
    return epochs


def complaints(epochs, samples, global_batch):
    for epoch, steps in sorted(epochs.items()):
        ids = [i for step in steps.values() for i in step]
        wanted = samples // global_batch * global_batch
        if len(ids) != wanted:
            yield f"epoch {epoch + 1}: {len(ids)} samples were trained on, {wanted} should have been"
        if len(set(ids)) != len(ids):
            yield f"epoch {epoch + 1}: {len(ids) - len(set(ids))} samples came twice"
        if sorted(steps) != list(range(0, wanted, global_batch)):
            yield f"epoch {epoch + 1}: the steps begin at {sorted(steps)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--global_batch", type=int, required=True)
    parser.add_argument("folders", nargs="+")
    options = parser.parse_args()
    epochs = steps_that_count(options.folders)
    wrong = list(complaints(epochs, options.samples, options.global_batch))
    print("\n".join(wrong) or f"{len(epochs)} epochs: every sample once")
    return 1 if wrong or not epochs else 0


if __name__ == "__main__":
    sys.exit(main())
