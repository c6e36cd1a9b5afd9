"""What the end-to-end tests share: waiting, kubectl, HTTP into the cluster, faults, Jaeger."""
