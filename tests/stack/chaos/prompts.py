"""What clients ask: few prompts, so that each greedy answer is known from an undisturbed run."""

from __future__ import annotations

KNOWN_TOKENS = 32  # of each undisturbed answer


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


PROMPTS = (
    _chat("What is the capital of France?"),
    _chat("Tell a long story about a lighthouse."),
    _chat("Count from one to a hundred, in words."),
    _chat("Go on for very long: " + " ".join(f"sea {i} ship" for i in range(40))),
    _chat("Go on: " + " ".join(f"storm {i} light" for i in range(80))),
)


def body(prompt: int, **fields: object) -> dict[str, object]:
    """A chat completion's body: greedy, and going on until something stops it."""
    return {
        "model": "smollm2-135m-instruct",
        "messages": PROMPTS[prompt],
        "temperature": 0.0,
        "ignore_eos": True,
        **fields,
    }
