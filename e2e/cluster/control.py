"""The control plane: etcd, API server, controllers, scheduler, DNS, and the files they all read."""

from collections.abc import Sequence
from pathlib import Path

from cluster import pki, processes
from cluster.paths import (
    API_IP,
    API_PORT,
    BIN,
    CLUSTER,
    CONTROL,
    LOGS,
    MACHINE,
    PKI,
    POD_CIDR,
    RUN,
    SERVICE_CIDR,
    VENV,
    VENV_IN_POD,
    netns_file,
)
from cluster.shell import in_netns, run, until
from cluster.state import State

ETCD_URL = "http://127.0.0.1:2379"


def write_files(state: State) -> None:
    """Certificates, kubeconfigs and the configuration of what has no flags for it."""
    LOGS.mkdir(parents=True, exist_ok=True)
    pki.make(state.names, f"https://127.0.0.1:{state.api_port}")
    (RUN / "etcd").mkdir(mode=0o700)
    (RUN / "resolv.conf").write_text(f"nameserver {API_IP}\n")
    values = {
        "PKI": PKI,
        "RUN": RUN,
        "API_IP": API_IP,
        "POD_CIDR": POD_CIDR,
        "NODE_GRACE": state.node_grace_s,
        "VENV": VENV,
        "VENV_IN_POD": VENV_IN_POD,
    }
    for template in sorted((CLUSTER / "config").iterdir()):
        text = template.read_text()
        for name, value in values.items():
            text = text.replace(f"${{{name}}}", str(value))
        (RUN / template.name).write_text(text)


def start(state: State) -> None:
    _start(state, "etcd", _etcd())
    _start(state, "kube-apiserver", _apiserver())
    _start(state, "api-inside", _relay_inside(), in_control_plane=True)
    _start(state, "api-outside", _relay_outside(state.api_port), in_control_plane=False)
    until("the API server is ready", api_is_ready, 120, hint=f"See {LOGS}/kube-apiserver.log.")
    _start(state, "kube-controller-manager", _controllers(state.node_grace_s))
    _start(state, "kube-scheduler", _client("kube-scheduler", "scheduler"))
    kubectl("apply", "-f", str(RUN / "cluster.yaml"))
    _start(state, "coredns", (BIN / "coredns", "-conf", RUN / "Corefile"))
    # Test clients and the API server reach Services whichever node is lost. There is no node of
    # this name to be, so it stands in for the first.
    proxy = (BIN / "kube-proxy", "--config", RUN / "proxy.yaml", "--hostname-override", "n1")
    _start(state, "kube-proxy", proxy)


def api_is_ready() -> bool:
    return kubectl("get", "--raw", "/readyz", check=False) == "ok"


def kubectl(*arguments: str, check: bool = True) -> str:
    config = f"--kubeconfig={RUN}/host.conf"
    return run(BIN / "kubectl", config, "--request-timeout=10s", *arguments, check=check)


def _start(
    state: State, name: str, command: Sequence[str | Path], in_control_plane: bool = True
) -> None:
    if in_control_plane:
        command = in_netns(netns_file(CONTROL), command)
    processes.start(state, CONTROL, command, LOGS / f"{name}.log", RUN / f"{name}.pid")


def _etcd() -> list[str | Path]:
    return [
        BIN / "etcd",
        *("--data-dir", RUN / "etcd", "--unsafe-no-fsync", "--log-level", "warn"),
        *("--listen-client-urls", ETCD_URL, "--advertise-client-urls", ETCD_URL),
        *("--listen-peer-urls", "http://127.0.0.1:2380"),
    ]


def _apiserver() -> list[str | Path]:
    return [
        BIN / "kube-apiserver",
        *("--etcd-servers", ETCD_URL, "--advertise-address", API_IP),
        *("--secure-port", str(API_PORT), "--service-cluster-ip-range", SERVICE_CIDR),
        *("--authorization-mode", "Node,RBAC", "--enable-admission-plugins", "NodeRestriction"),
        # The hostPath of the virtual environment is added to pods by policy (cluster.yaml).
        *("--feature-gates", "MutatingAdmissionPolicy=true"),
        *("--runtime-config", "admissionregistration.k8s.io/v1beta1=true"),
        *("--client-ca-file", PKI / "ca.crt", "--allow-privileged", "--profiling=false"),
        *("--tls-cert-file", PKI / "apiserver.crt"),
        *("--tls-private-key-file", PKI / "apiserver.key"),
        *("--kubelet-client-certificate", PKI / "apiserver-kubelet-client.crt"),
        *("--kubelet-client-key", PKI / "apiserver-kubelet-client.key"),
        # Logs and exec: node names resolve nowhere.
        *("--kubelet-preferred-address-types", "InternalIP", "--enable-aggregator-routing"),
        *("--service-account-issuer", "https://kubernetes.default.svc.cluster.local"),
        *("--service-account-key-file", PKI / "sa.pub"),
        *("--service-account-signing-key-file", PKI / "sa.key"),
        *("--requestheader-client-ca-file", PKI / "ca.crt"),
        *("--requestheader-allowed-names", "front-proxy"),
        *("--requestheader-username-headers", "X-Remote-User"),
        *("--requestheader-group-headers", "X-Remote-Group"),
        *("--requestheader-extra-headers-prefix", "X-Remote-Extra-"),
        *("--proxy-client-cert-file", PKI / "front-proxy.crt"),
        *("--proxy-client-key-file", PKI / "front-proxy.key"),
    ]


def _controllers(node_grace_s: int) -> list[str | Path]:
    return [
        *_client("kube-controller-manager", "kcm"),
        *("--use-service-account-credentials", "--root-ca-file", PKI / "ca.crt"),
        *("--service-account-private-key-file", PKI / "sa.key"),
        *("--cluster-signing-cert-file", PKI / "ca.crt"),
        *("--cluster-signing-key-file", PKI / "ca.key"),
        *("--kube-api-qps", "100", "--kube-api-burst", "200"),
        *("--node-monitor-grace-period", f"{node_grace_s}s", "--node-monitor-period", "1s"),
    ]


def _client(program: str, user: str) -> list[str | Path]:
    config = RUN / f"{user}.conf"
    return [
        BIN / program,
        *("--kubeconfig", config, "--authentication-kubeconfig", config),
        *("--authorization-kubeconfig", config),
        *("--leader-elect=false", "--bind-address", "127.0.0.1"),
    ]


def _relay_inside() -> list[str | Path]:
    # By the short name: the address of a Unix socket has 107 bytes at most.
    listen = f"UNIX-LISTEN:{MACHINE}/api.sock,fork,unlink-early"
    return ["socat", listen, f"TCP:{API_IP}:{API_PORT}"]


def _relay_outside(port: int) -> list[str | Path]:
    listen = f"TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr,fork"
    return ["socat", listen, f"UNIX-CONNECT:{MACHINE}/api.sock"]
