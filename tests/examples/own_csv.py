"""Pictures that a table names: FOLDER/{train,test}.csv with the columns file and label; files are below FOLDER."""

import csv
import os

from common import storage
from common.errors import UserError
from datasets import own_folder

loader = own_folder.loader


def load(args):
    folder = storage.fetch(args.data_url, inputs=args.input_dir)
    tables = [read(os.path.join(folder, f"{split}.csv")) for split in ("train", "test")]
    classes = sorted({row["label"] for row in tables[0]})
    return tuple(own_folder.Pictures(*columns(folder, table, classes), classes) for table in tables)


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def columns(folder, table, classes):
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = {row["label"] for row in table} - set(numbers)
    if unknown:
        raise UserError(f"labels that train.csv has not: {', '.join(sorted(unknown))}")
    return [os.path.join(folder, row["file"]) for row in table], [numbers[row["label"]] for row in table]
