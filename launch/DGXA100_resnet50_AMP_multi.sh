#!/bin/bash
# The script of Alibaba's KSpeed document: ResNet-50 on the 8 GPUs of one machine, in half precision.
#
#     bash launch/DGXA100_resnet50_AMP_multi.sh BACKEND IMAGENET_FOLDER [more options of jobs/train_imagenet.py]
#
# BACKEND: pytorch, kspeed, dali-kspeed, or another of --data_backend. The settings are those of NVIDIA's ResNet-50 v1.5.
# NPROC_PER_NODE: the number of processes (8). PYTHON: the Python that has the packages (python).
if [ $# -lt 2 ]; then
    echo "usage: bash $0 BACKEND IMAGENET_FOLDER [more options of jobs/train_imagenet.py]" >&2
    exit 2
fi
backend=$1 folder=$2
shift 2
here=$(dirname "$(dirname "$(realpath "$0")")")
exec "${PYTHON:-python}" -m torch.distributed.run --nproc_per_node "${NPROC_PER_NODE:-8}" "$here/jobs/train_imagenet.py" "$folder" \
    --data-backend "$backend" -p 100 --arch resnet50 -b 256 --optimizer-batch-size 2048 --lr 2.048 \
    --lr-schedule cosine --warmup 8 --epochs 250 --momentum 0.875 --wd 3.0517578125e-05 --label-smoothing 0.1 --mixup 0.2 \
    --memory-format nhwc --amp --dynamic-loss-scale "$@"
