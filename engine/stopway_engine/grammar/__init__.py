"""Structured output: what a client may ask for, its compiler, and the matchers of a step."""
