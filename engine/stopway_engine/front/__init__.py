"""The front: the leader pod's process for everything that is text, and for gateways.

It stands between gateways (JSON over a WebSocket, docs/internal-api.md) and the leader rank
(frames over a Unix socket): it tokenizes, detokenizes, finds stop strings and passes on receipts.
A process of its own, because a busy thread beside the leader's control loop would cost every turn.
"""
