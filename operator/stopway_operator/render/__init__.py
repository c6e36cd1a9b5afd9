"""From a spec to Kubernetes objects: pure, and the only place that knows how they look."""
