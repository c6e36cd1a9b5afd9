"""One CA, a client certificate for each component, a kubeconfig for each. ECDSA: a second."""

from cluster.paths import API_IP, API_PORT, KUBERNETES_SERVICE_IP, PKI, RUN
from cluster.shell import run

DAYS = "30"
API_URL = f"https://{API_IP}:{API_PORT}"
API_NAMES = (
    f"IP:{API_IP}",
    f"IP:{KUBERNETES_SERVICE_IP}",
    "IP:127.0.0.1",
    "DNS:localhost",
    "DNS:kubernetes",
    "DNS:kubernetes.default",
    "DNS:kubernetes.default.svc",
    "DNS:kubernetes.default.svc.cluster.local",
)
CLIENTS = {
    "admin": "/O=system:masters/CN=admin",
    "kcm": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "proxy": "/CN=system:kube-proxy",
    "coredns": "/CN=coredns",
}
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def make(nodes: list[str], host_url: str) -> None:
    """All certificates, and the kubeconfigs `<name>.conf`; `host.conf` is for outside."""
    PKI.mkdir(parents=True, exist_ok=True)
    ca = ("-subj", "/CN=stopway-e2e-ca", "-keyout", "ca.key", "-out", "ca.crt", "-days", DAYS)
    _openssl("req", "-x509", *_KEY, *ca)
    _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "sa.key")
    _openssl("ec", "-in", "sa.key", "-pubout", "-out", "sa.pub")
    _certificate("apiserver", "/CN=kube-apiserver", ",".join(API_NAMES))
    _certificate("apiserver-kubelet-client", "/O=system:masters/CN=apiserver-kubelet-client")
    _certificate("front-proxy", "/CN=front-proxy")
    clients = CLIENTS | {node: f"/O=system:nodes/CN=system:node:{node}" for node in nodes}
    for name, subject in clients.items():
        _certificate(name, subject)
        _kubeconfig(name, name, API_URL)
    _kubeconfig("host", "admin", host_url)


def _openssl(*arguments: str) -> None:
    run("openssl", *arguments, cwd=PKI)


def _certificate(name: str, subject: str, alternatives: str = "") -> None:
    request, extensions = PKI / f"{name}.csr", PKI / f"{name}.ext"
    names = f"subjectAltName={alternatives}\n" if alternatives else ""
    extensions.write_text(f"extendedKeyUsage=clientAuth,serverAuth\n{names}")
    _openssl(
        *("req", "-new", *_KEY, "-subj", subject),
        *("-keyout", f"{name}.key", "-out", request.name),
    )
    _openssl(
        *("x509", "-req", "-in", request.name, "-CA", "ca.crt", "-CAkey", "ca.key"),
        *("-CAcreateserial", "-days", DAYS, "-extfile", extensions.name, "-out", f"{name}.crt"),
    )
    request.unlink()
    extensions.unlink()


def _kubeconfig(name: str, user: str, url: str) -> None:
    cluster = f'{{server: "{url}", certificate-authority: "{PKI}/ca.crt"}}'
    keys = f'{{client-certificate: "{PKI}/{user}.crt", client-key: "{PKI}/{user}.key"}}'
    (RUN / f"{name}.conf").write_text(
        "apiVersion: v1\n"
        "kind: Config\n"
        "current-context: e2e\n"
        f"clusters: [{{name: e2e, cluster: {cluster}}}]\n"
        f"users: [{{name: {user}, user: {keys}}}]\n"
        f"contexts: [{{name: e2e, context: {{cluster: e2e, user: {user}}}}}]\n"
    )
