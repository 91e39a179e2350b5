"""Certificates for the servers of a test, which nobody trusts but those who are told to."""

import ssl
import subprocess

from tests.tools.packages import program


def certified(folder, *names):
    """(the certificate, a context of TLS for its server): for these names, as in IP:127.0.0.1, or for no machine."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    words = [program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    words += ["-subj", "/CN=127.0.0.1", "-keyout", key, "-out", certificate]
    words += ["-addext", f"subjectAltName={','.join(names)}"] if names else []
    subprocess.run(words, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, context
