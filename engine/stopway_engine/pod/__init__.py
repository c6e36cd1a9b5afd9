"""What ``supervise`` is made of: the processes of a pod, its Redis reader, its probes."""
