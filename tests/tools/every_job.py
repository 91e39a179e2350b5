"""What is small, and what is left, for every job."""

from tests.tools.jobs import (
    NETWORK,
)

SMALLER = {
    "train_imagenet": [*NETWORK, "--image_size", 32, "--workers", 0, "--ignore", "width"],
    "train_restore": ["--max_samples", 32, "--batch_size", 8, "--workers", 0],
    "speedrun": ["--net", "small", "--ignore", "batch_size,width,epochs,max_steps"],
}


LEAVES = {"speedrun": "runs.jsonl"}  # the others leave checkpoints/*
