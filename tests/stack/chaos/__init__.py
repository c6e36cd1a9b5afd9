"""Chaos on a real stack: from a seed, load and faults at times; then all heals and is checked.

``plan`` draws what happens, ``world`` is what it happens to, ``faults``, ``clients`` and
``signals`` do it, ``journal`` keeps what was seen, and ``checks`` judges it from outside.
"""
