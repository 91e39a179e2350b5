"""What the object store of the tests holds, and how a folder compares with it."""

import os
import re
from pathlib import Path

from common.address import FETCHING

MIB = 1 << 20
BIG = bytes(range(256)) * (20 * MIB // 256)  # three parts of ours
SMALL = {f"set/{number // 10}/{number}.bin": bytes([number]) * (1000 + number) for number in range(30)}


def fill(store, cifar):
    """The bucket `data`: SMALL, big/one, and the folder `cifar` under cifar/."""
    client = store.client()
    client.create_bucket(Bucket="data")
    for key, content in {**SMALL, "big/one": BIG}.items():
        client.put_object(Bucket="data", Key=key, Body=content)
    for path in cifar.iterdir():
        client.upload_file(str(path), "data", f"cifar/{cifar.name}/{path.name}")


def same(folder, wanted=SMALL):
    """Whether the folder holds the `wanted` objects below set/, and nothing else but our notes."""
    found = {
        os.path.relpath(os.path.join(where, name), folder): Path(where, name).read_bytes()
        for where, _, names in os.walk(folder)
        for name in names
        if not name.startswith(".") and os.path.basename(where) != FETCHING
    }
    return found == {key[len("set/") :]: content for key, content in wanted.items()}


def names_in(folder):
    """Of whole files."""
    return sorted(
        name for where, _, names in os.walk(folder) for name in names if not name.startswith(".") and FETCHING not in where
    )


def remote_names(store, prefix):
    answer = store.client().list_objects_v2(Bucket="data", Prefix=prefix)
    return sorted(entry["Key"][len(prefix) :] for entry in answer.get("Contents", []))


def store_environment():
    """By what a job finds the store that this test has."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def copied(client, prefix, place):
    """What is in the bucket below the prefix, as a folder: without the numbers of the starts that have written the checkpoints."""
    for entry in client.list_objects_v2(Bucket="data", Prefix=prefix).get("Contents", []):
        name = re.sub(r"(checkpoints/\d{12})-\d+", r"\1", entry["Key"][len(prefix) :])
        if not name.startswith(".starts/"):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(client.get_object(Bucket="data", Key=entry["Key"])["Body"].read())
    return place
