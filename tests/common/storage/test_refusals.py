"""A store that says no: what a person is told, and that the requests are what each store accepts."""

import re

import pytest
from botocore import exceptions

from common import storage
from common.alive import patience
from common.errors import TrainingFailed, UserError
from common.storage import bucket
from tests.tools.faultproxy import faults
from tests.tools.objectstore import SECRET

pytestmark = pytest.mark.usefixtures("reachable", "the_secret_is_nowhere")


@pytest.mark.parametrize(
    "url, env, fault, words",
    [
        ("s3://missing/x", {}, None, "404 NoSuchBucket: there is no such bucket"),
        ("s3://data/nothing", {}, None, "s3://data/nothing/ at http://127.0.0.1:.* holds nothing"),
        ("s3://data/set", {"AWS_SECRET_ACCESS_KEY": "wrong"}, None, "403 SignatureDoesNotMatch: the secret key does not"),
        ("s3://data/set", {"AWS_SECRET_ACCESS_KEY": ""}, None, "there is no credential: set AWS_ACCESS_KEY_ID"),
        ("s3://data/set", {}, "expired", "403 ExpiredToken: the temporary credential has expired"),
        ("s3://data/set", {}, "skewed", "403 RequestTimeTooSkewed: this machine's clock is wrong"),
        ("s3://data/set", {}, "denied", "403 AccessDenied: the credential lacks the right"),
        ("obs://data/set", {"AWS_ENDPOINT_URL_S3": "", "AWS_REGION": ""}, None, "obs:// needs to know the region"),
        ("s3://da\nta/set", {}, None, "is not a bucket's address"),
        ("s3://d/set", {}, None, "the name of a bucket has three letters, digits, dots or dashes at least"),
        ("s3://data/set", {"AWS_PROFILE": "none"}, None, r"profile \(none\) could not be found"),
    ],
)
def test_a_refusal_is_one_line_with_a_remedy_and_without_the_secret(store, monkeypatch, url, env, fault, words):
    with faults(store, lambda request: fault, monkeypatch) as proxy:
        for name, value in env.items():
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
        with pytest.raises(UserError, match=words) as refused:
            storage.fetch(url, "got")
    asked = [(request.method, request.path, str(request.query)) for request in proxy.log]
    assert len(asked) == len(set(asked)), "a refusal is not tried again for three minutes"
    assert "\n" not in str(refused.value)
    assert SECRET not in str(refused.value) and "Signature=" not in str(refused.value)


@pytest.mark.parametrize(
    "status, refused",
    [
        (400, "its words"),
        (403, bucket.REMEDIES["AccessDenied"]),
        (404, bucket.REMEDIES["NoSuchKey"]),
        (408, ""),
        (429, ""),
        (500, ""),
    ],
)
def test_an_answer_whose_code_nobody_knows_counts_by_its_status(status, refused):
    """`refused`: with these words; else it is asked for again."""
    answer = {"Error": {"Code": "Odd", "Message": "its words"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    found = bucket._refusal(exceptions.ClientError(answer, "GetObject"), "get_object")
    assert str(found) == f"get_object answered {status} Odd: {refused}" if refused else found is None


def test_a_broken_encryption_is_tried_again_and_a_wrong_certificate_is_not():
    broken, wrong = (
        exceptions.SSLError(endpoint_url="x", error=words) for words in ("EOF", "[SSL: CERTIFICATE_VERIFY_FAILED]")
    )
    assert bucket._refusal(broken, "get_object") is None
    assert "certificate cannot be verified" in str(bucket._refusal(wrong, "get_object"))


def test_a_store_that_never_answers_is_given_up_with_the_reason(monkeypatch):
    monkeypatch.setenv(patience.VARIABLE, "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    said = []
    with pytest.raises(
        TrainingFailed, match=r"list_objects s3://data/set/ at http://127.0.0.1:9: no good answer for 1 s, the last"
    ):
        storage.fetch("s3://data/set", "got", say=said.append)
    assert re.search(r"warning: .* no connection; trying again", said[0])


@pytest.mark.parametrize(
    "url, env, host, path",
    [
        ("obs://bkt/k", {"AWS_REGION": "cn-north-4"}, "bkt.obs.cn-north-4.myhuaweicloud.com", "/k"),
        ("oss://bkt/k", {"AWS_REGION": "cn-hangzhou"}, "bkt.oss-cn-hangzhou.aliyuncs.com", "/k"),
        ("oss://bkt/k", {"AWS_DEFAULT_REGION": "oss-cn-hangzhou"}, "bkt.oss-cn-hangzhou.aliyuncs.com", "/k"),
        ("s3://bkt/k", {"AWS_REGION": "eu-west-1"}, "bkt.s3.eu-west-1.amazonaws.com", "/k"),
        ("s3://bkt/k", {"AWS_ENDPOINT_URL_S3": "http://10.0.0.7:9000"}, "10.0.0.7:9000", "/bkt/k"),
        ("obs://bkt/k", {"S3_ENDPOINT": "obs.internal.example", "AWS_REGION": "r"}, "bkt.obs.internal.example", "/k"),
    ],
)
@pytest.mark.parametrize("operation", ["put_object", "get_object", "delete_object", "upload_part", "list_objects"])
def test_the_requests_are_what_each_store_accepts(monkeypatch, url, env, host, path, operation):
    """Captured instead of sent: where they go, signed for which region, and nothing in them that OBS or OSS refuse."""
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.delenv("AWS_REGION")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    place, sent = bucket.Bucket(url), []

    def capture(request, **_):
        sent.append(request)
        raise UserError("captured")

    place.client.meta.events.register("before-send.s3", capture)
    words = {
        "put_object": {"Body": b"content", "ContentMD5": "mgNkuembtIDdJeHwKEyFVQ=="},
        "upload_part": {"Body": b"content", "ContentMD5": "mgNkuembtIDdJeHwKEyFVQ==", "PartNumber": 1, "UploadId": "u"},
        "list_objects": {"Prefix": "k"},
    }.get(operation, {})
    with pytest.raises(UserError, match="captured"):
        place.ask(operation, "k", **words)
    headers = {name.lower(): str(value) for name, value in sent[0].headers.items()}
    where = re.match(r"https?://([^/]+)(/[^?]*)", sent[0].url)
    assert where[1] == host and where[2].rstrip("/") == (path if operation != "list_objects" else path[: -len("/k")])
    authorization = headers["authorization"].replace("b'", "")
    region = next((value for name, value in env.items() if "REGION" in name), "us-east-1").replace("oss-", "")
    assert (
        authorization.startswith("AWS4-HMAC-SHA256 Credential=test:tester/") and f"/{region}/s3/aws4_request" in authorization
    )
    assert "aws-chunked" not in headers.get("content-encoding", "") and "transfer-encoding" not in headers
    assert not any("checksum" in name or name == "x-amz-trailer" for name in headers), headers
    if "Body" in words:
        assert headers["content-length"] == "7" and headers["content-md5"].strip("b'") == words["ContentMD5"]
