"""Access to one bucket of an object store: the connection, the time limit of a request,
and errors with advice.

    s3://bucket/prefix     Amazon S3, or any store that AWS_ENDPOINT_URL_S3 names
    obs://bucket/prefix    Huawei OBS
    oss://bucket/prefix    Alibaba OSS

Credentials, region and endpoint come from where boto3 looks for them (AWS_ACCESS_KEY_ID, AWS_PROFILE, a role
...), never from an argument. boto3 makes each request once, and this module repeats it, so that there is one
time limit and one reason.
"""

import dataclasses
import ipaddress
import os
import re
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any, Callable, Optional

from common.alive import patience as time_limit
from common.alive.patience import Patience, Say
from common.errors import TrainingFailed, UserError, one_line
from common.secrets import mask
from common.storage.item import Item

THREADS = 16  # concurrent requests

ADDRESS = re.compile(r"(s3|obs|oss)://([A-Za-z0-9][A-Za-z0-9._-]{2,254})(?:/(.*))?", re.DOTALL)

# The endpoint of each store in a region. OBS and OSS need the bucket's name in the host name (virtual
# addressing).
ENDPOINTS = {"obs": "https://obs.{region}.myhuaweicloud.com", "oss": "https://oss-{region}.aliyuncs.com"}

# The advice for each error code with which a store refuses a request. OBS and OSS have some codes of their
# own.
KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) for this store"
EXPIRED = (
    "the temporary credential has expired: get a new one and start again, and the transfer goes on where "
    "it stopped"
)
EXPIRED_CODES = [
    "ExpiredToken",
    "RequestExpired",
    "SecurityTokenExpired",
    "InvalidToken",
    "TokenRefreshRequired",
]
CERTIFICATE = "give the file of the authority that signed it as AWS_CA_BUNDLE"
REMEDIES = {
    "NoSuchBucket": "there is no such bucket: check its name, AWS_REGION and the endpoint",
    "NoSuchKey": "there is no such object",
    "InvalidAccessKeyId": f"the store does not know this access key: {KEYS}",
    "SignatureDoesNotMatch": f"the secret key does not belong to the access key: {KEYS}",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "AccessDenied": "the credential lacks the right to do this: ask the bucket's owner for it",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set AWS_REGION",
    "PermanentRedirect": "the bucket is in another region: set AWS_REGION",
    **dict.fromkeys(EXPIRED_CODES, EXPIRED),
}
TRANSIENT = {
    "SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling", "ThrottlingException",
    "RequestLimitExceeded", "OperationAborted", "BadDigest",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a store is reached."""

    endpoint: Optional[str]  # None for Amazon's own
    region: str
    style: str  # where the bucket's name is: "path", "virtual" (in the host name), or "auto"
    session: Any  # a boto3.Session


class ObjectChanged(Exception):
    """The object has changed since it was listed, or is shorter than the requested range."""


class Bucket:
    """A bucket, or the objects below a prefix in it, and the connection to its store."""

    def __init__(self, url: str, say: Say = print) -> None:
        match = ADDRESS.fullmatch(url)
        if not match or "\0" in url:
            raise UserError(
                f"{one_line(url)[:200]} is not a bucket's address: give s3://, obs:// or oss:// "
                "BUCKET/PREFIX; the name of a bucket has three letters, digits, dots or dashes at least"
            )
        self.scheme = match[1]
        self.name = match[2]
        self.prefix = (match[3] or "").removesuffix("/")
        self.say = say
        try:
            self.client, self.settings = _client(self.scheme)
        except UserError:
            raise
        except Exception as error:
            raise _refusal(error, f"connect to {self.scheme}://{self.name}") or UserError(
                describe(error)
            ) from None
        self.endpoint = mask(self.client.meta.endpoint_url)  # for messages

    def renew(self) -> None:
        """Make a new client, with the credential that boto3 finds now:
        a role or a program may have replaced the old one."""
        self.client, self.settings = _client(self.scheme)

    def key_prefix(self) -> str:
        """Return the prefix of the keys of all objects below the address: PREFIX/,
        or an empty text for a whole bucket."""
        return f"{self.prefix}/" if self.prefix else ""

    def relative(self, key: str) -> str:
        """Return the part of `key` after the prefix of this address."""
        return key[len(self.key_prefix()) :]

    def url(self, key: str) -> str:
        """Return the address of the object with this key."""
        return f"{self.scheme}://{self.name}/{key}"

    def items(self, prefix: str, patience: Optional[Patience] = None) -> Iterator[Item]:
        """Yield the objects whose keys begin with `prefix`."""
        marker = ""
        while True:
            # Version 1 of the request, because every S3-compatible store has it.
            page = self.ask("list_objects", prefix, patience, Prefix=prefix, Marker=marker)
            entries = page.get("Contents", [])
            for entry in entries:
                yield Item(entry["Key"], entry["Size"], entry["ETag"].strip('"'))
            if not page.get("IsTruncated") or not entries:
                return
            marker = page.get("NextMarker") or entries[-1]["Key"]

    def ask(
        self,
        operation: str,
        key: str,
        patience: Optional[Patience] = None,
        work: Optional[Callable[[Any], Any]] = None,
        **parameters: Any,
    ) -> Any:
        """Return boto3's answer to `operation`, or what `work` makes of it.

        Temporary errors are retried for `patience`.

        `work` reads the answer's body, so one that breaks off is retried, too. A refusal raises UserError or
        ObjectChanged.
        """
        patience = patience or Patience()
        store = f"{self.scheme}://{self.name} at {self.endpoint}"
        if operation != "list_objects":  # for which the key is used in messages only
            parameters["Key"] = key
        while True:
            began = time.monotonic()
            try:
                answer = getattr(self.client, operation)(Bucket=self.name, **parameters)
                result = work(answer) if work else answer
            except Exception as error:
                request = f"{operation} {one_line(self.url(key))} at {self.endpoint}"
                if refusal := _refusal(error, request):
                    raise refusal from None
                if patience.failed(store, began):
                    hint = ", with a larger --patience to wait longer" if patience.has_option else ""
                    raise TrainingFailed(
                        f"{request}: no good answer for {patience.seconds:.0f} s, the last was: "
                        f"{describe(error)}; start again to go on{hint}"
                    ) from None
                patience.pause(store, self.say, f"{request}: {describe(error)}")
            else:
                patience.succeeded(store, self.say)
                return result


def encryption(url: str) -> Optional[str]:
    """Return the algorithm that encrypts a bucket's new objects by default; None if there is none,
    or after any error."""
    try:
        bucket = Bucket(url)
        rules = bucket.client.get_bucket_encryption(Bucket=bucket.name)["ServerSideEncryptionConfiguration"][
            "Rules"
        ]
        return rules[0]["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"]
    except Exception:  # no credential, no right, no such request, no encryption
        return None


def read_timeout() -> float:
    """Return the seconds without a byte that boto3 allows, and obstore for a whole request."""
    return min(10.0, time_limit.limit() / 10)


# --- How a store is reached ---------------------------------------------------------------------------------


def _client(scheme: str) -> tuple[Any, Settings]:
    """Return a boto3 client for a store, and the settings that it was made with."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise UserError(
            f"{scheme}:// is read and written with boto3, which is not installed: pip install boto3, or name "
            "it in the requirements.txt that is uploaded with the job"
        ) from None
    session = boto3.Session()
    endpoint, region = endpoint_and_region(scheme, os.environ, session.region_name)
    if endpoint and _is_plain_host(endpoint):
        style = "path"
    elif scheme in ENDPOINTS:
        style = "virtual"
    else:
        style = "auto"
    config = {
        "signature_version": "s3v4",
        "s3": {"addressing_style": style},
        "retries": {"total_max_attempts": 1},
        "connect_timeout": read_timeout() / 2,
        "read_timeout": read_timeout(),
        "max_pool_connections": 2 * THREADS,
        "user_agent_extra": "anyrank",
    }
    # Stores other than Amazon's refuse the checksums that boto3 adds by default, and the chunks in which it
    # sends them.
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        if f"AWS_{name.upper()}" not in os.environ:
            config[name] = "when_required"
    client = session.client("s3", region_name=region, endpoint_url=endpoint, config=Config(**config))
    return client, Settings(endpoint, region, style, session)


