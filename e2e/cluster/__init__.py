"""The project's own Kubernetes: real components, several nodes, one machine. See ../README.md."""
