"""What of the pages is not run by tests/pages/test_docs.py: commands, each group with its reason, and names that stand for a reader's own.

A command that is no longer in the pages has to go from here, too; a test says so.
"""

NOT_RUN = {
    "tests/common/ranks/test_group.py runs it, as a command of the job's own docstring": [
        "python jobs/train_ddp.py --custom_data true --nproc_per_node 2",
        "torchrun --nproc_per_node 2 jobs/train_ddp.py --custom_data true",
        "python -m torch.distributed.launch --nproc_per_node 2 jobs/train_ddp.py --custom_data true",
    ],
    "tests/common/ranks/test_group.py runs it with fewer images": [
        "torchrun --nproc_per_node 2 jobs/train_ddp.py --custom_data true --max_steps 18 --width 4 --lr 0.01",
    ],
    "stands for a command on each node; tests/common/ranks/test_group.py starts such nodes": [
        "python jobs/train_ddp.py --init_method tcp://FIRST_NODE:PORT --rank NODE --world_size NODES",
    ],
    "tests/pages/test_examples.py runs it": [
        "python jobs/my_data.py --data_url arrays --batch_size 32 --width 4 --max_steps 20",
        "python jobs/my_digits.py --data_url mnist --optimizer adam --lr 0.0002 --schedule constant --weight_decay 0 --label_smoothing 0 --batch_size 2048 --epochs 5",
        "python jobs/my_digits.py --data_url data/FashionMNIST/raw --workers 10 --batch_size 100 --epochs 3",
        "python jobs/my_csv.py --data_url pictures --batch_size 16 --width 16 --epochs 2",
        "python jobs/my_folder.py --data_url pictures --batch_size 16 --width 16 --epochs 2 --workers 2",
        "python jobs/my_loss.py --custom_data true --max_samples 256 --batch_size 32 --width 4 --epochs 2",
        "python jobs/my_torchvision.py --custom_data true --max_samples 256 --batch_size 32 --epochs 2",
        "python jobs/my_network.py --custom_data true --max_samples 256 --batch_size 32 --max_steps 20",
        "python jobs/own_tensors.py",
        "python jobs/own_tensors.py --nproc_per_node 2 --output_dir output_dir/own_tensors_of_two",
        "PYTHONPATH=/path/to/anyrank python my_script.py",
        "PYTHONPATH=/path/to/anyrank python my_script.py --nproc_per_node 2 --output_dir output_dir/of_two",
        "PYTHONPATH=/path/to/anyrank python -m launch bundle my_script.py",
        "python jobs/own_script.py --data_url arrays --epochs 2 --batch_size 64",
        "python jobs/own_script.py --data_url arrays --epochs 2 --batch_size 64 --max_steps 15",
        "python jobs/own_script.py --data_url arrays --epochs 2 --batch_size 64 --nproc_per_node 2 --output_dir output_dir/own_several",
        "python -m launch bundle jobs/own_script.py",
        "SKY_NODES=1 SKY_NODE=0 python jobs/train.py --custom_data true --max_samples 256 --batch_size 32 --width 4 --max_steps 1",
        "SKY_NODES=2 SKY_NODE=0 SKY_FIRST=127.0.0.1 python jobs/train_ddp.py --custom_data true --max_samples 256 --batch_size 32 --width 4",
        "SKY_NODES=2 SKY_NODE=1 SKY_FIRST=127.0.0.1 python jobs/train_ddp.py --custom_data true --max_samples 256 --batch_size 32 --width 4",
    ],
    "tests/common/run/test_unsaved.py runs it": [
        "python jobs/own_accumulation.py",
        "python jobs/own_gan.py",
    ],
    "needs runs that are finished; tests/common/report/test_report.py has some": [
        "python -m launch report output_dir/train",
        "python -m launch report obs://bucket/runs/7",
    ],
    "needs a tracker; tests/common/track/test_track.py has those": [
        "python jobs/train_ddp.py --custom_data true --track mlflow",
        "python -m launch track obs://bucket/runs/7 --to swanlab --follow true",
    ],
    "downloads from the Internet; tests/common/storage/test_https.py does the same from a server of its own": [
        "python jobs/train.py",
        "python jobs/train.py --data_url https://HOST/cifar-10-python.tar.gz",
    ],
    "needs a bucket and its key; tests/common/storage/test_download.py, tests/common/checkpoints/test_run_bucket.py and tests/datasets/packs/test_packed.py have a store of their own": [
        "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... AWS_REGION=cn-north-4",
        "export AWS_ACCESS_KEY_ID=$HUAWEICLOUD_SDK_AK AWS_SECRET_ACCESS_KEY=$HUAWEICLOUD_SDK_SK",
        "python jobs/train.py --data_url obs://bucket/cifar10",
        "python jobs/train_ddp.py --data_url obs://bucket/cifar10 --output_dir obs://bucket/runs/7",
        "python jobs/train_imagenet.py --data_backend packed --data_url obs://bucket/imagenet-packed",
        "python jobs/train_imagenet.py --data_url obs://bucket/flowers-out/annotation/V001/V001.manifest --arch resnet18 --image_size 64",
        "python -m launch pack /data/imagenet obs://bucket/imagenet-packed",
        "python jobs/train_imagenet.py --data_url obs://bucket/flowers.zip --arch resnet18 --image_size 64",
        "python jobs/train_imagenet.py --data_backend packed --data_url obs://bucket/imagenet-wds",
        "python -m launch pack --index obs://bucket/imagenet-wds",
        "torchrun --nproc_per_node 8 jobs/train_imagenet.py --data_url obs://bucket/imagenet --total_batch 2048",
        "torchrun --nproc_per_node 8 jobs/train_imagenet.py --data_backend packed --data_url obs://bucket/imagenet-packed",
    ],
    "sets a variable for a job on other machines; tests/common/alive/wire/test_strangers.py has a secret of its own": [
        "export ANYRANK_SECRET=$(openssl rand -hex 32)",
    ],
    "needs files of parquet; tests/launch/pack/test_index.py makes some": [
        "python -m launch pack imagenet-1k /data/imagenet-packed",
    ],
    "needs memcached servers; tests/datasets/kspeed/test_kspeed.py starts its own": [
        "memcached -m 200000 -I 16m -U 0 -l 10.0.0.5 -Y /etc/memcached.users",
        "export KSPEED_IPLIST=10.0.0.5:11211,10.0.0.6:11211 KSPEED_PASSWORD=...",
        "python -m launch kspeed preload /data/imagenet --user me",
        "python jobs/train_imagenet.py --data_backend kspeed --kspeed_user me --data_url /data/imagenet",
    ],
    "fetches files of torchvision's; tests/common/weights/test_by_name.py and tests/launch/test_weights.py make such files": [
        "python jobs/train_imagenet.py --data_url /data/flowers --weights ResNet50_Weights.DEFAULT --epochs 10",
        "python -m launch weights ResNet50_Weights.DEFAULT obs://bucket/weights",
        "python -m launch bundle jobs/train_imagenet.py --folder dist/flowers --weights ResNet50_Weights.DEFAULT",
        "python jobs/train_imagenet.py --data_url /data/flowers --weights obs://bucket/weights/resnet50-11ad3fa6.pth --epochs 10",
    ],
    "starts a Ray cluster; tests/datasets/dpex/test_dpex.py has one for all its tests": [
        "ray get-auth-token --generate",
        "ray start --head --port 6379",
        "ray start --address FIRST:6379",
        "export RAY_AUTH_MODE=token",
        "python jobs/train_dpex.py --custom_data true --workers 2",
        "python jobs/train_imagenet.py --data_backend dpex --workers 32 --data_url /data/imagenet",
    ],
    "needs GPUs": [
        "python jobs/train_imagenet.py --data_url /data/imagenet --find_max_batch true",
        "torchrun --nproc_per_node 8 jobs/train_restore.py --data_url /data/deblur --data_backend dali-gpu",
    ],
    "sets a variable": [
        "export OMP_NUM_THREADS=1",
        "export GLIBC_TUNABLES=glibc.malloc.mmap_threshold=8589934592:glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=268435456:glibc.malloc.hugetlb=1",
    ],
    "reads a script of the reader's; tests/launch/test_blocks.py has such a one": [
        "python -m launch blocks show train_sample.py",
        "python -m launch blocks revert train_sample.py -o single.py",
    ],
    "compares what the command before it wrote; tests/launch/test_blocks.py": [
        "diff single.py jobs/train.py",
    ],
    "compares what the two commands before it wrote; tests/common/exact/test_exact.py": [
        "diff output_dir/one/metrics.jsonl output_dir/three/metrics.jsonl",
    ],
    "starts a job of several nodes, one of which it kills; tests/common/elastic/test_elastic.py": [
        "python -m launch local --nodes 2 --lose 1@20 --return 1@30 jobs/train_ddp_exact.py -- --custom_data true --shares 4 --min_nodes 1 --width 4 --lr 0.02 --output_dir output_dir/elastic",
    ],
    "reads what the command before it wrote": [
        "python tests/check_ledger.py --samples 256 --global_batch 32 out",
    ],
    "reads what a run has left; tests/launch/export/test_export.py": [
        "python jobs/train_imagenet.py --data_url /data/flowers --evaluate true --weights output_dir/train_imagenet/epoch_12.pth",
        "python -m launch export output_dir/train_imagenet --format torch",
        "python -m launch export output_dir/train_imagenet --format onnx",
        "python -m launch export output_dir/train_imagenet --format safetensors",
        "python -m launch export output_dir/train_imagenet --format modelarts --output dist/model_package",
    ],
    "reads weights of timm; tests/common/models/test_of_timm.py": [
        "python jobs/train_imagenet.py --data_url /data/flowers --arch timm/vit_small_patch16_224 --weights pretrained --epochs 10",
    ],
    "takes hours": [
        "make chaos",
        'make chaos FAULT="rank killed" TRIALS=5',
        "make chaos FAULT=disk",
        "make bench DATA=FOLDER",
        'make bench DATA=FOLDER ONLY="base ddp"',
        "python -m tests.benchmarks.base",
    ],
    "needs an account of the platform; tests/launch/submit/test_sent.py sends such requests to a server of its own": [
        "export HUAWEICLOUD_SDK_AK=... HUAWEICLOUD_SDK_SK=... HUAWEICLOUD_SDK_PROJECT_ID=...",
        "python -m launch submit --platform modelarts --region cn-north-4 --stop JOB_ID",
    ],
    "runs in a container of ModelArts; tests/launch/bundle/test_bundle.py starts bundles": [
        "python ${MA_JOB_DIR}/train_ddp/train_ddp.py",
    ],
    "writes a file where it stands; tests/launch/test_engines.py prints it": [
        "python -m launch image --platform modelarts > Dockerfile",
    ],
    "needs docker": [
        "docker build -t swr.cn-north-4.myhuaweicloud.com/ORGANIZATION/anyrank .",
        'docker run --rm swr.cn-north-4.myhuaweicloud.com/ORGANIZATION/anyrank python -c "import torch, torchvision, boto3, sklearn, tqdm; print(torch.__version__)"',
        "docker push swr.cn-north-4.myhuaweicloud.com/ORGANIZATION/anyrank",
    ],
    "installs packages": [
        "make run",
        "source .venv/bin/activate",
        "pip install .[modelarts]",
        "pip install .[cache]",
        "pip install .[elastic]",
        "pip install .[ray]",
        "pip install .[timm]",
        "pip install .[parquet]",
        "pip list --format=freeze | grep -iE '^(torch|torchvision|numpy)==' > keep.txt && pip install -r requirements.txt -c keep.txt",
    ],
    "runs these tests": [
        "make quick",
        "make test",
        "make lint",
        "make format",
        "make rehearsal ROOM=common/elastic",
        "make test ROOM=common/checkpoints",
        "python -m pytest tests/pages/test_docs.py",
    ],
}

# Programs that a command needs.
NEEDS = {"python -m launch pack /data/imagenet /data/imagenet-tiled --form tiled": ["jpegtran"]}

# What a page shows to be refused, with exit code 2 and these words.
REFUSED = {
    "python -m launch blocks compose DP DDP": "DP and DDP do not go together",
    "python -m launch blocks compose DALI DPEX": "DALI and DPEX do not go together",
}

# Names that look like ours, but are a reader's, of another repository, or of what a program writes.
MADE_UP = {
    "jobs/my_ddp.py",
    "jobs/my_data.py",
    "jobs/my_digits.py",
    "jobs/my_folder.py",
    "jobs/my_loss.py",
    "jobs/my_network.py",
    "jobs/my_torchvision.py",
    "jobs/own_script.py",
    "jobs/own_tensors.py",
    "jobs/own_accumulation.py",
    "jobs/own_gan.py",
    "common/models/own_network.py",
    "datasets/own_data.py",
    "train_DP.py",
    "train_DDP.py",
    "loader_DALI.py",
    "main.py",
    "pytorch_ddp.py",
    "bench.md",
}

# What docs/modelarts.md quotes of other programs.
OTHERS_SAY = {
    "return code: 137",
}