def endpoint_and_region(
    scheme: str, environ: Mapping[str, str], region: Optional[str]
) -> tuple[Optional[str], str]:
    """Return (endpoint, region) of the store for a scheme; an endpoint of None is Amazon's.

    They come from environment variables; `region`: the one that boto3 has found. UserError if a store needs a
    region and there is none.
    """
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    if not endpoint and scheme == "obs" and environ.get("S3_ENDPOINT"):  # ModelArts sets it
        endpoint = environ["S3_ENDPOINT"]
        if "://" not in endpoint:
            endpoint = ("http://" if environ.get("S3_USE_HTTPS") == "0" else "https://") + endpoint
    region = region or environ.get("AWS_REGION")
    if scheme == "oss" and region:
        region = re.sub(r"^oss-", "", region)
    if not endpoint and scheme in ENDPOINTS:
        if not region:
            raise UserError(
                f"{scheme}:// needs to know the region: set AWS_REGION (such as cn-north-4) or "
                "AWS_ENDPOINT_URL_S3"
            )
        endpoint = ENDPOINTS[scheme].format(region=region)
    return endpoint, region or "us-east-1"


def _is_plain_host(endpoint: str) -> bool:
    """Whether the endpoint's host is an IP address or a name without a dot,
    so that no bucket's name can be put before it."""
    host = urllib.parse.urlsplit(endpoint).hostname or ""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "." not in host
    return True


