"""Other stores that speak S3, with other answers than Swift's: moto and s3rver, each a process of its own on this machine."""

import contextlib
import subprocess

from tests.tools.jobs import environment
from tests.tools.objectstore import KEY, SECRET, answers, free_port
from tests.tools.packages import node_program, python_program


class OtherStore:
    """The interface of tests.tools.objectstore.ObjectStore."""

    def __init__(self, folder, key=KEY, secret=SECRET):
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self.key, self.secret = free_port(), key, secret
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.environment = {
            "AWS_ENDPOINT_URL_S3": self.endpoint, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_REGION": "us-east-1",
        }  # fmt: skip
        with open(folder / "log", "w") as log:
            words = list(map(str, self.command(folder)))
            self.process = subprocess.Popen(words, cwd=folder, env=environment(), stdout=log, stderr=log)
        while not answers(self.port):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
                raise RuntimeError(f"{words[0]} did not start: {(folder / 'log').read_text()[-2000:]}")

    def client(self):
        import boto3
        from botocore.config import Config

        plain = Config(request_checksum_calculation="when_required", response_checksum_validation="when_required")
        return boto3.client("s3", endpoint_url=self.endpoint, aws_access_key_id=self.key, aws_secret_access_key=self.secret,
                            region_name="us-east-1", config=plain)  # fmt: skip

    def stop(self):
        self.process.terminate()
        self.process.wait()


class Moto(OtherStore):
    def command(self, folder):
        return [python_program("moto_server", "moto[s3,server]==5.2.5"), "-H", "127.0.0.1", "-p", self.port]


class S3rver(OtherStore):
    """It knows one key, its own."""

    def __init__(self, folder):
        super().__init__(folder, "S3RVER", "S3RVER")

    def command(self, folder):
        return [*node_program("s3rver", "s3rver@3.7.1"), "-d", folder / "objects", "-a", "127.0.0.1", "-p", self.port]
