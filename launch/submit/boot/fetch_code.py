"""The program of a pod's init container: it copies the code from a bucket into a folder of the pod,
and needs only boto3.

    python fetch_code.py BUCKET PREFIX FOLDER ADDRESSING

Credentials, region and endpoint come from the environment. If this fails or finds no file, the job's
container is not started.
"""

import os
import sys


def main(bucket: str, prefix: str, folder: str, addressing: str) -> int:
    import boto3
    from botocore.config import Config

    region = os.environ.get("AWS_REGION")  # boto3 itself reads AWS_DEFAULT_REGION
    client = boto3.client("s3", region_name=region, config=Config(s3={"addressing_style": addressing}))
    count = 0
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", []):
            path = os.path.join(folder, item["Key"][len(prefix) :])
            if not path.endswith("/"):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                client.download_file(bucket, item["Key"], path)
                count += 1
    print(f"{count} files of code")
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
