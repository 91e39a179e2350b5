"""Data sets and loaders.

Hugging Face's package has the same name: what it offers is refused here, in a line.
"""

_HUGGING_FACE_NAMES = {
    "ClassLabel", "Dataset", "DatasetDict", "Features", "IterableDataset", "IterableDatasetDict", "Sequence",
    "Value", "concatenate_datasets", "get_dataset_config_names", "get_dataset_split_names",
    "interleave_datasets", "load_dataset", "load_dataset_builder", "load_from_disk",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name in _HUGGING_FACE_NAMES:
        raise ImportError(
            f"datasets.{name} is Hugging Face's, and the package datasets of this program is anyrank's: "
            "write what load_dataset() gives to files in another script, and read them in this one"
        )
    raise AttributeError(f"module 'datasets' has no attribute {name!r}")
