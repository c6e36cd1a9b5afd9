"""The pure heart of Stopway: what is decided, by whom, and what it costs.

Standard library only. Nothing here reads a clock, draws a random number, awaits, or touches a
tensor: events come in, actions go out, and the same events give the same actions everywhere.
"""
