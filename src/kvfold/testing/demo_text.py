"""What the demo asks: one long document, the project's own, and short questions about it.

Every prompt begins with the same tokens, chat header and document, which a prefix cache can serve.
The document is cut so that question and answer end inside the block in which it ends: then every
question hits the same whole blocks, whoever serves them, and no answer adds a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvfold.errors import ConfigError

SPAN = 128
"""Tokens per block of the demo's engine, and so the unit of a hit."""
SHARED_TOKENS = 25 * SPAN + 8
"""Tokens that all prompts share; the 8 make the document end just inside a block."""
ANSWER_TOKENS = 32

QUESTIONS = (
    "What does kvfold do?",
    "Where does kvfold keep the cache of a long prompt?",
    "What happens to a request when the store dies?",
    "How is damage of the bytes on disk noticed?",
    "What does folding mean?",
)

_HEADER = (
    "<|im_start|>system\nYou answer questions about the document that you are given.<|im_end|>\n"
    "<|im_start|>user\n"
)
_QUESTION = (
    "\n\n---\nQuestion: {}\nAnswer in one short sentence.<|im_end|>\n<|im_start|>assistant\n"
)
_WARM_UP = (
    "The cat sat on the mat, looked out of the window, and thought about nothing at all. " * 5
)

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Prompts:
    """Token ids of everything that the demo asks."""

    shared_tokens: int
    """How many tokens all prompts have in common."""
    questions: tuple[str, ...]
    prompts: tuple[list[int], ...]
    """One for each question."""
    warm_up: list[int]
    """Shares nothing with the others, and is shorter than a block: it leaves nothing in a cache."""

    @property
    def hit_tokens(self) -> int:
        """What each question must load: the whole blocks of the shared tokens."""
        return self.shared_tokens // SPAN * SPAN


def source_root() -> Path:
    """Return the source tree's root. Raises `ConfigError` if kvfold was installed without it."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "docs").is_dir() or not (root / "README.md").is_file():
        raise ConfigError("source tree", str(root), "README.md and docs/: run the demo in a clone")
    return root


def document(root: Path) -> str:
    """Return the project's own documentation as one text."""
    paths = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return "\n\n".join(path.read_text(encoding="utf-8") for path in paths)


def make_prompts(
    text: str,
    encode: Encode,
    questions: Sequence[str] = QUESTIONS,
    shared_tokens: int = SHARED_TOKENS,
) -> Prompts:
    """Return the prompts for `questions` about `text`.

    Raises `ConfigError` if the text is too short, or a question leaves its block.
    """
    shared = encode(_HEADER + text)
    if len(shared) < shared_tokens:
        raise ConfigError("document", f"{len(shared)} tokens", f"at least {shared_tokens}")
    shared = shared[:shared_tokens]
    prompts = []
    for question in questions:
        ids = shared + encode(_QUESTION.format(question))
        if (len(ids) + ANSWER_TOKENS) // SPAN > shared_tokens // SPAN:
            room = SPAN - shared_tokens % SPAN - ANSWER_TOKENS
            raise ConfigError(
                "question", question, f"fewer than {room} tokens, not {len(ids) - shared_tokens}"
            )
        prompts.append(ids)
    return Prompts(shared_tokens, tuple(questions), tuple(prompts), encode(_WARM_UP)[:96])