# --- What a store answers -----------------------------------------------------------------------------------


def describe(error: Exception) -> str:
    """Return a line for an error: the status and code of the store's answer, else words for a known kind,
    else its text."""
    response = getattr(error, "response", None)
    if isinstance(response, dict) and "Error" in response:
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", "")
        return one_line(f"{status} {response['Error'].get('Code', '')}")[:200]
    kind = type(error).__name__
    descriptions = {
        "EndpointConnectionError": "no connection",
        "ConnectTimeoutError": f"no connection within {read_timeout() / 2:g} s",
        "ReadTimeoutError": f"no byte for {read_timeout():g} s",
        "ConnectionClosedError": "the connection was closed", "IncompleteReadError": "the answer broke off",
        "ResponseStreamingError": "the answer broke off",
    }  # fmt: skip
    return descriptions.get(kind) or one_line(f"{kind}: {error}")[:200]


def _refusal(error: Exception, request: str) -> Optional[Exception]:
    """Return the exception to raise for an error of this request, or None if trying again may help."""
    import urllib3.exceptions
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    if isinstance(error, (UserError, TrainingFailed, ObjectChanged)):
        return error
    if isinstance(error, exceptions.ClientError):
        code = error.response["Error"].get("Code", "")
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        if status in (412, 416):
            return ObjectChanged()
        if code in TRANSIENT or status in (408, 429) or status >= 500:
            return None
        remedy = REMEDIES.get(code) or REMEDIES.get({403: "AccessDenied", 404: "NoSuchKey"}.get(status, ""))
        message = remedy or one_line(error.response["Error"].get("Message", ""))[:200]
        return UserError(f"{request} answered {describe(error)}: {message}")
    if isinstance(error, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
        return UserError(f"{request}: there is no credential: {KEYS}")
    if isinstance(error, exceptions.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        hint = "; S3_VERIFY_SSL=0 is not followed" if os.environ.get("S3_VERIFY_SSL") == "0" else ""
        return UserError(f"{request}: the store's certificate cannot be verified: {CERTIFICATE}{hint}")
    temporary = (
        exceptions.HTTPClientError,
        exceptions.ConnectionError,
        exceptions.IncompleteReadError,
        ResponseParserError,
        urllib3.exceptions.HTTPError,
        OSError,
    )
    if isinstance(error, temporary):
        return None
    if isinstance(error, (exceptions.BotoCoreError, ValueError)):
        # a profile, region or name that is not valid
        return UserError(f"{request}: {one_line(error)[:300]}")
    return error
