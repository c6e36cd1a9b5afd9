#!/bin/bash
# PID 1 of a node, in its own net, mount, pid, uts, ipc and cgroup namespaces (nodes.py starts it):
# killing it kills the whole node at once, and its mounts go with it.
# node-init.sh NAME IP RUN_FOLDER BIN_FOLDER CONTROLLER...
set -eu
name=$1 ip=$2 run=$3 bin=$4; shift 4
hostname "$name"
mount --make-rshared /      # kubelet wants shared propagation; only this mount namespace sees it
for controller; do          # this node's cgroups become the root of /sys/fs/cgroup
  umount "/sys/fs/cgroup/$controller"
  case $controller in
    unified) mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified ;;
    systemd) mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd ;;
    *) mount -t cgroup -o "$controller" cgroup "/sys/fs/cgroup/$controller" ;;
  esac
done
mount -t tmpfs tmpfs /run                       # own sockets, CNI namespaces, xtables lock
mount --bind "$run/$name/lib" /var/lib          # own containerd, kubelet and cni
mount --bind "$run/$name/log" /var/log          # own pods and containers
mkdir -p /var/lib/kubelet /var/log/pods

start() { local log=$1; shift; "$@" >>"/var/log/$log.log" 2>&1 & echo $! >"/run/$log.pid"; }
start_kubelet() {
  start kubelet "$bin/kubelet" --config "$run/kubelet.yaml" --kubeconfig "$run/$name.conf" \
    --hostname-override "$name" --node-ip "$ip" --node-labels "stopway.test/node=$name"
}
start containerd containerd --config "$run/containerd.toml"
until [ -S /run/containerd/containerd.sock ]; do sleep 0.05; done
start_kubelet
start kube-proxy "$bin/kube-proxy" --config "$run/proxy.yaml" --hostname-override "$name"
trap start_kubelet USR1     # after a test has killed the kubelet
while :; do wait || true; sleep 0.2; done
