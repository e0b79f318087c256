"""How sweeps cut prompts into chunks: what of them is computed without a cached context, and what context the rest has.

Means over the prompts of a load. The first chunk of a prompt attends to what is at hand; every later one has a context.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptCuts:
    """The default: prompts are read whole."""

    first_tokens: float = 1.0
    """Of a prompt's tokens, those of its first chunk: 0..1."""
    first_pairs: float = 1.0
    """Of its (query token, key) pairs: 0..1. In layers with a window it is more, which is not counted."""
    context: float = 0.0
    """Cached tokens that a prompt's later chunks read, each chunk all that is before it."""
    later_chunk: float = 0.0
    """Tokens of a later chunk."""

    @classmethod
    def equal(cls, prompt_len: float, num_chunks: float) -> PromptCuts:
        """In chunks of the same size. c of them have contexts of 1, 2 ... c - 1 chunks."""
        chunk = prompt_len / num_chunks
        return cls(
            first_tokens=1.0 / num_chunks,
            first_pairs=chunk * (chunk + 1) / (prompt_len * (prompt_len + 1)),
            context=prompt_len * (num_chunks - 1) / 2,
            later_chunk=chunk,
        )


READ_WHOLE = PromptCuts()
